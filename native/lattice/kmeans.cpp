#include "lattice/kmeans.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace shrinkpoint {

namespace {

constexpr size_t kMaxCenters = 256;

void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

bool ascend(const double* values, size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (!std::isfinite(values[i]) || (i > 0 && values[i] < values[i - 1])) return false;
    return true;
}

void check(const WeightedSamples& points) {
    require(ascend(points.values, points.count), "values: expected ascending and finite");
    for (size_t i = 0; i < points.count; ++i)
        require(std::isfinite(points.weights[i]) && points.weights[i] >= 0,
                "weights: expected finite, and none below 0");
}

double mean_of(const WeightedSamples& points) {
    double weight = 0, sum = 0;
    for (size_t i = 0; i < points.count; ++i) {
        weight += points.weights[i];
        sum += points.weights[i] * points.values[i];
    }
    return weight > 0 ? sum / weight : 0;
}

// Sums over the first i points, for all i. Values are relative to the mean of all: squares then cancel less.
class Sums {
   public:
    explicit Sums(const WeightedSamples& points) : points_(points), middle_(mean_of(points)) {
        weights_.assign(1, 0), firsts_.assign(1, 0), squares_.assign(1, 0);
        for (size_t i = 0; i < points.count; ++i) {
            const double weight = points.weights[i], value = points.values[i] - middle_;
            weights_.push_back(weights_.back() + weight);
            firsts_.push_back(firsts_.back() + weight * value);
            squares_.push_back(squares_.back() + weight * value * value);
        }
        require(std::isfinite(squares_.back()) && std::isfinite(weights_.back()) && std::isfinite(middle_),
                "values or weights: their squares do not fit a float");
    }

    // Index of the first point beyond `border`.
    size_t place(double border) const {
        return static_cast<size_t>(std::upper_bound(points_.values, points_.values + points_.count, border) -
                                   points_.values);
    }

    // Returns the cost of the points [begin, end) under `center`, and moves `center` to their mean if they have weight.
    double take(size_t begin, size_t end, double& center) const {
        const double weight = weights_[end] - weights_[begin];
        if (begin == end || weight <= 0) return 0;
        const double first = firsts_[end] - firsts_[begin], square = squares_[end] - squares_[begin];
        const double offset = center - middle_;
        const double cost = square - 2 * offset * first + offset * offset * weight;
        // Rounding must not move a mean out of its cell: the centers would no longer ascend.
        center = std::clamp(first / weight + middle_, points_.values[begin], points_.values[end - 1]);
        return std::max(cost, 0.0);
    }

   private:
    const WeightedSamples& points_;
    double middle_;
    std::vector<double> weights_, firsts_, squares_;
};

// Does one iteration. Returns the cost of the points under the old centers.
double improve(const Sums& sums, size_t count, std::vector<double>& centers) {
    double cost = 0;
    size_t begin = 0;
    for (size_t c = 0; c < centers.size(); ++c) {
        const bool last = c + 1 == centers.size();
        // Reads this center and the next while they are still the old ones.
        const size_t end = last ? count : std::max(begin, sums.place(0.5 * centers[c] + 0.5 * centers[c + 1]));
        cost += sums.take(begin, end, centers[c]);
        begin = end;
    }
    return cost;
}

class Generator {  // splitmix64
   public:
    explicit Generator(uint64_t seed) : state_(seed) {}
    // A number in [0, 1).
    double next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
    }

   private:
    uint64_t state_;
};

// Draws an index in proportion to `masses`; returns their count if all are 0.
size_t draw(const std::vector<double>& masses, Generator& generator) {
    double total = 0;
    for (const double mass : masses) total += mass;
    require(std::isfinite(total), "values or weights: their distances do not fit a float");
    const double target = generator.next() * total;
    double sum = 0;
    size_t last = masses.size();
    for (size_t i = 0; i < masses.size(); ++i) {
        if (masses[i] <= 0) continue;
        sum += masses[i];
        last = i;
        if (sum > target) break;
    }
    return last;
}

}  // namespace

std::vector<double> kmeans(const WeightedSamples& points, std::vector<double> centers, unsigned iterations, double tolerance) {
    require(!centers.empty() && centers.size() <= kMaxCenters, "centers: expected 1 to 256");
    require(ascend(centers.data(), centers.size()), "centers: expected ascending and finite");
    require(tolerance >= 0, "tolerance: expected a number, and none below 0");
    check(points);
    const Sums sums(points);
    double previous_cost = std::numeric_limits<double>::infinity();
    for (unsigned i = 0; i < iterations; ++i) {
        std::vector<double> moved = centers;
        const double cost = improve(sums, points.count, moved);
        if (i > 0 && previous_cost - cost < tolerance * previous_cost) break;
        if (moved == centers) break;
        previous_cost = cost;
        centers.swap(moved);
    }
    return centers;
}

std::vector<double> kmeans_plus_plus(const WeightedSamples& points, unsigned k, uint64_t seed, bool squared) {
    require(k >= 1 && k <= kMaxCenters, "k: expected 1 to 256");
    check(points);
    Generator generator(seed);
    std::vector<double> nearest(points.count, std::numeric_limits<double>::infinity()), centers;
    std::vector<double> masses(points.weights, points.weights + points.count);
    while (centers.size() < k) {
        const size_t chosen = draw(masses, generator);
        if (chosen == points.count) break;
        centers.push_back(points.values[chosen]);
        for (size_t i = 0; i < points.count; ++i) {
            nearest[i] = std::min(nearest[i], std::fabs(points.values[i] - points.values[chosen]));
            masses[i] = points.weights[i] * (squared ? nearest[i] * nearest[i] : nearest[i]);
        }
    }
    require(!centers.empty(), "weights: nothing weighs anything");
    std::sort(centers.begin(), centers.end());
    centers.resize(k, centers.back());
    return centers;
}

}  // namespace shrinkpoint
