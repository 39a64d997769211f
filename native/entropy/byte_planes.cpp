#include "entropy/byte_planes.hpp"

namespace shrinkpoint {

void split_planes(const uint8_t* values, size_t count, unsigned bytes, uint8_t* planes) {
    for (unsigned p = 0; p < bytes; ++p)
        for (size_t i = 0; i < count; ++i) planes[p * count + i] = values[i * bytes + p];
}

void join_planes(const uint8_t* planes, size_t count, unsigned bytes, uint8_t* values) {
    for (unsigned p = 0; p < bytes; ++p)
        for (size_t i = 0; i < count; ++i) values[i * bytes + p] = planes[p * count + i];
}

}  // namespace shrinkpoint
