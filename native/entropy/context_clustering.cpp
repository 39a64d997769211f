#include "entropy/context_clustering.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bit_writer.hpp"
#include "base/error.hpp"

namespace shrinkpoint {

namespace {

constexpr unsigned kTableCountBits = 4;  // of the number of tables minus 1

struct Context {
    unsigned index;
    uint64_t total;
    std::vector<std::pair<uint8_t, uint32_t>> symbols;
    double self_bits;
};

using Prices = std::array<float, 256>;  // cost of each symbol in bits

double entropy_bits(const Histogram& histogram) {
    uint64_t total = 0;
    double bits = 0;
    for (const uint64_t n : histogram) {
        total += n;
        if (n > 0) bits -= static_cast<double>(n) * std::log2(static_cast<double>(n));
    }
    return total > 0 ? bits + static_cast<double>(total) * std::log2(static_cast<double>(total)) : 0;
}

unsigned gamma_bits(unsigned value) {  // bits of the gamma code of value + 1
    unsigned log = 31 - static_cast<unsigned>(__builtin_clz(value + 1));
    return 2 * log + 1;
}

double table_bits(const Histogram& histogram) {
    uint64_t total = 0;
    for (const uint64_t n : histogram) total += n;
    double bits = 16;
    bool inside = false;
    unsigned gap = 0;
    for (unsigned s = 0; s < 256; ++s) {
        if (histogram[s] == 0) {
            ++gap;
            continue;
        }
        const double share = static_cast<double>(histogram[s]) / static_cast<double>(total) * kProbabilityScale;
        bits += (inside ? gap : 0) + gamma_bits(static_cast<unsigned>(std::max(1.0, share)));
        inside = true;
        gap = 0;
    }
    return bits;
}

std::vector<Context> present(const ContextCounts& counts) {
    std::vector<Context> out;
    for (unsigned c = 0; c < counts.size() / 256; ++c) {
        Context context{c, 0, {}, 0};
        Histogram histogram{};
        for (unsigned s = 0; s < 256; ++s) {
            const uint32_t n = counts[c * 256 + s];
            histogram[s] = n;
            if (n == 0) continue;
            context.symbols.emplace_back(static_cast<uint8_t>(s), n);
            context.total += n;
        }
        if (context.total == 0) continue;
        context.self_bits = entropy_bits(histogram);
        out.push_back(std::move(context));
    }
    return out;
}

void add(Histogram& histogram, const Context& context) {
    for (const auto& [symbol, n] : context.symbols) histogram[symbol] += n;
}

Prices prices(const Histogram& histogram) {
    uint64_t total = 0;
    for (const uint64_t n : histogram) total += n;
    const double all = std::log2(static_cast<double>(total) + 2);
    Prices out;
    out.fill(static_cast<float>(all - std::log2(1.0 / 128)));
    for (unsigned s = 0; s < 256; ++s)
        if (histogram[s] != 0)
            out[s] = static_cast<float>(all - std::log2(static_cast<double>(histogram[s]) + 1.0 / 128));
    return out;
}

double price(const Context& context, const Prices& prices) {
    double bits = 0;
    for (const auto& [symbol, n] : context.symbols) bits += static_cast<double>(n) * prices[symbol];
    return bits;
}

// Farthest-first seeds: the next centre is the context whose cost under the present centres is worst.
std::vector<Histogram> seeds(const std::vector<Context>& contexts) {
    std::vector<double> excess(contexts.size(), std::numeric_limits<double>::infinity());
    const auto largest = std::max_element(contexts.begin(), contexts.end(),
                                          [](const Context& a, const Context& b) { return a.total < b.total; });
    size_t farthest = static_cast<size_t>(largest - contexts.begin());
    std::vector<Histogram> centres;
    while (true) {
        Histogram centre{};
        add(centre, contexts[farthest]);
        const Prices costs = prices(centre);
        for (size_t i = 0; i < contexts.size(); ++i)
            excess[i] = std::min(excess[i], price(contexts[i], costs) - contexts[i].self_bits);
        centres.push_back(centre);
        farthest = static_cast<size_t>(std::max_element(excess.begin(), excess.end()) - excess.begin());
        Histogram candidate{};
        add(candidate, contexts[farthest]);
        if (centres.size() == kMaxTables || excess[farthest] < table_bits(candidate)) return centres;
    }
}

std::vector<unsigned> assign(const std::vector<Context>& contexts, std::vector<Histogram>& centres) {
    std::vector<Prices> costs;
    for (const Histogram& centre : centres) costs.push_back(prices(centre));
    std::vector<unsigned> out;
    for (Histogram& centre : centres) centre.fill(0);
    for (const Context& context : contexts) {
        unsigned best = 0;
        double best_bits = std::numeric_limits<double>::infinity();
        for (unsigned k = 0; k < costs.size(); ++k) {
            const double bits = price(context, costs[k]);
            if (bits < best_bits) best = k, best_bits = bits;
        }
        out.push_back(best);
        add(centres[best], context);
    }
    return out;
}

// The cost of a table, and of its symbols under it.
struct Costs {
    explicit Costs(const Histogram& histogram) : symbols(entropy_bits(histogram)), table(table_bits(histogram)) {}

    double symbols, table;
};

Histogram operator+(Histogram a, const Histogram& b) {
    for (unsigned s = 0; s < 256; ++s) a[s] += b[s];
    return a;
}

bool empty(const Histogram& histogram) {
    return std::all_of(histogram.begin(), histogram.end(), [](uint64_t n) { return n == 0; });
}

// Joins two tables while that saves more table bits than it costs in symbols.
void merge(std::vector<Histogram>& centres, std::vector<unsigned>& assignment) {
    std::vector<Costs> costs(centres.begin(), centres.end());
    const auto gain_of = [&](size_t a, size_t b) {
        if (empty(centres[a]) || empty(centres[b])) return 0.0;
        const Costs both(centres[a] + centres[b]);
        return costs[a].symbols + costs[b].symbols - both.symbols + costs[a].table + costs[b].table - both.table;
    };
    std::array<std::array<double, kMaxTables>, kMaxTables> gains;  // for a < b
    for (size_t a = 0; a < centres.size(); ++a)
        for (size_t b = a + 1; b < centres.size(); ++b) gains[a][b] = gain_of(a, b);
    while (true) {
        double best_gain = 0;
        size_t best_a = 0, best_b = 0;
        for (size_t a = 0; a < centres.size(); ++a)
            for (size_t b = a + 1; b < centres.size(); ++b)
                if (gains[a][b] > best_gain) best_gain = gains[a][b], best_a = a, best_b = b;
        if (best_gain <= 0) return;
        centres[best_a] = centres[best_a] + centres[best_b];
        costs[best_a] = Costs(centres[best_a]);
        centres[best_b].fill(0);
        std::replace(assignment.begin(), assignment.end(), static_cast<unsigned>(best_b),
                     static_cast<unsigned>(best_a));
        for (size_t a = 0; a < centres.size(); ++a)
            for (size_t b = a + 1; b < centres.size(); ++b)
                if (a == best_a || a == best_b || b == best_a || b == best_b) gains[a][b] = gain_of(a, b);
    }
}

// A symbol that the sample lacks counts as a fraction of a symbol seen once.
Histogram covering(Histogram histogram, const SymbolRange* cover) {
    if (cover == nullptr) return histogram;
    for (uint64_t& n : histogram) n *= 16;
    for (unsigned s = cover->first; s <= cover->last; ++s) histogram[s] = std::max<uint64_t>(histogram[s], 1);
    histogram[255] = std::max<uint64_t>(histogram[255], 1);
    return histogram;
}

}  // namespace

ContextTables cluster_contexts(const ContextCounts& counts, const SymbolRange* cover) {
    ContextTables out;
    out.map.assign(counts.size() / 256, 0);
    const std::vector<Context> contexts = present(counts);
    if (contexts.empty()) {
        Histogram histogram{};
        histogram[0] = 1;
        out.frequencies.push_back(normalise(histogram));
        return out;
    }
    std::vector<Histogram> centres = seeds(contexts);
    assign(contexts, centres);
    std::vector<unsigned> assignment = assign(contexts, centres);
    merge(centres, assignment);
    std::vector<unsigned> number(centres.size(), kMaxTables);
    for (size_t i = 0; i < contexts.size(); ++i) {
        unsigned& table = number[assignment[i]];
        if (table == kMaxTables) {
            table = static_cast<unsigned>(out.frequencies.size());
            out.frequencies.push_back(normalise(covering(centres[assignment[i]], cover)));
        }
        out.map[contexts[i].index] = static_cast<uint8_t>(table);
    }
    // A context that never occurs takes its neighbour's table, because the map is written as changes.
    size_t at = 0;
    uint8_t last = out.map[contexts[0].index];
    for (unsigned c = 0; c < out.map.size(); ++c) {
        if (at < contexts.size() && contexts[at].index == c) last = out.map[c], ++at;
        out.map[c] = last;
    }
    return out;
}

double cost(const ContextCounts& counts, const ContextTables& tables) {
    std::vector<Prices> costs;
    for (const Frequencies& frequencies : tables.frequencies) {
        Prices prices;
        for (unsigned s = 0; s < 256; ++s)
            prices[s] = frequencies[s] > 0 ? kProbabilityBits - std::log2(static_cast<float>(frequencies[s])) : 16;
        costs.push_back(prices);
    }
    double bits = static_cast<double>(write_tables(tables).size()) * 8;
    for (size_t i = 0; i < counts.size(); ++i)
        if (counts[i] > 0) bits += static_cast<double>(counts[i]) * costs[tables.map[i / 256]][i % 256];
    return bits;
}

std::vector<uint8_t> write_tables(const ContextTables& tables) {
    std::vector<uint8_t> out(tables.map.size() + tables.frequencies.size() * (256 * 4) + 64);
    BitWriter bits(out.data());
    bits.put(tables.frequencies.size() - 1, kTableCountBits);
    uint8_t last = 0;
    for (const uint8_t table : tables.map) {
        bits.put(table != last, 1);
        if (table != last) bits.put(table, kTableCountBits);
        last = table;
    }
    for (const Frequencies& frequencies : tables.frequencies) {
        unsigned first = 0, end = 256;
        while (frequencies[first] == 0) ++first;
        while (frequencies[end - 1] == 0) --end;
        bits.put(first, 8);
        bits.put(end - 1, 8);
        for (unsigned s = first; s < end; ++s) {
            const unsigned log = gamma_bits(frequencies[s]) / 2;
            bits.put(0, log);
            bits.put(1, 1);
            bits.put((frequencies[s] + 1u) & ((1u << log) - 1), log);
        }
    }
    out.resize(bits.finish());
    return out;
}

namespace {

class BitReader {
   public:
    BitReader(const uint8_t* data, size_t size) : data_(data), bits_(size < kBitSlack ? 0 : 8 * (size - kBitSlack)) {}
    unsigned get(unsigned width) {
        if (position_ + width > bits_) throw Truncated("the tables end too early");
        const auto out = static_cast<unsigned>(load_bits(data_, position_, width));
        position_ += width;
        return out;
    }

   private:
    const uint8_t* data_;
    uint64_t bits_, position_ = 0;
};

Frequencies read_frequencies(BitReader& bits) {
    Frequencies out{};
    const unsigned first = bits.get(8), last = bits.get(8);
    uint32_t sum = 0;
    for (unsigned s = first; s <= last; ++s) {
        unsigned log = 0;
        while (bits.get(1) == 0)
            if (++log > kProbabilityBits) throw Corrupt("a frequency is out of range");
        const uint32_t frequency = (1u << log | bits.get(log)) - 1;
        sum += frequency;
        if (sum > kProbabilityScale) throw Corrupt("the frequencies of a table exceed their sum");
        out[s] = static_cast<uint16_t>(frequency);
    }
    if (sum != kProbabilityScale) throw Corrupt("the frequencies of a table do not reach their sum");
    return out;
}

}  // namespace

ContextTables read_tables(const uint8_t* data, size_t size, unsigned contexts) {
    BitReader bits(data, size);
    ContextTables out;
    const unsigned count = bits.get(kTableCountBits) + 1;
    uint8_t last = 0;
    for (unsigned c = 0; c < contexts; ++c) {
        if (bits.get(1) == 1) last = static_cast<uint8_t>(bits.get(kTableCountBits));
        if (last >= count) throw Corrupt("a context names a table that does not exist");
        out.map.push_back(last);
    }
    for (unsigned t = 0; t < count; ++t) out.frequencies.push_back(read_frequencies(bits));
    return out;
}

}  // namespace shrinkpoint
