#include "lattice/codec.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "base/bits.hpp"
#include "base/buffer.hpp"
#include "base/simd.hpp"
#include "base/turns.hpp"
#include "entropy/table_map.hpp"
#include "entropy/tiles.hpp"
#include "lattice/cells.hpp"
#include "lattice/guesses.hpp"
#include "lattice/parallel_tiles.hpp"
#include "lattice/powers.hpp"

namespace shrinkpoint {

namespace {

constexpr int32_t kEscape = -128;
constexpr uint16_t kEscapeSymbol = 255;  // symbol of this difference

SHRINKPOINT_KERNEL(bool, same_when_narrow, (const float* values, const uint16_t* expected, size_t count),
                   (values, expected, count)) {
    uint32_t differing_bits = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_of(values[i]);
        const uint32_t narrow = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        differing_bits |= (narrow ^ expected[i]) | ((bits & 0x7fffffff) > 0x7f800000);
    }
    return differing_bits == 0;
}

// Computes tokens for the usual tile: small codes and no escapes. Returns false otherwise, because its 16-bit
// arithmetic may have wrapped; then subtract_large computes them again.
SHRINKPOINT_KERNEL(bool, subtract_small,
                   (const int16_t* codes, const int16_t* guesses, const uint8_t* contexts, size_t count,
                    uint8_t* tokens),
                   (codes, guesses, contexts, count, tokens)) {
    uint16_t above_byte = 0, above_half = 0;
    for (size_t i = 0; i < count; ++i) {
        const auto code = static_cast<uint16_t>(codes[i]), guess = static_cast<uint16_t>(guesses[i]);
        const auto difference = static_cast<uint16_t>(code - guess);
        const auto from_least = static_cast<uint16_t>(difference - (kEscape + 1));
        above_byte = static_cast<uint16_t>(above_byte | from_least | static_cast<uint16_t>(from_least + 1));
        above_half = static_cast<uint16_t>(above_half | static_cast<uint16_t>(code + 0x4000) |
                                           static_cast<uint16_t>(guess + 0x4000));
        tokens[i] = static_cast<uint8_t>(contexts[i] + difference);
    }
    return above_byte < 0x100 && above_half < 0x8000;
}

SHRINKPOINT_KERNEL(uint8_t, largest_of, (const uint8_t* bytes, size_t count), (bytes, count)) {
    uint8_t out = 0;
    for (size_t i = 0; i < count; ++i) out = std::max(out, bytes[i]);
    return out;
}

// Returns the number of escapes, with bit 31 set if a code is out of range.
SHRINKPOINT_KERNEL(uint32_t, subtract_large,
                   (const int16_t* codes, const int16_t* guesses, const uint8_t* contexts, size_t count,
                    uint8_t* tokens),
                   (codes, guesses, contexts, count, tokens)) {
    uint32_t escapes = 0, out_of_range = 0;
    for (size_t i = 0; i < count; ++i) {
        const int32_t code = codes[i], difference = code - guesses[i];
        const bool large = difference > -kEscape - 1 || difference < kEscape + 1;
        escapes += large;
        out_of_range |= code > kMaxCode || code < -kMaxCode;
        tokens[i] = static_cast<uint8_t>(contexts[i] + (large ? kEscape : difference));
    }
    return escapes | out_of_range << 31;
}

struct Sums {
    uint16_t escapes = 0;  // number of escapes
    bool in_range = true, narrow = true;
};

// Adds differences to guesses in 16 bits. A sum of two numbers of one sign that has the other sign is out of range.
// Codes also go to `narrow`, as far as they fit.
struct CodeSums {
    uint16_t escapes = 0, out_of_range = 0, lost = 0;

    SHRINKPOINT_INLINE void add(uint16_t difference, int16_t& code, int8_t& narrow) {
        constexpr uint16_t kFirstInvalid = kMaxCode + 1, kInvalid = 3;  // 32767, -32768, -32767
        const auto guess = static_cast<uint16_t>(code), sum = static_cast<uint16_t>(guess + difference);
        const auto invalid = static_cast<uint16_t>(static_cast<uint16_t>(sum - kFirstInvalid) < kInvalid ? 0x8000 : 0);
        out_of_range = static_cast<uint16_t>(out_of_range | ((sum ^ guess) & (sum ^ difference)) | invalid);
        code = static_cast<int16_t>(sum);
        narrow = static_cast<int8_t>(sum);
        lost = static_cast<uint16_t>(lost | (static_cast<uint16_t>(narrow) ^ sum));
    }

    Sums all() const { return {escapes, (out_of_range & 0x8000) == 0, lost == 0}; }
};

// Adds differences to the guesses of up to kTile codes. Escapes are added later.
SHRINKPOINT_KERNEL(Sums, add,
                   (const uint8_t* tokens, const uint8_t* contexts, size_t count, int16_t* codes, int8_t* narrow),
                   (tokens, contexts, count, codes, narrow)) {
    CodeSums sums;
    for (size_t i = 0; i < count; ++i) {
        const auto difference = static_cast<int16_t>(static_cast<int8_t>(tokens[i] - contexts[i]));
        const auto large = static_cast<uint16_t>(difference == kEscape ? 0xffff : 0);
        sums.escapes = static_cast<uint16_t>(sums.escapes - large);
        sums.add(static_cast<uint16_t>(static_cast<uint16_t>(difference) & ~large), codes[i], narrow[i]);
    }
    return sums.all();
}

// Adds folded differences to the guesses of up to kTile codes.
SHRINKPOINT_KERNEL(Sums, add_folded, (const uint8_t* symbols, size_t count, int16_t* codes, int8_t* narrow),
                   (symbols, count, codes, narrow)) {
    CodeSums sums;
    for (size_t i = 0; i < count; ++i) {
        const uint16_t symbol = symbols[i];
        sums.escapes = static_cast<uint16_t>(sums.escapes + (symbol == kEscapeSymbol));
        sums.add(static_cast<uint16_t>(symbol >> 1 ^ (0 - (symbol & 1))), codes[i], narrow[i]);
    }
    return sums.all();
}

// Adds a folded difference to the guess of a code that has one byte; flags as `add_to_bytes` returns them.
SHRINKPOINT_INLINE uint8_t add_to_byte(uint8_t symbol, int8_t code, int8_t& out) {
    const auto guess = static_cast<uint8_t>(code), difference = static_cast<uint8_t>(symbol >> 1 ^ (0 - (symbol & 1)));
    const auto sum = static_cast<uint8_t>(guess + difference);
    out = static_cast<int8_t>(sum);
    return static_cast<uint8_t>((((sum ^ guess) & (sum ^ difference)) & 0x80) | (symbol == kEscapeSymbol));
}

// Adds folded differences to codes of one byte, which may be `out`. Bit 7 of the result says that some sum does not fit
// into a byte, in which case `out` holds its low byte; bit 0 that there is an escape.
SHRINKPOINT_KERNEL(uint8_t, add_to_bytes, (const uint8_t* symbols, const int8_t* codes, size_t count, int8_t* out),
                   (symbols, codes, count, out)) {
    uint8_t flags = 0;
    for (size_t i = 0; i < count; ++i) flags = static_cast<uint8_t>(flags | add_to_byte(symbols[i], codes[i], out[i]));
    return flags;
}

// Same for powers, whose guess is zero if the parent is zero, and otherwise the point 0.
SHRINKPOINT_KERNEL(uint8_t, add_to_powers, (const uint8_t* symbols, const int8_t* parent, size_t count, int8_t* out),
                   (symbols, parent, count, out)) {
    uint8_t flags = 0;
    for (size_t i = 0; i < count; ++i) {
        const auto guess = static_cast<int8_t>(parent[i] == kZeroCode ? kZeroCode : 0);
        flags = static_cast<uint8_t>(flags | add_to_byte(symbols[i], guess, out[i]));
    }
    return flags;
}

// Recovers guesses of one byte from sums modulo 256 and their folded differences.
SHRINKPOINT_KERNEL(void, subtract_from_bytes,
                   (const uint8_t* symbols, const int8_t* sums, size_t count, int16_t* guesses),
                   (symbols, sums, count, guesses)) {
    for (size_t i = 0; i < count; ++i) {
        const auto difference = static_cast<uint8_t>(symbols[i] >> 1 ^ (0 - (symbols[i] & 1)));
        guesses[i] = static_cast<int8_t>(static_cast<uint8_t>(sums[i]) - difference);
    }
}

SHRINKPOINT_KERNEL(size_t, count_escapes, (const uint8_t* tokens, const uint8_t* contexts, size_t count),
                   (tokens, contexts, count)) {
    uint32_t escapes = 0;
    for (size_t i = 0; i < count; ++i)
        escapes += static_cast<uint8_t>(tokens[i] - contexts[i]) == static_cast<uint8_t>(kEscape);
    return escapes;
}

// Positions that a thread takes at a time if there are several threads; values are made before they enter the digest.
constexpr size_t kTurn = 16 * kTile;

// Memory of one thread. Only dithers are cleared, since many tensors are small.
struct Scratch {
    Scratch() {
        for (Cells* all : {&cells, &parent_cells, &square_cells}) std::fill_n(all->dithers, kTile, 0.0f);
    }

    Cells cells, parent_cells, square_cells;
    float roots[kTile];
    float values[kTurn], parent[kTurn];
};

// Calls work(piece, start, count, scratch, place in the piece) for every block, then turn(span, scratch) for every
// piece, in the order of pieces.
template <typename Work, typename Turn>
void by_turns(uint64_t count, unsigned threads, Work work, Turn turn) {
    Turns turns;
    parallel(chunk_count(count, kTurn), threads, [&](WorkQueue& indices) {
        const ScopedFpEnvironment floats;
        std::vector<Scratch, UninitializedAllocator<Scratch>> memory(1);  // from the pool: its pages have been touched
        Scratch* const scratch = memory.data();
        for (size_t index; indices.take(index);) {
            try {
                const Span piece = span_of(index, count, kTurn, kTurn);
                for (size_t done = 0; done < piece.count; done += kBlock)
                    work(index, piece.start + done, std::min(kBlock, piece.count - done), *scratch, done);
                turns.take(index, [&] { turn(piece, *scratch); });
            } catch (...) {
                turns.fail();
                throw;
            }
        }
    });
}

// Returns `count` values from `start` on, in place or in `out`; the source begins at position `first` of the tensor.
const float* read_values(const Values& source, uint64_t first, uint64_t start, size_t count, Cells& cells, float* out) {
    if (source.lattice == nullptr) return read_floats(source.floats, start, count, out);
    fill_cells(*source.lattice, nullptr, first + start, count, cells);
    values_of_codes(*source.lattice, read_codes(source.codes, start, count, cells.codes), first + start, count, cells,
                    out);
    return out;
}

// Returns the roots of second moments; null if there are none.
const float* read_roots(const Values& squares, uint64_t first, uint64_t start, size_t count, Scratch& scratch) {
    if (squares.none()) return nullptr;
    float* const roots = scratch.roots;
    if (squares.lattice != nullptr && squares.lattice->powers)
        roots_of_codes(*squares.lattice, squares.codes, first, start, count, scratch.square_cells, roots);
    else
        take_roots(read_values(squares, first, start, count, scratch.square_cells, roots), count, roots);
    return roots;
}

int32_t largest(const std::vector<int16_t>& exponents) {
    int32_t out = 0;
    for (const int16_t exponent : exponents) out = std::max(out, std::abs(int32_t{exponent}));
    return out;
}

// True if the parent has the same points, so that the nearest point to each of its values is its own. The two roundings
// between them are at most 1/64 of a step if no value is denormal or infinite.
bool is_same_lattice(const Lattice& lattice, const Known& known) {
    const Lattice* parent = known.parent.lattice;
    if (parent == nullptr || lattice.powers || parent->powers || !known.squares.none()) return false;
    if (parent->excess_gain != 0.0f) return false;
    const bool same = lattice.seed == parent->seed && lattice.rows == parent->rows &&
                      lattice.columns == parent->columns && lattice.row_exponents == parent->row_exponents &&
                      lattice.column_exponents == parent->column_exponents;
    return same && largest(lattice.row_exponents) + largest(lattice.column_exponents) <= 100 * kStepsPerOctave;
}

// True if guess_powers_of_bytes can be used.
bool are_short_powers(const Lattice& lattice, const Values& parent) {
    const auto is_short = [](const Lattice& powers) {
        return powers.powers && largest(powers.row_exponents) + largest(powers.column_exponents) <= kMaxShortExponent;
    };
    if (parent.lattice == nullptr || parent.codes.bytes != 1) return false;
    const bool are_steps_short = kMinShortStep <= lattice.step && lattice.step <= kMaxShortStep &&
                                 parent.lattice->step <= kMaxShortParentStep;
    return are_steps_short && is_short(lattice) && is_short(*parent.lattice);
}

// Makes guesses and contexts of one tile, given its cells.
class PointPredictor {
 public:
    PointPredictor(const Lattice& lattice, const Known& known)
        : lattice_(lattice),
          known_(known),
          is_same_(is_same_lattice(lattice, known)),
          is_short_(are_short_powers(lattice, known.parent)) {}

    // True if `predict` reads the cells when the parent's values are not asked for.
    bool needs_cells() const { return !is_same_ && !is_short_; }

    // True if `predict` reads the steps of the cells. Otherwise their dithers or exponents are enough.
    bool needs_steps(bool all) const { return is_same_ ? all : !known_.parent.none(); }

    // True if a guess depends on nothing but the parent's code, and that has one byte.
    bool is_of_byte() const {
        if (known_.parent.lattice == nullptr || known_.parent.codes.bytes != 1) return false;
        return is_same_ || (lattice_.powers && known_.parent.lattice->powers);
    }

    // True if the guess is the parent's code.
    bool is_same() const { return is_same_; }

    // `values` has room for the parent's values, which are computed if they are needed or if `all` of them are asked
    // for.
    void predict(uint64_t first, uint64_t start, size_t count, bool all, Scratch& scratch, float* values,
                 int16_t* guesses, uint8_t* contexts) const {
        Cells& cells = scratch.cells;
        const Values& parent = known_.parent;
        if (!lattice_.powers) fill_step_classes(lattice_, first + start, count, cells.classes);
        if (is_same_) {
            const int16_t* codes = read_codes(parent.codes, start, count, scratch.parent_cells.codes);
            guess_same(codes, cells.classes, count, guesses, contexts);
            if (all) values_of_codes(*parent.lattice, codes, first + start, count, cells, values);
            return;
        }
        if (parent.none()) return guess_without(count, cells, guesses, contexts);
        if (!all && lattice_.powers && parent.lattice != nullptr && parent.lattice->powers) {
            Cells& parent_cells = scratch.parent_cells;
            if (is_short_) {
                fill_exponents(*parent.lattice, first + start, count, parent_cells.short_exponents);
                fill_exponents(lattice_, first + start, count, cells.short_exponents);
                const auto* bytes = reinterpret_cast<const int8_t*>(parent.codes.data) + start;
                return guess_powers_of_bytes(bytes, parent_cells.short_exponents,
                                             static_cast<int16_t>(parent.lattice->step), cells.short_exponents,
                                             static_cast<int16_t>(lattice_.step), count, guesses, contexts);
            }
            fill_exponents(*parent.lattice, first + start, count, parent_cells.exponents);
            const int16_t* codes = read_codes(parent.codes, start, count, parent_cells.codes);
            return guess_powers_of_codes(codes, parent_cells.exponents, parent.lattice->step, cells.exponents,
                                         lattice_.step, count, guesses, contexts);
        }
        const float* parent_values = read_values(parent, first, start, count, scratch.parent_cells, values);
        if (all && parent_values != values) std::memcpy(values, parent_values, 4 * count);
        if (lattice_.powers)
            guess_powers(parent_values, cells.exponents, lattice_.step, count, guesses, contexts);
        else
            guess_multiples(parent_values, cells.steps, cells.dithers, cells.classes, count, guesses, contexts);
    }

 private:
    void guess_without(size_t count, Cells& cells, int16_t* guesses, uint8_t* contexts) const {
        if (lattice_.powers) {
            std::fill_n(guesses, count, int16_t{0});
            std::fill_n(contexts, count, uint8_t{0});
            return;
        }
        guess_zeros(cells.dithers, cells.classes, count, guesses, contexts);
    }

    const Lattice& lattice_;
    const Known& known_;
    const bool is_same_, is_short_;
};

void update(Hasher* digest, const float* values, size_t count) {
    if (digest != nullptr) digest->update(reinterpret_cast<const uint8_t*>(values), 4 * count);
}

bool is_same(const float* values, Floats expected, uint64_t start, size_t count) {
    const uint8_t* expected_values = expected.data + start * expected.bytes;
    if (expected.bytes == 4) return std::memcmp(values, expected_values, 4 * count) == 0;
    return same_when_narrow(values, reinterpret_cast<const uint16_t*>(expected_values), count);
}

// One of several parts. Its codes begin at `begin` of all codes.
struct PartDecoder {
    const CodedPart& part;
    PointPredictor predictor;
    size_t index;
    uint64_t begin;

    uint64_t end() const { return begin + part.positions.count; }
};

struct WideList {
    std::mutex mutex;
    std::vector<WideCodes> all;
};

// Predicts tiles of several parts and adds the differences.
class LatticeTiles : public CodeTiles {
 public:
    LatticeTiles(const std::vector<PartDecoder>& parts, WideList& wide) : parts_(parts), wide_(wide), memory_(1) {}

    void predict(uint64_t start, size_t count, const std::vector<uint8_t>& map, uint8_t* tables) override {
        by_parts(start, count, [&](const PartDecoder& decoder, uint64_t first, size_t run, size_t place) {
            const PointPredictor& predictor = decoder.predictor;
            if (predictor.is_of_byte()) prefetch(decoder.part.known.parent.codes.data + first, run);
            if (predictor.is_of_byte() && tables == nullptr) return;
            if (predictor.is_of_byte() && predictor.is_same())
                return fill_same_tables(*decoder.part.lattice, decoder.part.positions.first + first, run, map,
                                        tables + place);
            predict_run(decoder, first, run, codes_ + place);
            if (tables != nullptr) look_up_bytes(map.data(), map.size(), contexts_, run, tables + place);
        });
    }

    void take(uint64_t start, size_t count, const uint8_t* symbols) override {
        by_parts(start, count, [&](const PartDecoder& decoder, uint64_t first, size_t run, size_t place) {
            const bool is_of_byte = decoder.predictor.is_of_byte();
            if (is_of_byte && take_bytes(decoder, first, run, symbols + place, codes_ + place)) return;
            const Sums sums = add_folded(symbols + place, run, codes_ + place, decoder.part.codes + first);
            if (sums.escapes != 0) throw std::invalid_argument("more large differences than escapes");
            if (!sums.in_range) throw std::invalid_argument("a point that is too far out");
            if (sums.narrow) return;
            const std::lock_guard lock(wide_.mutex);
            wide_.all.push_back({decoder.index, first, {codes_ + place, codes_ + place + run}});
        });
    }

 private:
    // Codes of many megabytes are read as they are taken: without this, each line of them would be waited for.
    static void prefetch(const uint8_t* codes, size_t count) {
        for (size_t i = 0; i < count; i += 64) __builtin_prefetch(codes + i);
    }

    // Fills in guesses and `contexts_`.
    void predict_run(const PartDecoder& decoder, uint64_t first, size_t run, int16_t* guesses) {
        const CodedPart& part = decoder.part;
        Scratch& scratch = memory_.front();
        const uint64_t place = part.positions.first + first;
        if (decoder.predictor.needs_cells() && decoder.predictor.needs_steps(false))
            fill_cells(*part.lattice, read_roots(part.known.squares, part.positions.first, first, run, scratch), place,
                       run, scratch.cells);
        else if (decoder.predictor.needs_cells())
            fill_offsets(*part.lattice, place, run, scratch.cells);
        decoder.predictor.predict(part.positions.first, first, run, false, scratch, scratch.parent, guesses, contexts_);
    }

    // The tables of the contexts of `guess_same`.
    static void fill_same_tables(const Lattice& lattice, uint64_t start, size_t run, const std::vector<uint8_t>& map,
                                 uint8_t* tables) {
        uint8_t of_class[kStepClasses];
        for (size_t k = 0; k < kStepClasses; ++k)
            of_class[k] = map[std::min(map.size() - 1, k + kSameContexts)];
        fill_step_classes(lattice, start, run, tables);
        look_up_bytes(of_class, kStepClasses, tables, run, tables);
    }

    // Takes codes that fit into bytes, from guesses that do. Otherwise returns false, with the guesses filled in.
    static bool take_bytes(const PartDecoder& decoder, uint64_t first, size_t run, const uint8_t* symbols,
                           int16_t* guesses) {
        const auto* const parent = reinterpret_cast<const int8_t*>(decoder.part.known.parent.codes.data) + first;
        int8_t* const codes = decoder.part.codes + first;
        const auto add = decoder.predictor.is_same() ? add_to_bytes : add_to_powers;
        if (add(symbols, parent, run, codes) == 0) return true;
        subtract_from_bytes(symbols, codes, run, guesses);
        return false;
    }

    // work(part, start in the part, count, place among those asked for)
    template <typename Work>
    void by_parts(uint64_t start, size_t count, Work work) const {
        const auto begins_behind = [](uint64_t place, const PartDecoder& part) { return place < part.begin; };
        auto part = std::upper_bound(parts_.begin(), parts_.end(), start, begins_behind) - 1;
        for (size_t done = 0; done < count;) {
            const uint64_t place = start + done;
            const auto run = static_cast<size_t>(std::min<uint64_t>({kBlock, count - done, part->end() - place}));
            if (run != 0) work(*part, place - part->begin, run, done);
            done += run;
            if (place + run == part->end()) ++part;
        }
    }

    const std::vector<PartDecoder>& parts_;
    WideList& wide_;
    std::vector<Scratch, UninitializedAllocator<Scratch>> memory_;  // from the pool: its pages have been touched
    int16_t codes_[kTile];  // predicted, and then decoded
    uint8_t contexts_[kBlock];
};

// The first escape of every piece, and their number.
std::vector<size_t> escapes_before(const uint8_t* tokens, const uint8_t* contexts, uint64_t count, unsigned threads) {
    std::vector<size_t> out(chunk_count(count, kTurn) + 1);
    parallel(chunk_count(count, kTurn), threads, [&](WorkQueue& indices) {
        for (size_t piece; indices.take(piece);) {
            const Span span = span_of(piece, count, kTurn, kTurn);
            out[piece + 1] = count_escapes(tokens + span.start, contexts + span.start, span.count);
        }
    });
    for (size_t i = 1; i < out.size(); ++i) out[i] += out[i - 1];
    return out;
}

// Adds the escaped differences. Returns true if all codes are in range.
bool add_escapes(const uint8_t* tokens, const uint8_t* contexts, size_t count, const int32_t* escapes, int16_t* codes) {
    bool in_range = true;
    for (size_t i = 0; i < count; ++i) {
        if (static_cast<int8_t>(tokens[i] - contexts[i]) != kEscape) continue;
        const int64_t code = int64_t{codes[i]} + *escapes++;
        in_range &= -kMaxCode <= code && code <= kMaxCode;
        codes[i] = static_cast<int16_t>(code);
    }
    return in_range;
}

}  // namespace

void lattice_predict(const Lattice& lattice, const Known& known, Hasher* base, int16_t* guesses, uint8_t* contexts,
                     Positions positions, unsigned threads) {
    const PointPredictor predictor(lattice, known);
    const bool needs_steps = predictor.needs_steps(base != nullptr);
    const auto work = [&](size_t, uint64_t start, size_t count, Scratch& scratch, size_t place) {
        const uint64_t place_in_tensor = positions.first + start;
        if (needs_steps)
            fill_cells(lattice, read_roots(known.squares, positions.first, start, count, scratch), place_in_tensor,
                       count, scratch.cells);
        else
            fill_offsets(lattice, place_in_tensor, count, scratch.cells);
        predictor.predict(positions.first, start, count, base != nullptr, scratch, scratch.parent + place,
                          guesses + start, contexts + start);
    };
    by_turns(positions.count, threads, work,
             [&](const Span& piece, Scratch& scratch) { update(base, scratch.parent, piece.count); });
}

Differences lattice_encode(const Lattice& lattice, Codes codes, const Known& known, Floats expected,
                           ValueDigests digests, uint8_t* contexts, uint8_t* tokens, unsigned threads) {
    const PointPredictor predictor(lattice, known);
    std::vector<std::vector<int32_t>> escapes(chunk_count(lattice.count(), kTurn));
    std::vector<uint8_t> largest_contexts(escapes.size());
    std::atomic<bool> in_range{true}, same{true};
    const auto work = [&](size_t piece, uint64_t start, size_t count, Scratch& scratch, size_t place) {
        Cells& cells = scratch.cells;
        fill_cells(lattice, read_roots(known.squares, 0, start, count, scratch), start, count, cells);
        predictor.predict(0, start, count, digests.base != nullptr, scratch, scratch.parent + place, cells.guesses,
                          contexts + start);
        const int16_t* tile_codes = read_codes(codes, start, count, cells.codes);
        uint32_t report = 0;
        if (!subtract_small(tile_codes, cells.guesses, contexts + start, count, tokens + start))
            report = subtract_large(tile_codes, cells.guesses, contexts + start, count, tokens + start);
        if (report >> 31 != 0) in_range = false;
        largest_contexts[piece] = std::max(largest_contexts[piece], largest_of(contexts + start, count));
        for (size_t i = 0; (report & 0x7fffffff) != 0 && i < count; ++i) {
            const int32_t difference = tile_codes[i] - cells.guesses[i];
            if (std::abs(difference) >= -kEscape) escapes[piece].push_back(difference);
        }
        if (expected.data == nullptr && digests.values == nullptr) return;
        values_of_codes(lattice, tile_codes, start, count, cells, scratch.values + place);
        if (expected.data != nullptr && !is_same(scratch.values + place, expected, start, count)) same = false;
    };
    by_turns(lattice.count(), threads, work, [&](const Span& piece, Scratch& scratch) {
        update(digests.values, scratch.values, piece.count);
        update(digests.base, scratch.parent, piece.count);
    });
    Differences out;
    for (const auto& some : escapes) out.escapes.insert(out.escapes.end(), some.begin(), some.end());
    out.largest_context = largest_of(largest_contexts.data(), largest_contexts.size());
    out.in_range = in_range, out.same = same;
    return out;
}

DecodeResult lattice_decode(const Lattice& lattice, const uint8_t* tokens, const uint8_t* contexts,
                            const int32_t* escapes, size_t escape_count, const Values& squares, int16_t* guesses,
                            const Decoded& out, Positions positions, unsigned threads) {
    std::vector<size_t> first_escape(chunk_count(positions.count, kTurn) + 1);
    if (escape_count != 0) first_escape = escapes_before(tokens, contexts, positions.count, threads);
    const bool has_values = out.values != nullptr || out.digest != nullptr;
    const size_t used = first_escape.back();
    std::atomic<bool> narrow{true};
    const auto work = [&](size_t piece, uint64_t start, size_t count, Scratch& scratch, size_t place) {
        int16_t* codes = guesses + start;
        int8_t unused[kTile];
        const bool wants_narrow = out.codes != nullptr && out.code_bytes == 1;
        int8_t* const narrow_place = wants_narrow ? reinterpret_cast<int8_t*>(out.codes) + start : unused;
        Sums sums = add(tokens + start, contexts + start, count, codes, narrow_place);
        const size_t large = sums.escapes;
        if (large > escape_count - std::min(escape_count, first_escape[piece]))
            throw std::invalid_argument("more large differences than escapes");
        if (large != 0) {
            sums.in_range &= add_escapes(tokens + start, contexts + start, count, escapes + first_escape[piece], codes);
            sums.narrow = narrow_codes(codes, count, narrow_place);
        }
        first_escape[piece] += large;
        if (!sums.in_range) throw std::invalid_argument("a point that is too far out");
        if (out.codes != nullptr && out.code_bytes == 2) std::memcpy(out.codes + 2 * start, codes, 2 * count);
        if (wants_narrow && !sums.narrow) narrow = false;
        if (!has_values) return;
        fill_cells(lattice, read_roots(squares, positions.first, start, count, scratch), positions.first + start,
                   count, scratch.cells);
        values_of_codes(lattice, codes, positions.first + start, count, scratch.cells,
                        out.values != nullptr ? out.values + start : scratch.values + place);
    };
    by_turns(positions.count, threads, work, [&](const Span& piece, Scratch& scratch) {
        update(out.digest, out.values != nullptr ? out.values + piece.start : scratch.values, piece.count);
    });
    return {used, narrow};
}

void lattice_run_values(const Lattice& lattice, Codes codes, Floats squares, Runs runs, float* values) {
    if (runs.stride == runs.length) runs = {runs.first, runs.length * runs.count, runs.length * runs.count, 1};
    const ScopedFpEnvironment floats;
    std::vector<Scratch, UninitializedAllocator<Scratch>> memory(1);
    Scratch& scratch = memory.front();
    by_tiles_of(runs, kTile, [&](uint64_t start, size_t count, uint64_t place) {
        if (squares.data != nullptr)
            take_roots(read_floats(squares, place, count, scratch.roots), count, scratch.roots);
        fill_cells(lattice, squares.data == nullptr ? nullptr : scratch.roots, start, count, scratch.cells);
        values_of_codes(lattice, read_codes(codes, start, count, scratch.cells.codes), start, count, scratch.cells,
                        values + place);
    });
}

namespace {

// Decodes the first `count` positions tile by tile, as long as check(values, start, length) is true; returns whether all
// were.
template <typename Check>
bool all_tiles(const Lattice& lattice, Codes codes, uint64_t count, Check check) {
    std::vector<float> decoded(static_cast<size_t>(std::min<uint64_t>(count, kTile)));
    for (uint64_t start = 0; start < count; start += kTile) {
        const uint64_t length = std::min<uint64_t>(kTile, count - start);
        lattice_run_values(lattice, codes, {}, {start, length, length, 1}, decoded.data());
        if (!check(decoded.data(), start, length)) return false;
    }
    return true;
}

}  // namespace

bool lattice_starts_with(const Lattice& lattice, Codes codes, const float* values, uint64_t count) {
    return all_tiles(lattice, codes, count, [values](const float* decoded, uint64_t start, uint64_t length) {
        return std::memcmp(decoded, values + start, 4 * length) == 0;
    });
}

void lattice_digest(const Lattice& lattice, Codes codes, Hasher& digest) {
    all_tiles(lattice, codes, lattice.count(), [&](const float* decoded, uint64_t, uint64_t length) {
        update(&digest, decoded, length);
        return true;
    });
}

std::vector<WideCodes> lattice_decode_codes(const std::vector<CodedPart>& parts, const Model& model,
                                            const uint8_t* side, size_t side_size, const uint8_t* coded,
                                            size_t coded_size, const ChunkRange& range, unsigned threads) {
    uint64_t end = 0;
    std::vector<PartDecoder> decoders;
    decoders.reserve(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
        decoders.push_back({parts[i], PointPredictor(*parts[i].lattice, parts[i].known), i, end});
        end += parts[i].positions.count;
    }
    WideList wide;
    decode_tiles(model, side, side_size, coded, coded_size, range,
                 [&] { return std::make_unique<LatticeTiles>(decoders, wide); }, threads);
    return std::move(wide.all);
}

void lattice_values(const Lattice& lattice, Codes codes, const Values& squares, float* values, Hasher* digest,
                    Positions positions, unsigned threads) {
    const auto work = [&](size_t, uint64_t start, size_t count, Scratch& scratch, size_t) {
        fill_cells(lattice, read_roots(squares, positions.first, start, count, scratch), positions.first + start,
                   count, scratch.cells);
        values_of_codes(lattice, read_codes(codes, start, count, scratch.cells.codes), positions.first + start, count,
                        scratch.cells, values + start);
    };
    by_turns(positions.count, threads, work,
             [&](const Span& piece, Scratch&) { update(digest, values + piece.start, piece.count); });
}

}  // namespace shrinkpoint
