// What the fuzzer's parts share: how a case fails, and the parts themselves.
#pragma once
#include "cases.hpp"
#include "error.hpp"

namespace shrinkpoint {

// Ends the program and names the case unless it `holds`.
void expect(bool holds, const char* message);

// Runs `work`; whether it ended without one of the errors that bytes may cause.
template <typename Work>
bool passes(Work work) {
    try {
        work();
    } catch (const Corrupt&) {
        return false;
    } catch (const Truncated&) {
        return false;
    }
    return true;
}

void fuzz_lengths(Choices& choose);
void fuzz_cyclic(Choices& choose);
void fuzz_kmeans(Choices& choose);

}  // namespace shrinkpoint
