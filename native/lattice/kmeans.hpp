// Weighted k-means of sorted numbers: arXiv 2306.11800, algorithms "approx_kmeans" and "weighted_kmeanspp".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shrinkpoint {

// Ascending numbers and their weights.
struct WeightedSamples {
    const double* values;
    const double* weights;
    size_t count;
};

// Runs Lloyd's iteration from ascending `centers` and returns ascending centers. Stops after `iterations`, or when the
// cost falls by less than `tolerance` of itself. Throws std::invalid_argument for arguments that do not fit.
std::vector<double> kmeans(const WeightedSamples& points, std::vector<double> centers, unsigned iterations, double tolerance);

// Chooses k of the values by k-means++ and returns them ascending. Distances are as the paper prints them, or squared
// as its proof has them. If fewer than k distinct values have weight, returns all of them and repeats the largest.
std::vector<double> kmeans_plus_plus(const WeightedSamples& points, unsigned k, uint64_t seed, bool squared);

}  // namespace shrinkpoint
