// Weighted k-means of numbers in order: arXiv 2306.11800, algorithms "approx_kmeans" and "weighted_kmeanspp".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shrinkpoint {

// Numbers in ascending order and how much each weighs.
struct WeightedSamples {
    const double* values;
    const double* weights;
    size_t count;
};

// Lloyd's iteration from `centers`, which ascend, and so do the results. Stops after `iterations`, or when the cost
// falls by less than `tolerance` of itself. Throws std::invalid_argument for what does not fit.
std::vector<double> kmeans(const WeightedSamples& points, std::vector<double> centers, unsigned iterations, double tolerance);

// k of the values, ascending: k-means++, with the distance as the paper prints it or squared as its proof has it. Fewer
// distinct values that weigh something than k: all of them, the largest repeated.
std::vector<double> kmeans_plus_plus(const WeightedSamples& points, unsigned k, uint64_t seed, bool squared);

}  // namespace shrinkpoint
