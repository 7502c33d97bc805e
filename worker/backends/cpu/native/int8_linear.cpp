// Linear layers of int8 weights with one scale per column (quantized.h).

#include "quantized.h"

namespace {

// x [..., depth], float32 or bfloat16; panels as Int8Weights, the depth padded with zeros; bias
// [columns] of x's type → [..., columns]
Tensor int8_linear(
    const Tensor& x, const Tensor& panels, const Tensor& scales, const std::optional<Tensor>& bias,
    int64_t columns) {
#if defined(__AVX512VNNI__)
  const int64_t padded = rounded_up(x.size(-1), INPUT_DEPTH);
  const int64_t groups = (columns + QUANTIZED_GROUP - 1) / QUANTIZED_GROUP;
  TORCH_CHECK(
      panels.sizes() == at::IntArrayRef({groups, padded / LINE_INPUTS, QUANTIZED_GROUP, LINE_INPUTS}) &&
          panels.is_contiguous() && panels.scalar_type() == at::kByte &&
          scales.numel() == groups * QUANTIZED_GROUP && scales.scalar_type() == at::kFloat &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "int8_linear of ", x.sizes(), " ", x.scalar_type(), " and panels ", panels.sizes());
  const Int8Weights weights{panels.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>()};
  return quantized_product(x, padded, weights, bias, columns);
#else
  TORCH_CHECK(false, "no kernel for int8 weights on this CPU");
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("int8_linear", &int8_linear);
}
