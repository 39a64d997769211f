#include "entropy/record_codec.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "base/bit_writer.hpp"
#include "base/error.hpp"
#include "base/parallel.hpp"
#include "base/simd.hpp"
#include "entropy/byte_model.hpp"
#include "entropy/byte_planes.hpp"
#include "entropy/context_clustering.hpp"
#include "entropy/histogram.hpp"
#include "entropy/predict.hpp"
#include "entropy/rans.hpp"
#include "entropy/symbol_range.hpp"
#include "entropy/table_map.hpp"
#include "entropy/tiles.hpp"
#include "entropy/tokens.hpp"

namespace shrinkpoint {

namespace {

// ---- what a chunk's encoder checks ---------------------------------------------------------------------------------

// True if a model drops bits that a value might have.
bool may_drop_bits(const Model& model) {
    return model.shift > 0 || (model.tokens == Tokens::Level && !model.has_sign);
}

SHRINKPOINT_KERNEL(uint64_t, union_of, (const uint8_t* values, size_t words), (values, words)) {
    uint64_t all = 0;
    for (size_t i = 0; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, values + 8 * i, 8);
        all |= word;
    }
    return all;
}

// Throws DropsBits if a value of the span has a bit that the model does not store.
void check_bits(const Model& model, const uint8_t* values, Span span) {
    const unsigned bytes = bytes_of(model);
    const uint8_t* const data = values + span.start * bytes;
    const size_t size = span.count * bytes, words = size / 8;
    uint64_t all = union_of(data, words), rest = 0;
    std::memcpy(&rest, data + 8 * words, size - 8 * words);
    all |= rest;
    for (unsigned width = 32; width >= model.width; width /= 2) all |= all >> width;
    const uint64_t sign = uint64_t{1} << (model.width - 1);
    const bool has_sign = model.has_sign || model.tokens != Tokens::Level;
    if ((all & ((uint64_t{1} << model.shift) - 1)) != 0 || (!has_sign && (all & sign) != 0))
        throw DropsBits("a run that drops bits which some number has");
}

// Thrown for a symbol of a delta for which tables made from a sample have no frequency.
struct Uncovered {};

// ---- one chunk: u32 size of the symbol stream, the symbol stream, the extra bits ---------------------------------

// Gives each chunk its place behind the previous chunk. Threads that come early wait.
class Places {
   public:
    // Returns the place of chunk `index`, of `size` bytes. If another thread has failed, throws that thread's error, so
    // that the error does not depend on which thread comes first.
    size_t take(size_t index, size_t size) {
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [&] { return next_ == index || error_; });
        if (error_) std::rethrow_exception(error_);
        const size_t place = end_;
        end_ += size;
        ++next_;
        ready_.notify_all();
        return place;
    }

    void fail(const std::exception_ptr& error) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = error;
        ready_.notify_all();
    }

    size_t end() const { return end_; }

   private:
    std::mutex mutex_;
    std::condition_variable ready_;
    size_t next_ = 0, end_ = 0;
    std::exception_ptr error_;
};

// Encodes one chunk after the other, each to its place.
class ChunkEncoder {
   public:
    ChunkEncoder(const Model& model, const Arrays& arrays, const ContextTables& tables, const SymbolRange& cover,
                 const RansEncoder& rans)
        : model_(model),
          contexts_(model, arrays),
          tables_(tables),
          cover_(cover),
          rans_(rans),
          parent_(is_under_parent(model, arrays) ? arrays.base : nullptr) {}

    // Encodes a chunk and returns its size. Throws Uncovered and DropsBits.
    uint32_t encode(const uint8_t* values, Span span, size_t index, Places& places, uint8_t* out) {
        const size_t count = span.count * (model_.tokens == Tokens::Planes ? bytes_of(model_) : 1);
        if (may_drop_bits(model_)) check_bits(model_, values, span);
        symbols_.resize(count);
        if (several()) table_of_.resize(count);
        extra_.resize(span.count * bytes_of(model_) + 2 * kBitSlack);
        const size_t extra_size = model_.tokens == Tokens::Planes ? tokens_of_planes(values, span)
                                  : parent_ != nullptr            ? tokens_of_codes(values, span)
                                                                  : tokens_of_values(values, span);
        stream_.resize(rans_bound(count));
        const size_t size = rans_.encode(symbols_.data(), several() ? table_of_.data() : nullptr, count, stream_.data(),
                                         stream_.size());
        uint8_t* const place = out + places.take(index, 4 + size + extra_size);
        const auto announced = static_cast<uint32_t>(size);
        std::memcpy(place, &announced, 4);
        std::memcpy(place + 4, stream_.data() + stream_.size() - size, size);
        std::memcpy(place + 4 + size, extra_.data(), extra_size);
        return static_cast<uint32_t>(4 + size + extra_size);
    }

   private:
    bool several() const { return rans_.tables() > 1; }

    size_t tokens_of_planes(const uint8_t* values, Span span) {
        const unsigned bytes = bytes_of(model_);
        split_planes(values + span.start * bytes, span.count, bytes, symbols_.data());
        for (unsigned p = 0; several() && p < bytes; ++p)
            std::fill_n(table_of_.data() + p * span.count, span.count, tables_.map[p]);
        return BitWriter(extra_.data()).finish();
    }

    size_t tokens_of_codes(const uint8_t* values, Span span) {
        fold_codes(values + span.start, parent_ + span.start, span.count, symbols_.data());
        if (several())
            look_up_bytes(tables_.map.data(), tables_.map.size(), parent_ + span.start, span.count, table_of_.data());
        return BitWriter(extra_.data()).finish();
    }

    size_t tokens_of_values(const uint8_t* values, Span span) {
        BitWriter bits(extra_.data());
        for (size_t done = 0; done < span.count; done += kTile) {
            const size_t length = std::min(kTile, span.count - done);
            contexts_.fill(span.start + done, length, tile_);
            tokenise(model_, values, span.start + done, length, tile_);
            if (!covers(cover_, tile_.symbols, length)) {
                if (model_.tokens != Tokens::Level) throw Uncovered{};
                escape(model_, cover_, values, span.start + done, length, tile_);
            }
            std::memcpy(symbols_.data() + done, tile_.symbols, length);
            if (several())
                look_up(tables_.map.data(), tables_.map.size(), tile_.contexts, length, table_of_.data() + done);
            write_extra(model_, tile_, length, bits);
        }
        return bits.finish();
    }

    const Model& model_;
    Contexts contexts_;
    const ContextTables& tables_;
    const SymbolRange cover_;
    const RansEncoder& rans_;
    const uint8_t* const parent_;  // codes whose only context is the parent's code
    Buffer symbols_, table_of_, extra_, stream_;
    Tile tile_;
};

// Decodes a chunk in pieces, so that two chunks can be decoded side by side.
class ChunkDecoder {
   public:
    ChunkDecoder(const Model& model, const Arrays& arrays, const ContextTables& tables, const DecoderTables& decoder_tables,
                 uint8_t* values, std::unique_ptr<CodeTiles> tiles)
        : model_(model),
          contexts_(model, arrays),
          tables_(tables),
          decoder_tables_(decoder_tables),
          values_(values),
          tiles_(std::move(tiles)),
          parent_(is_under_parent(model, arrays) ? arrays.base : nullptr),
          in_place_(arrays.in_place && model.predictor == Predictor::Base) {}

    void begin(const uint8_t* data, size_t size, Span span) {
        uint32_t stream;
        if (size < 4) throw Truncated("a chunk is shorter than its header");
        std::memcpy(&stream, data, 4);
        if (stream > size - 4 || size - 4 - stream < kBitSlack) throw Truncated("a chunk is shorter than it announces");
        extra_ = {data + 4 + stream, data + size};
        position_ = 0, done_ = 0, span_ = span;
        stream_.emplace(data + 4, stream, span.count * (planes() ? bytes_of(model_) : 1), decoder_tables_);
    }

    bool more() const { return done_ < span_.count; }

    // Number of symbols in the next piece.
    size_t piece() const {
        return planes() ? span_.count * bytes_of(model_) : std::min<size_t>(kTile, span_.count - done_);
    }

    void decode_piece() {
        prepare();
        stream_->decode(table_of_, piece(), symbols_);
        take();
    }

    // Decodes the next pieces of two chunks, which must have the same number of symbols.
    static void decode_pieces(ChunkDecoder& a, ChunkDecoder& b) {
        a.prepare(), b.prepare();
        RansDecoder::decode_two(*a.stream_, a.table_of_, a.symbols_, *b.stream_, b.table_of_, b.symbols_, a.piece());
        a.take(), b.take();
    }

    void finish() const {
        stream_->finish();
        if ((position_ + 7) / 8 != static_cast<size_t>(extra_.end - extra_.data) - kBitSlack)
            throw Corrupt("a chunk holds more extra bits than its symbols ask for");
    }

   private:
    bool planes() const { return model_.tokens == Tokens::Planes; }

    // Finds the table of each symbol of the next piece and a place for the symbols.
    void prepare() {
        const size_t count = piece();
        const bool several = decoder_tables_.count > 1;
        if (several && tables_buffer_.size() < count) tables_buffer_.resize(count);
        table_of_ = several ? tables_buffer_.data() : nullptr;
        symbols_ = tile_.symbols;
        if (tiles_ != nullptr)
            return tiles_->predict(span_.start + done_, count, tables_.map, several ? tables_buffer_.data() : nullptr);
        if (!planes()) {
            const uint8_t* const bytes = fill_contexts(span_.start + done_, count);
            if (several && bytes != nullptr)
                look_up_bytes(tables_.map.data(), tables_.map.size(), bytes, count, tables_buffer_.data());
            else if (several)
                look_up(tables_.map.data(), tables_.map.size(), tile_.contexts, count, tables_buffer_.data());
            if (in_place_) hold_prediction(count);
            return;
        }
        if (symbols_buffer_.size() < count) symbols_buffer_.resize(count);
        symbols_ = symbols_buffer_.data();
        for (unsigned p = 0; several && p < bytes_of(model_); ++p)
            std::fill_n(tables_buffer_.data() + p * span_.count, span_.count, tables_.map[p]);
    }

    // Finds the prediction and the contexts. Contexts of a byte each are returned; others are in the tile, and null is
    // returned.
    const uint8_t* fill_contexts(uint64_t start, size_t count) {
        if (parent_ == nullptr) {
            contexts_.fill(start, count, tile_);
            return nullptr;
        }
        tile_.prediction = parent_ + start;
        return parent_ + start;
    }

    // Copies the prediction to where no value is written, if the prediction is the base itself.
    void hold_prediction(size_t count) {
        std::memcpy(tile_.predicted, tile_.prediction, count * bytes_of(model_));
        tile_.prediction = tile_.predicted;
    }

    // Turns the piece's symbols into values.
    void take() {
        if (planes()) {
            join_planes(symbols_, span_.count, bytes_of(model_), values_ + span_.start * bytes_of(model_));
            done_ = span_.count;
            return;
        }
        const size_t count = piece();
        if (tiles_ != nullptr) {
            tiles_->take(span_.start + done_, count, symbols_);
            done_ += count;
            return;
        }
        const uint64_t bits = extra_widths(model_, count, tile_);
        const auto held = static_cast<uint64_t>(extra_.end - extra_.data) - kBitSlack;
        if (position_ + bits > 8 * held) throw Truncated("the extra bits end too early");
        untokenise(model_, extra_, position_, span_.start + done_, count, tile_, values_);
        position_ += bits;
        done_ += count;
    }

    const Model& model_;
    Contexts contexts_;
    const ContextTables& tables_;
    const DecoderTables& decoder_tables_;
    uint8_t* values_;
    const std::unique_ptr<CodeTiles> tiles_;  // for codes without arrays
    const uint8_t* const parent_;  // codes whose only context is the parent's code
    const bool in_place_;
    std::optional<RansDecoder> stream_;
    BitSpan extra_{};
    uint64_t position_ = 0;
    size_t done_ = 0;
    Span span_{};
    const uint8_t* table_of_ = nullptr;
    uint8_t* symbols_ = nullptr;
    Buffer symbols_buffer_, tables_buffer_;
    Tile tile_;
};

// ---- side: u32 size of the tables, tables, factors, u32 size of every chunk ---------------------------------------

template <typename T>
void append(Buffer& out, const T* data, size_t count) {
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

    ContextTables read_tables(unsigned contexts) {
        uint32_t size;
        read(&size, 1);
        const uint8_t* const written = take(size);
        return shrinkpoint::read_tables(written, size, contexts);
    }

    size_t left() const { return left_; }

   private:
    const uint8_t* next_;
    size_t left_;
};

Buffer write_side(const ContextTables& tables, const Factors* factors, const std::vector<uint32_t>& sizes) {
    Buffer out;
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

// Tables, and the range of symbols that all of them can code.
struct SampledTables {
    ContextTables tables;
    SymbolRange cover;
};

// Stride between the tiles from which tables are made. Records of few values, and tokens of one byte, are counted
// completely.
unsigned sample_stride(const Model& model, uint64_t count) {
    if (model.tokens != Tokens::Level && model.tokens != Tokens::Delta) return 1;
    return static_cast<unsigned>(std::clamp<uint64_t>(count / kSampleSize, 1, kMaxStride));
}

// True if most numbers equal the parent's. Then a frequency for every symbol that the sample lacks costs more bits than
// it saves, in every table, and so do the changes that are rare in a sample. Counting all numbers saves 10%.
bool is_sparse(const Model& model, const ContextCounts& counts) {
    if (model.tokens != Tokens::Delta || model.predictor != Predictor::Base) return false;
    uint64_t total = 0, unchanged = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        total += counts[i];
        if (i % 256 == 0) unchanged += counts[i];
    }
    return 4 * unchanged >= 3 * total;
}

SampledTables sampled_tables(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count,
                             unsigned stride, unsigned threads) {
    const ContextCounts counts = build_histogram(model, arrays, values, count, stride, threads)->counts();
    if (stride == 1) return {cluster_contexts(counts), kAllSymbols};
    if (is_sparse(model, counts)) return sampled_tables(model, arrays, values, count, 1, threads);
    const SymbolRange cover = widened(model, range_of(counts));
    return {cluster_contexts(counts, &cover), cover};
}

EncodedRecord encode_with(const SampledTables& sampled, const Model& model, const Arrays& arrays,
                          const uint8_t* values, uint64_t count, size_t chunk, unsigned threads) {
    const ContextTables& tables = sampled.tables;
    const RansEncoder rans(tables.frequencies);
    const size_t chunks = chunk_count(count, chunk), per_value = model.tokens == Tokens::Planes ? bytes_of(model) : 1;
    // Memory that is not used is never touched.
    Buffer codes(rans_bound(count * per_value) + count * bytes_of(model) + chunks * (rans_bound(0) + 4 * kBitSlack));
    std::vector<uint32_t> sizes(chunks);
    Places places;
    parallel(chunks, threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        try {
            const auto encoder = std::make_unique<ChunkEncoder>(model, arrays, tables, sampled.cover, rans);
            for (size_t i; indices.take(i);)
                sizes[i] = encoder->encode(values, span_of(i, count, chunk, chunk), i, places, codes.data());
        } catch (...) {
            places.fail(std::current_exception());
            throw;
        }
    });
    codes.resize(places.end());
    return {write_side(tables, arrays.factors, sizes), std::move(codes)};
}

// Decodes two chunks side by side while their pieces have one size.
void decode_both(ChunkDecoder& a, ChunkDecoder& b) {
    while (a.more() && b.more() && a.piece() == b.piece()) ChunkDecoder::decode_pieces(a, b);
    while (a.more()) a.decode_piece();
    while (b.more()) b.decode_piece();
    a.finish(), b.finish();
}

// Decodes chunks in pairs, and the last one alone if their number is odd.
void decode_with(const Model& model, const Arrays& arrays, const ContextTables& tables, SideReader sizes_reader,
                 const uint8_t* codes, size_t codes_size, uint8_t* values, const ChunkRange& range,
                 const MakeTiles& make_tiles, unsigned threads) {
    const size_t all = chunk_count(range.count, range.chunk), chunks = range.last - range.first;
    if (sizes_reader.left() != all * sizeof(uint32_t)) throw Corrupt("the side data do not list one size a chunk");
    sizes_reader.take(range.first * sizeof(uint32_t));
    std::vector<uint32_t> sizes(chunks);
    sizes_reader.read(sizes.data(), chunks);
    std::vector<uint64_t> starts(1, 0);
    for (const uint32_t size : sizes) starts.push_back(starts.back() + size);
    if (starts.back() > codes_size) throw Truncated("the codes are shorter than their chunks");
    if (starts.back() < codes_size) throw Corrupt("the codes are longer than their chunks");
    const DecoderTables decoder_tables(tables.frequencies);
    parallel((chunks + 1) / 2, threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        const auto one = std::make_unique<ChunkDecoder>(model, arrays, tables, decoder_tables, values, make_tiles());
        const auto other = std::make_unique<ChunkDecoder>(model, arrays, tables, decoder_tables, values, make_tiles());
        const auto begin = [&](ChunkDecoder& decoder, size_t i) {
            decoder.begin(codes + starts[i], sizes[i], span_of(i, range.values(), range.chunk, range.chunk));
        };
        for (size_t i; indices.take(i);) {
            begin(*one, 2 * i);
            if (2 * i + 1 < chunks) {
                begin(*other, 2 * i + 1);
                decode_both(*one, *other);
            } else {
                while (one->more()) one->decode_piece();
                one->finish();
            }
        }
    });
}

}  // namespace

EncodedRecord encode(const Model& model, const Arrays& arrays, const uint8_t* values, uint64_t count, size_t chunk,
             unsigned threads) {
    const unsigned stride = sample_stride(model, count);
    if (stride > 1) {
        try {
            return encode_with(sampled_tables(model, arrays, values, count, stride, threads), model, arrays, values,
                               count, chunk, threads);
        } catch (const Uncovered&) {  // a difference out of the sample's range: make the tables from all values
        }
    }
    return encode_with(sampled_tables(model, arrays, values, count, 1, threads), model, arrays, values, count, chunk,
                       threads);
}

void decode(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
            const uint8_t* codes, size_t codes_size, uint8_t* values, uint64_t count, size_t chunk, unsigned threads) {
    decode_chunks(model, arrays, factors, side, side_size, codes, codes_size, values,
                   {count, chunk, 0, chunk_count(count, chunk)}, threads);
}

void decode_chunks(const Model& model, Arrays arrays, Factors* factors, const uint8_t* side, size_t side_size,
                    const uint8_t* codes, size_t codes_size, uint8_t* values, const ChunkRange& range,
                    unsigned threads) {
    SideReader reader(side, side_size);
    const ContextTables tables = reader.read_tables(context_count(model, arrays));
    if (factors != nullptr) {
        reader.read(factors->centers.data(), factors->centers.size());
        for (const int32_t center : factors->centers)
            if (center < 0 || center > kMaxCenter) throw Corrupt("a factor is out of range");
        reader.read(factors->rows.data(), factors->rows.size());
        reader.read(factors->columns.data(), factors->columns.size());
        factors->origin = range.start();
        arrays.factors = factors;
    }
    arrays.in_place = arrays.base == values;
    decode_with(model, arrays, tables, reader, codes, codes_size, values, range, [] { return nullptr; }, threads);
}

void decode_tiles(const Model& model, const uint8_t* side, size_t side_size, const uint8_t* codes, size_t codes_size,
                  const ChunkRange& range, const MakeTiles& make_tiles, unsigned threads) {
    SideReader reader(side, side_size);
    const Arrays none;
    const ContextTables tables = reader.read_tables(context_count(model, none));
    decode_with(model, none, tables, reader, codes, codes_size, nullptr, range, make_tiles, threads);
}

}  // namespace shrinkpoint
