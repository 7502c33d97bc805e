// Sampling from the largest weights of a row, without sorting the others.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tensors.h"

namespace {

// A weight's bucket is its exponent and three bits of its fraction. Weights are at most 1.
constexpr int SHIFT = 20;
constexpr int64_t BUCKETS = 1024;
constexpr double NUCLEUS = 3;  // Kind.NUCLEUS of worker/model/sampler.py

int64_t bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return std::min<int64_t>(bits >> SHIFT, BUCKETS - 1);
}

// What a row keeps, as _sample_top in worker/model/sampler.py.
struct Filters {
  double top_p;
  int64_t top_k;  // 0: all
  double min_p;
  bool is_nucleus;  // top_p is relative to the sum of all weights

  struct Kept {
    float weight;
    int64_t id;
  };

  // Returns the weights that filters keep, descending, those that are equal by id.
  std::vector<Kept> keep(const float* weights, int64_t width) const {
    std::array<int64_t, BUCKETS> counts{};
    std::array<double, BUCKETS> sums{};
    for (int64_t id = 0; id < width; ++id) {
      const int64_t bucket = bucket_of(weights[id]);
      ++counts[bucket];
      sums[bucket] += weights[id];
    }
    const double mass = std::accumulate(sums.begin(), sums.end(), 0.0);
    const int64_t smallest = min_p > 0 ? bucket_of(static_cast<float>(min_p)) : 0;
    int64_t lowest = BUCKETS, count = 0;
    double sum = 0;
    do {
      count += counts[--lowest];
      sum += sums[lowest];
    } while (lowest > smallest && (!top_k || count < top_k) && !(is_nucleus && sum >= top_p * mass));
    std::vector<Kept> kept;
    kept.reserve(count);
    for (int64_t id = 0; id < width; ++id)
      if (bucket_of(weights[id]) >= lowest && weights[id] > 0) kept.push_back({weights[id], id});
    std::sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
    });
    const size_t most = top_k ? std::min<size_t>(top_k, kept.size()) : kept.size();
    const float last = kept[most - 1].weight;  // weights equal to it are kept too
    const auto below = [&](const Kept& k) { return k.weight < last || k.weight < min_p; };
    kept.erase(std::find_if(kept.begin() + 1, kept.end(), below), kept.end());
    double total = mass;
    if (!is_nucleus) {
      total = 0;
      for (const Kept& k : kept) total += k.weight;
    }
    size_t end = 0;
    for (double reached = 0; end < kept.size() && reached < top_p * total;) reached += kept[end++].weight;
    kept.resize(std::max<size_t>(end, 1));
    return kept;
  }

  // Returns the first token at which the cumulative kept weights exceed `number` times their sum.
  int64_t sample(const float* weights, int64_t width, double number) const {
    std::vector<Kept> kept = keep(weights, width);
    std::sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) { return a.id < b.id; });
    double sum = 0, reached = 0;
    for (const Kept& k : kept) sum += k.weight;
    for (const Kept& k : kept)
      if ((reached += k.weight) > number * sum) return k.id;
    return kept.back().id;
  }
};

// weights [R, N, BLOCK] relative to the largest, number [R], parameters [5, R] → tokens [R].
Tensor sample_filtered(
    const Tensor& scores, const Tensor& weights, const Tensor& number, const Tensor& parameters) {
  const int64_t rows = weights.size(0), width = rows ? weights.numel() / rows : 0;
  TORCH_CHECK(
      weights.is_contiguous() && weights.scalar_type() == at::kFloat &&
          number.scalar_type() == at::kDouble && number.numel() == rows &&
          parameters.scalar_type() == at::kDouble && parameters.dim() == 2 &&
          parameters.size(0) == 5 && parameters.size(1) == rows,
      "weights ", weights.sizes(), ", numbers ", number.sizes(), ", parameters ", parameters.sizes());
  const Tensor tokens = at::empty({rows}, weights.options().dtype(at::kLong));
  const auto of_row = parameters.accessor<double, 2>();
  const auto numbers = number.accessor<double, 1>();
  const float* from = weights.const_data_ptr<float>();
  int64_t* to = tokens.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const Filters filters{
          of_row[1][n], std::lround(of_row[2][n]), of_row[3][n], of_row[4][n] == NUCLEUS};
      to[n] = filters.sample(from + n * width, width, numbers[n]);
    }
  });
  return tokens;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("sample_filtered", &sample_filtered);
}
