// Describes how values become tokens: (table, symbol, extra bits) for every position. docs/format.md, "EncodedRecord".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shrinkpoint {

enum class Tokens : uint8_t {
    Level = 0,   // the symbol is the logarithm of the magnitude minus a predicted one
    Delta = 1,   // the symbol is sign and size of the difference to a predicted value
    Planes = 2,  // the symbols are the value's bytes, each byte position under a table of its own
    Codes = 3,   // the symbol is the byte minus the parent's, which is also the context; without a parent the byte
};

enum class Predictor : uint8_t {
    None = 0,
    Base = 1,    // the parent's value
    Adam = 2,    // the parent's value after one step of Adam from the moments
    Square = 3,  // the second moment after one step, the gradient taken from two first moments
};

enum class Companion : uint8_t {
    None = 0,
    Base = 1,     // the parent's value, compared with the predicted level
    Moment1 = 2,  // the square of the first moment, compared with the predicted level
};

struct Model {
    Tokens tokens = Tokens::Planes;
    Predictor predictor = Predictor::None;
    Companion companion = Companion::None;
    unsigned width = 8;      // bits of a value: 8, 16, 32, 64
    unsigned mantissa = 0;   // explicit mantissa bits of a float; 0 for integers
    unsigned fine = 0;       // Level: mantissa bits that belong to the symbol
    unsigned shift = 0;      // low bits that are zero in every value
    bool has_sign = true;    // Level: some value has its sign bit set
    int32_t bias = 0;        // Level: the level of symbol 128 without factors
    int32_t top = 0;         // Delta: the largest biased exponent of the base; Codes: the largest byte that
                             // contexts tell apart, 0 for all
    float parameters[4] = {0, 0, 0, 0};  // Adam: decay, -step size, sqrt(1 - beta2^t), eps; Square: beta1, beta2
};

// A run of values that is one matrix. Its factors stand at rows[row_offset..] and columns[column_offset..].
struct Segment {
    uint64_t start, rows, columns, row_offset, column_offset;
};

constexpr int8_t kZeroRow = -128;         // a row or column in which every value is zero
constexpr int kFactorSteps = 2;        // factors count halves of a level
constexpr int32_t kMaxCenter = 1 << 20;  // largest center of a segment
constexpr unsigned kMaxContexts = 512;
constexpr unsigned kMaxPlanes = 8;

// Level factors: level(i) is about (center + row + column) / kFactorSteps. With two steps a level, center 240, row 3
// and column -1 predict level 121.
struct Factors {
    std::vector<Segment> segments;
    std::vector<int32_t> centers;  // one a segment
    std::vector<int8_t> rows, columns;
    uint64_t origin = 0;  // position of the first value within the segments
    bool empty() const { return segments.empty(); }
};

// All arrays that a position's context may depend on besides the values; null if the record has none.
struct Arrays {
    const uint8_t* base = nullptr;          // as wide as the values
    bool in_place = false;                   // values are decoded over the base
    const float* moment1 = nullptr;
    const float* moment2 = nullptr;
    const float* moment1_base = nullptr;
    const uint8_t* hint = nullptr;           // Delta: 5 bits of context a position, in place of the moments
    const Factors* factors = nullptr;
    bool moments() const { return moment1 != nullptr && moment2 != nullptr; }
};

// Throws Corrupt for a model that no encoder writes, and for one that needs missing arrays.
void check(const Model& model, const Arrays& arrays, bool factors);

}  // namespace shrinkpoint
