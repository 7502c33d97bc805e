// LoRA adapters: out[row] += up(down(x[row])) for the rows that have one. Each row is computed on its
// own, with float32 sums in the order of the depth: it does not depend on the other rows or on the
// number of threads.

#include "tensors.h"

namespace {

constexpr int64_t LORA_WORK = 1 << 14;  // products that a thread computes, at least
constexpr int64_t LORA_BLOCK = 4;       // sums in registers

// down [rank, depth], up [rank, columns]
template <typename T>
struct LoraPair {
  const T *down, *up;
  int64_t rank, depth, columns;

  void add(const T* x, T* out, float* inner) const {
    for (int64_t r = 0; r < rank; r += LORA_BLOCK)
      reduce(x, r, std::min(LORA_BLOCK, rank - r), inner + r);
    for (int64_t c = 0; c < columns; c += LORA_BLOCK * LANES)
      expand(out + c, c, std::min(LORA_BLOCK * LANES, columns - c), inner);
  }

  void reduce(const T* x, int64_t first, int64_t count, float* inner) const {
    const T* rows[LORA_BLOCK];
    for (int64_t n = 0; n < LORA_BLOCK; ++n)  // the last row again instead of missing ones
      rows[n] = down + (first + std::min(n, count - 1)) * depth;
    Floats sums[LORA_BLOCK] = {};
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
      const Floats numbers = load_floats(x + k, LANES);
#pragma GCC unroll 4
      for (int64_t n = 0; n < LORA_BLOCK; ++n) sums[n] += numbers * load_floats(rows[n] + k, LANES);
    }
    if (k < depth)
      for (int64_t n = 0; n < LORA_BLOCK; ++n)
        sums[n] += load_floats(x + k, depth - k) * load_floats(rows[n] + k, depth - k);
    for (int64_t n = 0; n < count; ++n) inner[n] = sum(sums[n]);
  }

  void expand(T* out, int64_t column, int64_t count, const float* inner) const {
    const T* from = up + column;
    if (count < LORA_BLOCK * LANES) {
      for (int64_t c = 0; c < count; c += LANES) {
        Floats sums{};
        for (int64_t r = 0; r < rank; ++r)
          sums += inner[r] * load_floats(from + r * columns + c, count - c);
        store_floats(out + c, load_floats(out + c, count - c) + sums, count - c);
      }
      return;
    }
    Floats sums[LORA_BLOCK] = {};
    for (int64_t r = 0; r < rank; ++r)
#pragma GCC unroll 4
      for (int64_t n = 0; n < LORA_BLOCK; ++n)
        sums[n] += inner[r] * load_floats(from + r * columns + n * LANES, LANES);
    for (int64_t n = 0; n < LORA_BLOCK; ++n)
      store_floats(out + n * LANES, load_floats(out + n * LANES, LANES) + sums[n]);
  }
};

// For rows [rows[2 n], rows[2 n + 1]) of x [..., in] and out [..., columns], in ascending order, the
// matrices down[n] [rank, in] and up[n] [rank, columns], all of one dtype.
void add_lora(
    const Tensor& x, const Tensor& out, at::TensorList down, at::TensorList up, at::IntArrayRef rows) {
  const int64_t depth = x.size(-1), columns = out.size(-1);
  const int64_t total = x.numel() / std::max<int64_t>(depth, 1);
  TORCH_CHECK(
      out.is_contiguous() && out.numel() == total * columns && out.scalar_type() == x.scalar_type() &&
          down.size() == up.size() && rows.size() == 2 * down.size(),
      "add_lora of ", x.sizes(), " and ", out.sizes());
  int64_t last = 0, most = 1;
  std::vector<int64_t> starts{0};  // of each pair, among the rows that have one
  for (size_t n = 0; n < down.size(); ++n) {
    const int64_t rank = down[n].size(0), first = rows[2 * n], end = rows[2 * n + 1];
    TORCH_CHECK(
        down[n].is_contiguous() && up[n].is_contiguous() && down[n].dim() == 2 && up[n].dim() == 2 &&
            down[n].size(1) == depth && up[n].size(0) == rank && up[n].size(1) == columns &&
            down[n].scalar_type() == x.scalar_type() && up[n].scalar_type() == x.scalar_type() &&
            last <= first && first <= end && end <= total,
        "add_lora of rows ", first, " to ", end, " and matrices ", down[n].sizes(), " ", up[n].sizes());
    last = end, most = std::max(most, rank);
    starts.push_back(starts.back() + end - first);
  }
  const Tensor source = x.contiguous();
  dispatch(x, [&](auto kind) {
    using T = decltype(kind);
    std::vector<LoraPair<T>> pairs;
    for (size_t n = 0; n < down.size(); ++n)
      pairs.push_back(
          {down[n].template const_data_ptr<T>(), up[n].template const_data_ptr<T>(), down[n].size(0), depth,
           columns});
    const T* from = source.template const_data_ptr<T>();
    T* to = out.template mutable_data_ptr<T>();
    const int64_t grain = LORA_WORK / (most * (depth + columns)) + 1;
    at::parallel_for(0, starts.back(), grain, [&](int64_t begin, int64_t end) {
      std::vector<float> inner(most);
      int64_t n = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
      for (int64_t at = begin; at < end; ++at) {
        while (at >= starts[n + 1]) ++n;
        const int64_t row = rows[2 * n] + at - starts[n];
        pairs[n].add(from + row * depth, to + row * columns, inner.data());
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("add_lora", &add_lora);
}
