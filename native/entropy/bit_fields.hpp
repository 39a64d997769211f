// Writes and reads runs of bit fields: the extra bits of a tile.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/bit_writer.hpp"

namespace shrinkpoint {

constexpr uint8_t kMixedWidths = 255;

// Bits to load. `end` is the end of the readable bytes, at least kBitSlack behind the last bit used.
struct BitSpan {
    const uint8_t* data;
    const uint8_t* end;
};

// `uniform` is the width of all fields, or kMixedWidths if `widths` holds the width of each (at most 32 for 32-bit
// fields). A field must have no bits above its width.
void store_fields(const uint32_t* fields, const uint8_t* widths, uint8_t uniform, size_t count, BitWriter& bits);
void store_fields(const uint64_t* fields, const uint8_t* widths, uint8_t uniform, size_t count, BitWriter& bits);

void load_fields(const BitSpan& span, uint64_t position, const uint8_t* widths, uint8_t uniform, size_t count,
                 uint32_t* fields);
void load_fields(const BitSpan& span, uint64_t position, const uint8_t* widths, uint8_t uniform, size_t count,
                 uint64_t* fields);

}  // namespace shrinkpoint
