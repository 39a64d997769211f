// What the fuzzer's parts share: how a case fails, and the parts themselves.
#pragma once
#include <functional>

#include "base/error.hpp"
#include "fuzz/cases.hpp"

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

// What `make(threads)` makes: expected to be the same with every instruction set and number of threads.
Bytes same_everywhere(const std::function<Bytes(unsigned)>& make);

// What became of mutants so far.
struct Tally {
    uint64_t accepted = 0, refused = 0, impossible = 0;
};
extern Tally tally;

void fuzz_chunks(Choices& choose);
void fuzz_tables(Choices& choose);
void fuzz_bits(Choices& choose);
void fuzz_rans(Choices& choose);
void fuzz_classes(Choices& choose);
void fuzz_lengths(Choices& choose);
void fuzz_cyclic(Choices& choose);
void fuzz_kmeans(Choices& choose);
void fuzz_lattice(Choices& choose);
void fuzz_uniform(Choices& choose);
void fuzz_planes(Choices& choose);
void fuzz_normal(Choices& choose);
void fuzz_blockfloat(Choices& choose);
void fuzz_rotation(Choices& choose);
void fuzz_indices(Choices& choose);
void fuzz_largest(Choices& choose);

}  // namespace shrinkpoint
