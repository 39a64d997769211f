// The ways in which bytes can be wrong; the binding maps them to errors of the same names.
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

// Not of bytes: a model does not fit the values that are to be encoded.
struct DropsBits : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

}  // namespace shrinkpoint
