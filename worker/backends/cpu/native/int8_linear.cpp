// Linear layers of int8 weights with one scale per column, on a CPU that multiplies bfloat16: lines of
// weights are widened to bfloat16, which holds them exactly, and multiplied with all rows
// (linear.h). Inputs are rounded to bfloat16. A row's product does not depend on the others.

#include "quantized.h"

namespace {

// x [..., depth], float32 or bfloat16; panels as Int8Weights, the depth padded with zeros; bias
// [columns] of x's type → [..., columns]
Tensor int8_linear(
    const Tensor& x, const Tensor& panels, const Tensor& scales, const std::optional<Tensor>& bias,
    int64_t columns) {
#if defined(__AVX512BF16__)
  const int64_t padded = rounded_up(x.size(-1), STEP<Half>);
  const int64_t groups = (columns + QUANTIZED_GROUP - 1) / QUANTIZED_GROUP;
  TORCH_CHECK(
      panels.sizes() == at::IntArrayRef({groups, padded / 2, QUANTIZED_GROUP, 2}) &&
          panels.is_contiguous() && panels.scalar_type() == at::kChar &&
          scales.numel() == groups * QUANTIZED_GROUP && scales.scalar_type() == at::kFloat &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "int8_linear of ", x.sizes(), " ", x.scalar_type(), " and panels ", panels.sizes());
  const Int8Weights weights{panels.const_data_ptr<int8_t>(), scales.const_data_ptr<float>()};
  return quantized_product(
      x, padded, bias, columns, [&]<typename O>(const Half* in, const O* bias_row, O* out, int64_t rows) {
        Linear<Half, QUANTIZED_GROUP, Int8Weights, O>{in, weights, bias_row, out, rows, padded, columns}
            .multiply();
      });
#else
  TORCH_CHECK(false, "no kernel for int8 weights on this CPU");
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("int8_linear", &int8_linear);
}
