// Linear layers of bfloat16 weights on a CPU without bfloat16 instructions. Weights are read as two bytes
// each and widened to float32 in registers (matmul.h); inputs are widened once.

#include "linear.h"

namespace {

constexpr int64_t SPREAD = 2 * LANES;  // columns of a panel, PANEL_COLUMNS in cpu/linear_layers.py

// x [..., in], panels [columns / SPREAD, in / 2, SPREAD, 2] padded with zeros → [..., columns]; all
// bfloat16
Tensor bf16_weight_linear(
    const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, int64_t columns) {
  const int64_t depth = x.size(-1), pairs = (depth + 1) / 2;
  const int64_t groups = (columns + SPREAD - 1) / SPREAD;
  TORCH_CHECK(
      panels.sizes() == at::IntArrayRef({groups, pairs, SPREAD, 2}) && panels.is_contiguous() &&
          x.scalar_type() == at::kBFloat16 && panels.scalar_type() == at::kBFloat16 &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == at::kBFloat16)),
      "bf16_weight_linear of ", x.sizes(), " ", x.scalar_type(), " and panels ", panels.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const int64_t rows = x.numel() / std::max<int64_t>(depth, 1);
  if (!rows) return out.zero_();
  const Tensor floats = x.to(at::kFloat), bias_row = bias ? bias->contiguous() : Tensor();
  const Tensor wide = depth % 2 ? at::constant_pad_nd(floats, {0, 1}) : floats.contiguous();
  Linear<float, SPREAD, PackedWeights<Half, SPREAD>, Half>{
      wide.const_data_ptr<float>(), {panels.const_data_ptr<Half>()},
      bias ? bias_row.const_data_ptr<Half>() : nullptr, out.mutable_data_ptr<Half>(), rows, 2 * pairs,
      columns}
      .multiply();
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("bf16_weight_linear", &bf16_weight_linear);
}
