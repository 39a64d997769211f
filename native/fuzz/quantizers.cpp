// Fuzzes Huffman tables, cyclic differences and k-means.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/bit_reader.hpp"
#include "entropy/cyclic_delta.hpp"
#include "entropy/huffman.hpp"
#include "fuzz/checks.hpp"
#include "lattice/kmeans.hpp"

namespace shrinkpoint {

namespace {

// Counts as steep as Fibonacci's, whose best code is too long, or any counts.
std::vector<uint64_t> symbol_counts(Choices& choose) {
    std::vector<uint64_t> out(1 + choose.below(320), 0);
    const unsigned steep = choose.below(40), gaps = 1 + choose.below(6);
    uint64_t a = 1, b = 1;
    const bool fibonacci = choose.one_in(3);
    for (uint64_t& n : out) {
        if (!choose.one_in(gaps)) continue;
        n = fibonacci ? a : 1 + choose.word() % (uint64_t{1} << steep);
        if (a < uint64_t{1} << 50) a = std::exchange(b, a + b);
    }
    if (std::all_of(out.begin(), out.end(), [](uint64_t n) { return n == 0; })) out.back() = 1;
    return out;
}

Bytes written_lengths(const std::vector<uint8_t>& lengths) {
    const size_t size = (lengths_bits(lengths) + 7) / 8;
    Bytes out(size + 2 * kBitSlack);
    BitWriter bits(out.data());
    write_lengths(lengths, bits);
    expect(bits.finish() == size + kBitSlack, "a Huffman table has another size than announced");
    out.resize(size);
    return out;
}

// Few codes that mostly stay the same, as quantized weights do, or any codes.
Bytes make_codes(Choices& choose, size_t count, unsigned modulus) {
    Bytes out = choose.bytes(count);
    const unsigned stays = choose.one_in(2) ? 1 : 1 + choose.below(200);
    const unsigned used = 1 + choose.below(modulus);
    for (size_t i = 0; i < count; ++i)
        out[i] = i > 0 && !choose.one_in(stays) ? out[i - 1] : static_cast<uint8_t>(out[i] % used);
    return out;
}

struct Stream {
    CyclicDelta form;
    Bytes previous, data;
    size_t count;
    bool has_previous;
};

// Decodes with every buffer of exactly its size. Returns false if it is refused.
bool decodes(const Stream& c, Bytes& codes) {
    const Exact data(c.data), previous(c.previous, c.has_previous ? c.count : 0), out(Bytes(c.count, 0xa5));
    const bool decoded = passes([&] {
        cyclic_decode(c.form, data.data(), c.data.size(), c.has_previous ? previous.data() : nullptr, out.data(),
                      c.count);
    });
    codes.assign(out.data(), out.data() + c.count);
    return decoded;
}

void mutate(Choices& choose, Stream& c) {
    switch (choose.below(8)) {
        case 0: c.count = choose.one_in(2) ? c.count + choose.below(5) - std::min<size_t>(c.count, 2) : choose.below(3000); break;
        case 1: c.form.modulus = choose.one_in(2) ? choose.below(300) : c.form.modulus + 1; break;
        case 2: c.form.runs = !c.form.runs; break;
        case 3: c.form.rearranged = !c.form.rearranged; break;
        case 4: mutate(choose, c.previous, c.data); break;
        default: mutate(choose, c.data, c.previous);
    }
    if (c.previous.empty()) c.previous.push_back(0);
}

}  // namespace

void fuzz_lengths(Choices& choose) {
    const std::vector<uint8_t> lengths = huffman_lengths(symbol_counts(choose));
    const Bytes written = written_lengths(lengths);
    const Exact whole(written);
    BitSource bits(whole.data(), written.size());
    expect(read_lengths(bits, lengths.size()) == lengths, "a Huffman table does not come back");
    bits.finish();
    for (unsigned i = 0; i < 32; ++i) {
        Bytes mutant = choose.one_in(8) ? choose.bytes(choose.below(64)) : written;
        mutate(choose, mutant, written);
        const Exact exact(mutant);
        passes([&] {
            BitSource source(exact.data(), mutant.size());
            const HuffmanDecoder decoder(read_lengths(source, 1 + choose.below(320)));
            for (unsigned n = 0; n < 100; ++n) {
                source.refill();
                expect(decoder.next(source) < 320, "a symbol beyond its alphabet");
            }
        });
    }
}

void fuzz_cyclic(Choices& choose) {
    Stream c;
    c.form = {1 + choose.below(256), choose.one_in(2), choose.one_in(2)};
    c.count = choose.one_in(16) ? choose.below(200000) : choose.below(2000);
    c.has_previous = !choose.one_in(4);
    c.previous = make_codes(choose, c.count, c.form.modulus);
    Bytes wanted = make_codes(choose, c.count, c.form.modulus), decoded;
    if (choose.one_in(2))  // near the codes before
        for (size_t i = 0; i < c.count; ++i)
            if (!choose.one_in(20)) wanted[i] = c.previous[i];
    const Exact codes(wanted), previous(c.previous);
    const Buffer data = cyclic_encode(c.form, codes.data(), c.has_previous ? previous.data() : nullptr, c.count);
    c.data.assign(data.begin(), data.end());
    expect(decodes(c, decoded) && decoded == wanted, "cyclic differences do not come back");
    for (unsigned i = 0; i < 16; ++i) {
        Stream mutant = c;
        for (unsigned n = 1 + choose.below(3); n > 0; --n) mutate(choose, mutant);
        decodes(mutant, decoded);
    }
}

void fuzz_kmeans(Choices& choose) {
    std::vector<double> values, weights;
    for (unsigned n = choose.below(300); n > 0; --n) {
        const double scale = choose.one_in(8) ? 1e30 : choose.one_in(8) ? 1e-30 : 1;
        values.push_back(scale * (static_cast<double>(choose.word() >> 32) - 0x1p31));
        weights.push_back(choose.one_in(3) ? 0 : static_cast<double>(choose.below(1000)));
    }
    std::sort(values.begin(), values.end());
    const WeightedSamples points{values.data(), weights.data(), values.size()};
    const unsigned k = 1 + choose.below(256);
    if (std::all_of(weights.begin(), weights.end(), [](double w) { return w == 0; })) return;
    const std::vector<double> start = kmeans_plus_plus(points, k, choose.word(), choose.one_in(2));
    const std::vector<double> centers = kmeans(points, start, choose.below(60), choose.one_in(2) ? 0 : 1e-6);
    for (const std::vector<double>* one : {&start, &centers}) {
        expect(one->size() == k && std::is_sorted(one->begin(), one->end()), "centers that do not ascend");
        for (const double center : *one) expect(std::isfinite(center), "a center that is no number");
    }
}

}  // namespace shrinkpoint
