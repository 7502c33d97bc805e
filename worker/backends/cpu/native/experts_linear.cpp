// Linear layers of a mixture's experts in one parallel region: each multiplies its part of the rows, which
// are sorted by expert. The layouts are those of single layers (linear.h, quantized.h).

#include "quantized.h"

namespace {

// `linear(expert, first)`: the product of an expert, whose rows begin at `first`, with columns in
// groups of GROUP; `counts` of rows by expert.
template <int64_t GROUP, typename Of>
void multiply_experts(const int64_t* counts, int64_t experts, int64_t columns, const Of& linear) {
  struct Part {
    int64_t expert, first, row, rows, group;  // `first` row of the expert
  };
  std::vector<Part> parts;
  const int64_t groups = (columns + GROUP - 1) / GROUP;
  int64_t first = 0, most = 1;
  for (int64_t e = 0; e < experts; first += counts[e++])
    for (int64_t row = 0; row < counts[e]; row += MAX_ROWS)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t rows = std::min(MAX_ROWS, counts[e] - row);
        parts.push_back({e, first, row, rows, group});
        most = std::max(most, rows);
      }
  at::parallel_for(0, parts.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(most * GROUP);
    for (int64_t n = begin; n < end; ++n) {
      const Part& part = parts[n];
      linear(part.expert, part.first).multiply(part.row, part.rows, part.group, sums.data());
    }
  });
}

// x [rows, depth]; counts [experts], of rows; addresses [experts] of each one's weights, and of their
// scales if they are int8, of inputs padded to `padded` → [rows, columns]. `width`: columns of a group.
Tensor experts_linear(
    const Tensor& x, const Tensor& counts, const Tensor& addresses,
    const std::optional<Tensor>& scales, int64_t padded, int64_t columns, int64_t width) {
  const auto is_list = [&](const Tensor& t) {
    return t.scalar_type() == at::kLong && t.is_contiguous() && t.numel() == counts.numel();
  };
  TORCH_CHECK(
      x.dim() == 2 && x.size(1) <= padded && is_list(counts) && is_list(addresses) &&
          (!scales || is_list(*scales)) && counts.sum().item<int64_t>() == x.size(0) &&
          counts.min().item<int64_t>() >= 0,
      "experts_linear of ", x.sizes(), " and ", counts.numel(), " experts");
  const Tensor out = at::empty({x.size(0), columns}, x.options());
  const int64_t *count = counts.const_data_ptr<int64_t>(), *at = addresses.const_data_ptr<int64_t>();
  const int64_t experts = counts.numel(), missing = padded - x.size(1);
  if (scales) {
#if defined(__AVX512VNNI__)
    const int64_t* scale = scales->const_data_ptr<int64_t>();
    dispatch(x, [&](auto kind) {
      using O = decltype(kind);
      O* to = out.mutable_data_ptr<O>();
      with_inputs<Int8Weights, O>(x, padded, [&]<typename Layer>(const auto* inputs, int64_t depth) {
        multiply_experts<QUANTIZED_GROUP>(count, experts, columns, [&](int64_t e, int64_t first) {
          const Int8Weights weights{
              reinterpret_cast<const uint8_t*>(at[e]), reinterpret_cast<const float*>(scale[e])};
          return Layer{
              inputs + first * depth, weights, nullptr, to + first * columns, count[e], depth, columns};
        });
      });
    });
    return out;
#else
    TORCH_CHECK(false, "no kernel for int8 weights on this CPU");
#endif
  }
  const Tensor rows = missing ? at::constant_pad_nd(x, {0, missing}) : x.contiguous();
  dispatch(x, [&](auto kind) {
    using T = decltype(kind);
    TORCH_CHECK(HAS_KERNEL<T> && (width == 32 || width == 64), "no kernel for ", x.scalar_type());
    if constexpr (HAS_KERNEL<T>) {
      const auto multiply = [&](auto group) {
        constexpr int64_t GROUP = decltype(group)::value;
        const T* from = rows.const_data_ptr<T>();
        T* to = out.mutable_data_ptr<T>();
        multiply_experts<GROUP>(count, experts, columns, [&](int64_t e, int64_t first) {
          return Linear<T, GROUP>{
              from + first * padded, {reinterpret_cast<const T*>(at[e])}, nullptr,
              to + first * columns, count[e], padded, columns};
        });
      };
      if (width == 32)
        multiply(std::integral_constant<int64_t, 32>());
      else
        multiply(std::integral_constant<int64_t, 64>());
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("experts_linear", &experts_linear);
}
