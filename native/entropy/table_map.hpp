// Looks up the table of each position's context.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// Sets tables[i] = map[contexts[i]]. The map has `size` entries, and every context is below `size`.
void look_up(const uint8_t* map, size_t size, const uint16_t* contexts, size_t count, uint8_t* tables);

// Same for contexts of one byte. Contexts beyond the map have the table of its last entry.
void look_up_bytes(const uint8_t* map, size_t size, const uint8_t* contexts, size_t count, uint8_t* tables);

}  // namespace shrinkpoint
