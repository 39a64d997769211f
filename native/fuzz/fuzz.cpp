// Fuzzes records, their tables and their streams: as the encoder writes them, and malformed.
#include <cstdio>
#include <memory>
#include <vector>

#include "base/bit_pack.hpp"
#include "base/error.hpp"
#include "base/simd.hpp"
#include "entropy/context_clustering.hpp"
#include "entropy/predict.hpp"
#include "entropy/rans.hpp"
#include "entropy/record_codec.hpp"
#include "entropy/tokens.hpp"
#include "fuzz/cases.hpp"
#include "fuzz/checks.hpp"

namespace shrinkpoint {

Tally tally;

namespace {

enum class Outcome { Impossible, Refused, Decoded };

// Does what the binding does, with every buffer of exactly its size.
Outcome decode_exactly(const Case& c, unsigned threads, Bytes& values) {
    const size_t bytes = c.model.width / 8;
    const auto part = [&](const Bytes& all, size_t size) { return Exact(all, size * c.count); };
    const Exact base = part(c.base, bytes), moment1 = part(c.moment1, 4), moment2 = part(c.moment2, 4);
    const Exact moment1_base = part(c.moment1_base, 4), hint = part(c.hint, 1);
    const Exact side(c.side), codes(c.codes), out(Bytes(c.count * bytes, 0xa5));
    Arrays arrays;
    arrays.base = c.base.empty() ? nullptr : base.data();
    arrays.moment1 = c.moment1.empty() ? nullptr : moment1.floats();
    arrays.moment2 = c.moment2.empty() ? nullptr : moment2.floats();
    arrays.moment1_base = c.moment1_base.empty() ? nullptr : moment1_base.floats();
    arrays.hint = c.hint.empty() ? nullptr : hint.data();
    Factors factors;
    if (!passes([&] { check(c.model, arrays, c.has_factors); })) return Outcome::Refused;
    if (c.has_factors && !lay_out(c.shapes, c.count, factors)) return Outcome::Impossible;
    const bool decoded = passes([&] {
        decode(c.model, arrays, c.has_factors ? &factors : nullptr, side.data(), c.side.size(), codes.data(),
               c.codes.size(), out.data(), c.count, c.chunk, threads);
    });
    values.assign(out.data(), out.data() + c.count * bytes);
    return decoded ? Outcome::Decoded : Outcome::Refused;
}

// Decodes the chunks [first, last) of a case alone, from their own codes.
Outcome decode_chunks(const Case& c, size_t first, size_t last, const Bytes& own, unsigned threads, Bytes& values) {
    const size_t bytes = c.model.width / 8;
    const ChunkRange range{c.count, c.chunk, first, last};
    const auto part = [&](const Bytes& all, size_t size) {
        if (all.empty()) return Bytes();
        const auto begin = all.begin() + static_cast<ptrdiff_t>(size * range.start());
        return Bytes(begin, begin + static_cast<ptrdiff_t>(size * range.values()));
    };
    const Exact base(part(c.base, bytes)), moment1(part(c.moment1, 4)), moment2(part(c.moment2, 4));
    const Exact moment1_base(part(c.moment1_base, 4)), hint(part(c.hint, 1));
    const Exact side(c.side), codes(own), out(Bytes(range.values() * bytes, 0xa5));
    Arrays arrays;
    arrays.base = c.base.empty() ? nullptr : base.data();
    arrays.moment1 = c.moment1.empty() ? nullptr : moment1.floats();
    arrays.moment2 = c.moment2.empty() ? nullptr : moment2.floats();
    arrays.moment1_base = c.moment1_base.empty() ? nullptr : moment1_base.floats();
    arrays.hint = c.hint.empty() ? nullptr : hint.data();
    Factors factors;
    if (!passes([&] { check(c.model, arrays, c.has_factors); })) return Outcome::Refused;
    if (c.has_factors && !lay_out(c.shapes, c.count, factors)) return Outcome::Impossible;
    const bool decoded = passes([&] {
        decode_chunks(c.model, arrays, c.has_factors ? &factors : nullptr, side.data(), c.side.size(), codes.data(),
                       own.size(), out.data(), range, threads);
    });
    values.assign(out.data(), out.data() + range.values() * bytes);
    return decoded ? Outcome::Decoded : Outcome::Refused;
}

// Encodes the case and checks that it decodes to the same. Returns false if the model cannot code it.
bool encode_exactly(Choices& choose, Case& c, const Bytes& wanted) {
    const Exact values(wanted), base(c.base), moment1(c.moment1), moment2(c.moment2), moment1_base(c.moment1_base);
    const Exact hint(c.hint);
    Arrays arrays;
    arrays.base = c.base.empty() ? nullptr : base.data();
    arrays.moment1 = c.moment1.empty() ? nullptr : moment1.floats();
    arrays.moment2 = c.moment2.empty() ? nullptr : moment2.floats();
    arrays.moment1_base = c.moment1_base.empty() ? nullptr : moment1_base.floats();
    arrays.hint = c.hint.empty() ? nullptr : hint.data();
    if (!passes([&] { check(c.model, arrays, c.has_factors); })) return false;
    Factors factors;
    if (c.has_factors) {
        expect(lay_out(c.shapes, c.count, factors), "the shapes do not cover the values");
        fit_factors(values.data(), c.model.width, c.model.mantissa, c.model.fine, factors);
        arrays.factors = &factors;
    }
    const unsigned threads = 1 + (choose.one_in(16) ? 2 : 0);
    if (choose.one_in(8))
        expect(estimate_bits(c.model, arrays, values.data(), c.count, 1 + choose.below(3), threads) >= 0, "a negative size");
    const EncodedRecord coded = encode(c.model, arrays, values.data(), c.count, c.chunk, threads);
    c.side.assign(coded.side.begin(), coded.side.end());
    c.codes.assign(coded.codes.begin(), coded.codes.end());
    return true;
}

// Prints everything besides the bytes that a failure depends on.
void print(const Case& c) {
    const Model& m = c.model;
    std::fprintf(stderr, "tokens %d predictor %d companion %d width %u mantissa %u fine %u shift %u sign %d bias %d top %d "
                 "parameters %g %g %g %g count %llu chunk %zu factors %d hint %d side %zu codes %zu\n",
                 static_cast<int>(m.tokens), static_cast<int>(m.predictor), static_cast<int>(m.companion), m.width,
                 m.mantissa, m.fine, m.shift, m.has_sign, m.bias, m.top, static_cast<double>(m.parameters[0]),
                 static_cast<double>(m.parameters[1]), static_cast<double>(m.parameters[2]),
                 static_cast<double>(m.parameters[3]), static_cast<unsigned long long>(c.count), c.chunk, c.has_factors,
                 !c.hint.empty(), c.side.size(), c.codes.size());
}

void limit(unsigned level) { limit_simd(static_cast<Simd>(level)); }

// Checks that results are the same with every instruction set.
void decode_mutant(Choices& choose, const Case& c) {
    Bytes values, again;
    const Outcome outcome = decode_exactly(c, 1 + (choose.one_in(16) ? 2 : 0), values);
    if (outcome == Outcome::Impossible) return void(++tally.impossible);
    ++(outcome == Outcome::Decoded ? tally.accepted : tally.refused);
    if (!choose.one_in(4)) return;
    const auto before = simd();
    limit(choose.below(3));
    expect(decode_exactly(c, 1, again) == outcome, "refused with one instruction set and not with another");
    expect(outcome != Outcome::Decoded || values == again, "instruction sets differ");
    limit_simd(before);
}

// Checks that any range of a valid record equals that part of the whole. A range of a mutant is anything, or refused.
void fuzz_range(Choices& choose, const Case& c, const Bytes& values) {
    const size_t chunks = static_cast<size_t>((c.count + c.chunk - 1) / c.chunk), bytes = c.model.width / 8;
    const size_t first = choose.below(static_cast<unsigned>(chunks));
    const size_t last = first + 1 + choose.below(static_cast<unsigned>(chunks - first));
    const std::vector<uint32_t> sizes = elements<uint32_t>({c.side.end() - static_cast<ptrdiff_t>(4 * chunks), c.side.end()});
    ptrdiff_t begin = 0, end = 0;
    for (size_t i = 0; i < last; ++i) (i < first ? begin : end) += sizes[i];
    Bytes own(c.codes.begin() + begin, c.codes.begin() + begin + end), decoded;
    const ChunkRange range{c.count, c.chunk, first, last};
    const auto from = values.begin() + static_cast<ptrdiff_t>(range.start() * bytes);
    const Bytes expected(from, from + static_cast<ptrdiff_t>(range.values() * bytes));
    const bool same = decode_chunks(c, first, last, own, 1 + choose.below(2), decoded) == Outcome::Decoded;
    if (!same || decoded != expected) print(c);
    expect(same && decoded == expected, "a range differs");
    for (unsigned i = 0; i < 4; ++i) {
        Case mutant = c;
        Bytes codes = own;
        mutate(choose, choose.one_in(2) ? mutant.side : codes, own);
        decode_chunks(mutant, first, last, codes, 1, decoded);
    }
}

// A record with random tables and codes, of a valid model and valid sizes.
void fuzz_unwritten(Choices& choose, Case c) {
    const size_t chunks = static_cast<size_t>((c.count + c.chunk - 1) / c.chunk);
    if (chunks > 64) return;
    const Bytes tables = choose.bytes(choose.below(1024));
    c.side = bytes_of_all(std::vector<uint32_t>{static_cast<uint32_t>(tables.size())});
    c.side.insert(c.side.end(), tables.begin(), tables.end());
    c.codes = choose.bytes(std::max<size_t>(choose.left(), choose.below(256)));
    std::vector<uint32_t> sizes(chunks, static_cast<uint32_t>(c.codes.size() / chunks));
    sizes.back() += static_cast<uint32_t>(c.codes.size() % chunks);
    const Bytes rest = bytes_of_all(sizes);
    c.side.insert(c.side.end(), rest.begin(), rest.end());
    decode_mutant(choose, c);
}

}  // namespace

void fuzz_chunks(Choices& choose) {
    Bytes values, decoded;
    Case c = make_case(choose, values);
    if (choose.left() > 0 && choose.one_in(2)) return fuzz_unwritten(choose, std::move(c));
    if (!encode_exactly(choose, c, values)) return;
    for (unsigned level = 0; level < 3; ++level) {
        limit(level);
        const bool same = decode_exactly(c, 1, decoded) == Outcome::Decoded && decoded == values;
        if (!same) print(c);
        expect(same, "a round trip differs");
    }
    limit(choose.below(3));
    fuzz_range(choose, c, values);
    for (unsigned i = 0; i < 24; ++i) {
        Case mutant = c;
        for (unsigned n = 1 + choose.below(3); n > 0; --n) mutate(choose, mutant);
        decode_mutant(choose, mutant);
    }
}

void fuzz_tables(Choices& choose) {
    const unsigned contexts = 1 + choose.below(kMaxContexts);
    const ContextTables tables = make_tables(choose, contexts);
    Bytes written = write_tables(tables);
    const Exact whole(written);
    const ContextTables again = read_tables(whole.data(), written.size(), contexts);
    expect(again.map == tables.map && again.frequencies == tables.frequencies, "tables do not come back");
    for (unsigned i = 0; i < 32; ++i) {
        Bytes mutant = choose.one_in(8) ? choose.bytes(choose.below(64)) : written;
        mutate(choose, mutant, written);
        const Exact exact(mutant);
        const unsigned asked = choose.one_in(4) ? 1 + choose.below(kMaxContexts) : contexts;
        passes([&] {
            const ContextTables read = read_tables(exact.data(), mutant.size(), asked);
            std::vector<uint32_t> entries(kProbabilityScale);
            for (const Frequencies& frequencies : read.frequencies) decoder_table(frequencies, entries.data());
            for (const uint8_t table : read.map) expect(table < read.frequencies.size(), "a table that is not there");
        });
    }
}

void fuzz_bits(Choices& choose) {
    const unsigned bits = 1 + choose.below(32);
    const size_t count = choose.below(200);
    const Exact codes(choose.bytes(4 * count)), packed(Bytes(packed_size(count, bits))), back(Bytes(4 * count));
    pack_bits(codes.words(), count, bits, packed.data());
    unpack_bits(packed.data(), count, bits, back.words());
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    for (size_t i = 0; i < count; ++i) expect(back.words()[i] == (codes.words()[i] & mask), "bits do not come back");
}

namespace {

struct Stream {
    Bytes data, tables, symbols;
};

// Gives most slots to symbol 0 in some tables, up to all of them.
void make_first_frequent(Choices& choose, std::vector<Frequencies>& tables) {
    for (Frequencies& table : tables) {
        if (choose.one_in(4)) continue;
        const auto others = static_cast<uint16_t>(choose.below(4));
        table.fill(0);
        table[0] = static_cast<uint16_t>(kProbabilityScale - others);
        for (unsigned i = 0; i < others; ++i) ++table[1 + choose.below(255)];
    }
}

// In most streams symbol 0 is as frequent as it may be.
Stream make_stream(Choices& choose, const std::vector<Frequencies>& frequencies, size_t count, bool several) {
    Stream out;
    const unsigned rarity = choose.one_in(3) ? 1 : choose.one_in(2) ? 50 : 2000;
    for (size_t i = 0; i < count; ++i) {
        const unsigned table = several ? choose.below(static_cast<unsigned>(frequencies.size())) : 0;
        const bool is_first = frequencies[table][0] != 0 && !choose.one_in(rarity);
        uint8_t symbol = is_first ? 0 : static_cast<uint8_t>(choose.below(256));
        while (frequencies[table][symbol] == 0) ++symbol;  // behind 255 comes 0
        if (several) out.tables.push_back(static_cast<uint8_t>(table));
        out.symbols.push_back(symbol);
    }
    const Exact tables(out.tables), symbols(out.symbols), space(Bytes(rans_bound(count)));
    const size_t size = RansEncoder(frequencies).encode(symbols.data(), several ? tables.data() : nullptr, count,
                                                        space.data(), rans_bound(count));
    out.data.assign(space.data() + rans_bound(count) - size, space.data() + rans_bound(count));
    return out;
}

// Decodes one stream in pieces, or two at once. Returns true if neither is refused.
bool decode_streams(Choices& choose, const Stream& a, const Stream* b, const DecoderTables& tables, const Exact& out_a,
                    const Exact& out_b) {
    const size_t count = a.symbols.size();
    const Exact data_a(a.data), tables_a(a.tables), data_b(b ? b->data : Bytes()), tables_b(b ? b->tables : Bytes());
    const auto at = [](const Bytes& all, const Exact& exact, size_t i) { return all.empty() ? nullptr : exact.data() + i; };
    return passes([&] {
        RansDecoder first(data_a.data(), a.data.size(), count, tables);
        if (b == nullptr) {
            for (size_t done = 0, piece; done < count; done += piece) {
                piece = std::min<size_t>(count - done, kMaxLanes * (1 + choose.below(64)));
                first.decode(at(a.tables, tables_a, done), piece, out_a.data() + done);
            }
            return first.finish();
        }
        RansDecoder second(data_b.data(), b->data.size(), count, tables);
        RansDecoder::decode_two(first, at(a.tables, tables_a, 0), out_a.data(), second, at(b->tables, tables_b, 0),
                                out_b.data(), count);
        first.finish(), second.finish();
    });
}

}  // namespace

void fuzz_rans(Choices& choose) {
    ContextTables tables = make_tables(choose, 1 + choose.below(16));
    if (choose.one_in(2)) make_first_frequent(choose, tables.frequencies);
    const bool several = choose.one_in(2);
    const size_t count = choose.one_in(4) ? kFewSymbols + choose.below(3000) : 1 + choose.below(3000);
    const DecoderTables decoder_tables(tables.frequencies);
    const Stream a = make_stream(choose, tables.frequencies, count, several);
    const Stream b = make_stream(choose, tables.frequencies, count, several);
    const Exact out_a{Bytes(count)}, out_b{Bytes(count)};
    const bool two = choose.one_in(2);
    expect(decode_streams(choose, a, two ? &b : nullptr, decoder_tables, out_a, out_b), "a valid symbol stream is refused");
    expect(std::equal(a.symbols.begin(), a.symbols.end(), out_a.data()), "symbols do not come back");
    expect(!two || std::equal(b.symbols.begin(), b.symbols.end(), out_b.data()), "symbols do not come back");
    for (unsigned i = 0; i < 8; ++i) {
        Stream mutant = a;
        if (choose.one_in(8))
            mutant.data = choose.bytes(choose.below(400));
        else
            mutate(choose, mutant.data, b.data);
        decode_streams(choose, mutant, two ? &b : nullptr, decoder_tables, out_a, out_b);
    }
}

void fuzz_classes(Choices& choose) {
    const Model model = make_model(choose, false);
    if (model.shift >= model.width) return;
    const size_t count = choose.below(300), size = count * model.width / 8;
    const Exact values(choose.bytes(size)), others(choose.bytes(size)), classes{Bytes(count)};
    difference_classes(model, values.data(), others.data(), count, classes.data());
    for (size_t i = 0; i < count; ++i) expect(classes.data()[i] < 32, "a hint of more than five bits");
}

}  // namespace shrinkpoint
