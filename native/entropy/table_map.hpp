// The table of each position's context.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shrinkpoint {

// tables[i] = map[contexts[i]]; the map has `size` entries, and every context is below it.
void look_up(const uint8_t* map, size_t size, const uint16_t* contexts, size_t count, uint8_t* tables);

// The same of contexts of one byte; those beyond the map have the table of its last.
void look_up_bytes(const uint8_t* map, size_t size, const uint8_t* contexts, size_t count, uint8_t* tables);

}  // namespace shrinkpoint
