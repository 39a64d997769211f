#include "chunks.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "bitstream.hpp"
#include "cluster.hpp"
#include "error.hpp"
#include "parallel.hpp"
#include "planes.hpp"
#include "predict.hpp"
#include "rans.hpp"
#include "tokens.hpp"

namespace shrinkpoint {

namespace {

size_t chunk_count(uint64_t count, size_t chunk) { return static_cast<size_t>((count + chunk - 1) / chunk); }

struct Span {
    uint64_t start;
    size_t count;
};

// At most `length` positions from the start of the index-th chunk.
Span span_of(size_t index, uint64_t count, size_t chunk, size_t length) {
    const uint64_t start = static_cast<uint64_t>(index) * chunk;
    return {start, static_cast<size_t>(std::min<uint64_t>(length, count - start))};
}

unsigned bytes_of(const Model& model) { return model.width / 8; }

// The contexts of tile after tile. Where they are the same everywhere (a level without factors and companion), the
// first whole tile's serve all others.
class Contexts {
   public:
    Contexts(const Model& model, const Arrays& arrays)
        : model_(model),
          arrays_(arrays),
          vary_(model.tokens == Tokens::Delta || arrays.factors != nullptr || model.companion != Companion::None) {}

    void fill(uint64_t start, size_t count, Tile& tile) {
        if (!vary_ && filled_) return;
        contextualise(model_, arrays_, start, count, tile);
        filled_ = count == kTile;
    }

   private:
    const Model& model_;
    const Arrays& arrays_;
    const bool vary_;
    bool filled_ = false;
};

// Symbol counts and the sum of extra bits over every `stride`-th tile.
class Survey {
   public:
    Survey(const Model& model, const Arrays& arrays)
        : model_(model),
          contexts_(context_count(model)),
          ways_(contexts_ <= 64 ? 4 : 1),
          counts_(size_t{ways_} * contexts_ * 256),
          contexts_of_(model, arrays) {}

    void add(const uint8_t* values, Span span) {
        positions_ += span.count;
        if (model_.tokens == Tokens::Planes) return add_planes(values, span);
        contexts_of_.fill(span.start, span.count, tile_);
        tokenise(model_, values, span.start, span.count, tile_);
        count_symbols(span.count);
        extra_bits_ += extra_sum(tile_, span.count);
    }

    void add(const Survey& other) {
        for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
        extra_bits_ += other.extra_bits_;
        positions_ += other.positions_;
    }

    ContextCounts counts() const {
        ContextCounts out(size_t{contexts_} * 256);
        for (size_t i = 0; i < counts_.size(); ++i) out[i % out.size()] += counts_[i];
        return out;
    }
    uint64_t extra_bits() const { return extra_bits_; }
    uint64_t positions() const { return positions_; }

   private:
    // Neighbours often hold the same symbol: counting them in different tables keeps one increment from waiting for
    // the one before.
    void count_symbols(size_t count) {
        uint32_t* const counts = counts_.data();
        const size_t way = ways_ > 1 ? size_t{contexts_} * 256 : 0;
        const uint16_t* contexts = tile_.contexts;
        const uint8_t* symbols = tile_.symbols;
        size_t i = 0;
        for (; i + 4 <= count; i += 4)
            for (size_t j = 0; j < 4; ++j) ++counts[j * way + size_t{contexts[i + j]} * 256 + symbols[i + j]];
        for (; i < count; ++i) ++counts[size_t{contexts[i]} * 256 + symbols[i]];
    }

    void add_planes(const uint8_t* values, Span span) {
        const unsigned bytes = bytes_of(model_);
        for (size_t i = 0; i < span.count; ++i)
            for (unsigned p = 0; p < bytes; ++p)
                ++counts_[((i & (ways_ - 1)) * contexts_ + p) * 256 + values[(span.start + i) * bytes + p]];
    }

    const Model& model_;
    unsigned contexts_, ways_;
    std::vector<uint32_t> counts_;
    uint64_t extra_bits_ = 0, positions_ = 0;
    Contexts contexts_of_;
    Tile tile_;
};

std::unique_ptr<Survey> survey_all(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count,
                                   unsigned stride, unsigned threads) {
    const size_t tiles = chunk_count(count, kTile * stride);
    auto all = std::make_unique<Survey>(model, arrays);
    std::mutex mutex;
    constexpr size_t kRun = 64;  // tiles that a thread takes at a time
    parallel(chunk_count(tiles, kRun), threads, [&](Indices& runs) {
        const DefaultFloats floats;
        const auto own = std::make_unique<Survey>(model, arrays);
        for (size_t run; runs.take(run);)
            for (size_t t = run * kRun; t < std::min(tiles, (run + 1) * kRun); ++t)
                own->add(values, span_of(t, count, kTile * stride, kTile));
        const std::lock_guard lock(mutex);
        all->add(*own);
    });
    return all;
}

// ---- one chunk: u32 size of the symbol stream, the symbol stream, the extra bits ---------------------------------

class ChunkEncoder {
   public:
    ChunkEncoder(const Model& model, const Arrays& arrays, const Tables& tables,
                 const std::vector<EncoderTable>& encoders)
        : model_(model), contexts_(model, arrays), tables_(tables), encoders_(encoders) {}

    std::vector<uint8_t> encode(const uint8_t* values, Span span) {
        const size_t count = span.count * (model_.tokens == Tokens::Planes ? bytes_of(model_) : 1);
        symbols_.resize(count);
        table_of_.resize(count);
        extra_.resize(span.count * bytes_of(model_) + 2 * kBitSlack);
        const size_t extra_size = model_.tokens == Tokens::Planes ? tokens_of_planes(values, span)
                                                                  : tokens_of_values(values, span);
        stream_.resize(rans_bound(count));
        const size_t size = rans_encode(symbols_.data(), table_of_.data(), count, encoders_, stream_.data(), stream_.size());
        std::vector<uint8_t> out(4 + size + extra_size);
        const auto announced = static_cast<uint32_t>(size);
        std::memcpy(out.data(), &announced, 4);
        std::memcpy(out.data() + 4, stream_.data() + stream_.size() - size, size);
        std::memcpy(out.data() + 4 + size, extra_.data(), extra_size);
        return out;
    }

   private:
    size_t tokens_of_planes(const uint8_t* values, Span span) {
        const unsigned bytes = bytes_of(model_);
        split_planes(values + span.start * bytes, span.count, bytes, symbols_.data());
        for (unsigned p = 0; p < bytes; ++p) std::fill_n(table_of_.data() + p * span.count, span.count, tables_.map[p]);
        return BitWriter(extra_.data()).finish();
    }

    size_t tokens_of_values(const uint8_t* values, Span span) {
        BitWriter bits(extra_.data());
        for (size_t done = 0; done < span.count; done += kTile) {
            const size_t length = std::min(kTile, span.count - done);
            contexts_.fill(span.start + done, length, tile_);
            tokenise(model_, values, span.start + done, length, tile_);
            std::memcpy(symbols_.data() + done, tile_.symbols, length);
            for (size_t i = 0; i < length; ++i) table_of_[done + i] = tables_.map[tile_.contexts[i]];
            write_extra(model_, tile_, length, bits);
        }
        return bits.finish();
    }

    const Model& model_;
    Contexts contexts_;
    const Tables& tables_;
    const std::vector<EncoderTable>& encoders_;
    std::vector<uint8_t> symbols_, table_of_, extra_, stream_;
    Tile tile_;
};

class ChunkDecoder {
   public:
    ChunkDecoder(const Model& model, const Arrays& arrays, const Tables& tables, const std::vector<uint32_t>& entries)
        : model_(model), contexts_(model, arrays), tables_(tables), entries_(entries) {}

    void decode(const uint8_t* data, size_t size, Span span, uint8_t* values) {
        uint32_t stream;
        if (size < 4) throw Truncated("a chunk is shorter than its header");
        std::memcpy(&stream, data, 4);
        if (stream > size - 4 || size - 4 - stream < kBitSlack) throw Truncated("a chunk is shorter than it announces");
        const uint8_t* extra = data + 4 + stream;
        const size_t extra_size = size - 4 - stream - kBitSlack;
        if (model_.tokens == Tokens::Planes)
            decode_planes(data + 4, stream, span, values);
        else
            decode_values(data + 4, stream, extra, extra_size, span, values);
    }

   private:
    void decode_planes(const uint8_t* data, size_t size, Span span, uint8_t* values) {
        const unsigned bytes = bytes_of(model_);
        symbols_.resize(span.count * bytes);
        table_of_.resize(span.count * bytes);
        for (unsigned p = 0; p < bytes; ++p) std::fill_n(table_of_.data() + p * span.count, span.count, tables_.map[p]);
        RansDecoder stream(data, size, symbols_.size(), entries_.data());
        stream.decode(table_of_.data(), symbols_.size(), symbols_.data());
        stream.finish();
        join_planes(symbols_.data(), span.count, bytes, values + span.start * bytes);
    }

    void decode_values(const uint8_t* data, size_t size, const uint8_t* extra, size_t extra_size, Span span,
                       uint8_t* values) {
        RansDecoder stream(data, size, span.count, entries_.data());
        uint64_t position = 0;
        uint8_t tables[kTile];
        for (size_t done = 0; done < span.count; done += kTile) {
            const size_t length = std::min(kTile, span.count - done);
            contexts_.fill(span.start + done, length, tile_);
            for (size_t i = 0; i < length; ++i) tables[i] = tables_.map[tile_.contexts[i]];
            stream.decode(tables, length, tile_.symbols);
            const uint64_t bits = extra_widths(model_, length, tile_);
            if (position + bits > 8 * static_cast<uint64_t>(extra_size)) throw Truncated("the extra bits end too early");
            untokenise(model_, extra, position, span.start + done, length, tile_, values);
            position += bits;
        }
        stream.finish();
        if ((position + 7) / 8 != extra_size) throw Corrupt("a chunk holds more extra bits than its symbols ask for");
    }

    const Model& model_;
    Contexts contexts_;
    const Tables& tables_;
    const std::vector<uint32_t>& entries_;
    std::vector<uint8_t> symbols_, table_of_;
    Tile tile_;
};

// ---- side: u32 size of the tables, tables, factors, u32 size of every chunk ---------------------------------------

template <typename T>
void append(std::vector<uint8_t>& out, const T* data, size_t count) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(data);
    out.insert(out.end(), bytes, bytes + count * sizeof(T));
}

class SideReader {
   public:
    SideReader(const uint8_t* data, size_t size) : next_(data), left_(size) {}

    const uint8_t* take(size_t size) {
        if (size > left_) throw Truncated("the side data end too early");
        const uint8_t* out = next_;
        next_ += size;
        left_ -= size;
        return out;
    }

    template <typename T>
    void read(T* out, size_t count) {
        if (count > left_ / sizeof(T)) throw Truncated("the side data end too early");
        std::memcpy(out, take(count * sizeof(T)), count * sizeof(T));
    }

    size_t left() const { return left_; }

   private:
    const uint8_t* next_;
    size_t left_;
};

std::vector<uint8_t> write_side(const Tables& tables, const Factors* factors, const std::vector<uint32_t>& sizes) {
    std::vector<uint8_t> out;
    const std::vector<uint8_t> written = write_tables(tables);
    const auto size = static_cast<uint32_t>(written.size());
    append(out, &size, 1);
    append(out, written.data(), written.size());
    if (factors != nullptr) {
        append(out, factors->centers.data(), factors->centers.size());
        append(out, factors->rows.data(), factors->rows.size());
        append(out, factors->columns.data(), factors->columns.size());
    }
    append(out, sizes.data(), sizes.size());
    return out;
}

}  // namespace

double measure(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, unsigned stride,
               unsigned threads) {
    const auto survey = survey_all(model, arrays, values, count, stride, threads);
    const ContextCounts counts = survey->counts();
    const Tables tables = cluster(counts);
    const double scale = static_cast<double>(count) / static_cast<double>(survey->positions());
    const double fixed = static_cast<double>(write_tables(tables).size()) * 8;
    const double symbols = cost(counts, tables) - fixed;
    double bits = fixed + scale * (symbols + static_cast<double>(survey->extra_bits()));
    if (arrays.factors != nullptr) bits += 8.0 * static_cast<double>(arrays.factors->rows.size() + arrays.factors->columns.size());
    return bits;
}

Coded encode(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, size_t chunk,
             unsigned threads) {
    const Tables tables = cluster(survey_all(model, arrays, values, count, 1, threads)->counts());
    std::vector<EncoderTable> encoders;
    for (const Frequencies& frequencies : tables.frequencies) encoders.push_back(encoder_table(frequencies));
    std::vector<std::vector<uint8_t>> chunks(chunk_count(count, chunk));
    parallel(chunks.size(), threads, [&](Indices& indices) {
        const DefaultFloats floats;
        const auto encoder = std::make_unique<ChunkEncoder>(model, arrays, tables, encoders);
        for (size_t i; indices.take(i);) chunks[i] = encoder->encode(values, span_of(i, count, chunk, chunk));
    });
    std::vector<uint32_t> sizes;
    size_t total = 0;
    for (const auto& one : chunks) sizes.push_back(static_cast<uint32_t>(one.size())), total += one.size();
    Coded out;
    out.side = write_side(tables, arrays.factors, sizes);
    out.codes.reserve(total);
    for (auto& one : chunks) {
        out.codes.insert(out.codes.end(), one.begin(), one.end());
        std::vector<uint8_t>().swap(one);
    }
    return out;
}

void decode(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
            const uint8_t* codes, size_t codes_size, uint8_t* values, uint64_t count, size_t chunk, unsigned threads) {
    SideReader reader(side, side_size);
    uint32_t tables_size;
    reader.read(&tables_size, 1);
    const uint8_t* written = reader.take(tables_size);
    const Tables tables = read_tables(written, tables_size, context_count(model));
    if (factors != nullptr) {
        reader.read(factors->centers.data(), factors->centers.size());
        for (const int32_t center : factors->centers)
            if (center < 0 || center > 1 << 20) throw Corrupt("a factor is out of range");
        reader.read(factors->rows.data(), factors->rows.size());
        reader.read(factors->columns.data(), factors->columns.size());
        arrays.factors = factors;
    }
    const size_t chunks = chunk_count(count, chunk);
    if (reader.left() != chunks * sizeof(uint32_t)) throw Corrupt("the side data do not list one size a chunk");
    std::vector<uint32_t> sizes(chunks);
    reader.read(sizes.data(), chunks);
    std::vector<uint64_t> starts(1, 0);
    for (const uint32_t size : sizes) starts.push_back(starts.back() + size);
    if (starts.back() > codes_size) throw Truncated("the codes are shorter than their chunks");
    if (starts.back() < codes_size) throw Corrupt("the codes are longer than their chunks");
    std::vector<uint32_t> entries(tables.frequencies.size() * kProbabilityScale);
    for (size_t t = 0; t < tables.frequencies.size(); ++t)
        decoder_table(tables.frequencies[t], entries.data() + t * kProbabilityScale);
    parallel(chunks, threads, [&](Indices& indices) {
        const DefaultFloats floats;
        const auto decoder = std::make_unique<ChunkDecoder>(model, arrays, tables, entries);
        for (size_t i; indices.take(i);)
            decoder->decode(codes + starts[i], sizes[i], span_of(i, count, chunk, chunk), values);
    });
}

}  // namespace shrinkpoint
