// Checks that the parts of the fuzzer share, and the parts.
#pragma once
#include <functional>

#include "base/error.hpp"
#include "fuzz/cases.hpp"

namespace shrinkpoint {

// Ends the program and names the case unless `holds`.
void expect(bool holds, const char* message);

// Runs `work`. Returns true unless it threw one of the errors that bytes may cause.
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

// Returns what `make(threads)` makes. Expects it to be the same with every instruction set and number of threads.
Bytes same_everywhere(const std::function<Bytes(unsigned)>& make);

// The same, and expects the result under another rounding mode of the calling thread, too.
Bytes same_under_any_rounding(const std::function<Bytes(unsigned)>& make);

// Outcomes of mutants so far.
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
