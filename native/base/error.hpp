// The ways in which bytes can be wrong. The bindings raise exceptions of the same names.
#pragma once
#include <stdexcept>
#include <string>

namespace shrinkpoint {

struct Corrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Truncated : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A model does not fit the values to encode: decoding would lose bits.
struct DropsBits : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

}  // namespace shrinkpoint
