// The two ways in which bytes can be wrong; the binding maps them to errors of the same names.
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

}  // namespace shrinkpoint
