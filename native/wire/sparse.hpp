// Chooses some values of many and writes their indices in bytes of a size known in advance.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// Forms of k ascending indices below n; comm/compressors/index_coding.py describes them.
enum class IndexForm { All, Bitmap, Packed, Split };

struct IndexCode {
    IndexForm form;
    uint64_t n, k;
    unsigned width;  // bits of a field of Packed, or of the lower part of Split; at most kMaxIndexBits

    size_t low_size() const;  // bytes of all fields
    uint64_t bits() const;    // bits of the bitmap
    size_t size() const;      // bytes of the whole code
};

constexpr unsigned kMaxIndexBits = 56;

// Writes indices to `out`, code.size() bytes. Returns false if they are not ascending and below n; the bytes are then
// not valid.
bool encode_indices(const IndexCode& code, const int64_t* indices, uint8_t* out);
// Fills `indices`. Returns false if the bytes are not those of k ascending indices below n.
bool decode_indices(const IndexCode& code, const uint8_t* data, int64_t* indices);

// Rows in which values are compared: `columns` values each, of which `kept` are kept, 0 < kept <= columns < 2^32. The
// last row may be shorter. It has the remaining values and keeps the remaining number, at least one.
struct Rows {
    size_t columns, kept;

    bool fits(uint64_t n, uint64_t k) const;  // true if n values make such rows and k are kept
};

// Chooses from each row of float32 values, given as bits, those of largest magnitude; the first of equals. Returns
// ascending indices into all rows, and the values, at any address. A nan is above infinity.
void largest_magnitudes(const IndexCode& code, const uint32_t* values, Rows rows, int64_t* indices, uint8_t* chosen,
                        unsigned threads);

// Same, with the indices as bytes. Returns false if the values changed meanwhile.
bool encode_largest(const IndexCode& code, const uint32_t* values, Rows rows, uint8_t* out, uint8_t* chosen,
                    unsigned threads);

// Fills code.n values of `width` bytes (2, 4 or 8) with zeros and code.k chosen values. Returns false and fills nothing
// if the bytes are not those of such indices.
bool decode_spread(const IndexCode& code, const uint8_t* data, const uint8_t* chosen, size_t width, uint8_t* out);

// Gathers the values, given as bits, at k distinct indices. Returns false if an index is out of range. Sets `lost` if a
// value that is not finite is at none of them.
bool gather(const uint32_t* values, size_t n, const int64_t* indices, size_t k, uint32_t* chosen, bool& lost);

// Returns the k of n indices with the least hashes, without the lowest bit; the first of equals. 0 < k <= n < 2^32.
void least_hashes(uint32_t seed, size_t n, size_t k, int64_t* indices);

}  // namespace shrinkpoint
