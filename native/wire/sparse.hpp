// Some values of many, and where they are: chosen, and the indices as bytes of a size known in advance.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// How k of n ascending indices are written; comm/operators/indices.py says how.
enum class IndexForm { All, Bitmap, Packed, Split };

struct IndexCode {
    IndexForm form;
    uint64_t n, k;
    unsigned width;  // bits of a field of Packed, or of the lower part of Split; at most kMaxIndexBits

    size_t low_size() const;  // bytes of the fields
    uint64_t bits() const;    // of the bitmap
    size_t size() const;      // bytes of everything
};

constexpr unsigned kMaxIndexBits = 56;

// `out` holds code.size() bytes. False if the indices are not ascending and below n: then its bytes mean nothing.
bool encode_indices(const IndexCode& code, const int64_t* indices, uint8_t* out);
// Fills `indices`; false if the bytes are not those of k ascending indices below n.
bool decode_indices(const IndexCode& code, const uint8_t* data, int64_t* indices);

// Which values are looked at together: rows of `columns` values, `kept` of each, 0 < kept <= columns < 2^32. The last row
// may be shorter: what is left of all values, of which it keeps what is left of all that are kept, at least one.
struct Rows {
    size_t columns, kept;

    bool fits(uint64_t n, uint64_t k) const;  // whether n values are such rows, of which k are kept
};

// Of each row of float32 values, given as bits, those of largest magnitude, of equals the first: ascending indices in
// all of them, and the values, at any address. nan is above infinity.
void largest_magnitudes(const IndexCode& code, const uint32_t* values, Rows rows, int64_t* indices, uint8_t* chosen,
                        unsigned threads);

// The same, and the indices as bytes. False if the values changed meanwhile.
bool encode_largest(const IndexCode& code, const uint32_t* values, Rows rows, uint8_t* out, uint8_t* chosen,
                    unsigned threads);

// Fills code.n values of `width` bytes (2, 4 or 8): zeros, and code.k chosen ones. False, and nothing is filled, if the
// bytes are not those of such indices.
bool decode_spread(const IndexCode& code, const uint8_t* data, const uint8_t* chosen, size_t width, uint8_t* out);

// The values, given as bits, at k indices, each once; false if there is no such place. `lost`: whether a value that is
// not finite is at none of them.
bool gather(const uint32_t* values, size_t n, const int64_t* indices, size_t k, uint32_t* chosen, bool& lost);

// The k of n indices whose hashes, less the lowest bit, are least, of equals the first. 0 < k <= n < 2^32.
void least_hashes(uint32_t seed, size_t n, size_t k, int64_t* indices);

}  // namespace shrinkpoint
