// Linear layers of int8 weights with one scale per column, on a CPU that multiplies bfloat16: lines of
// weights are widened to bfloat16, which holds them exactly, and multiplied with all rows
// (packed_linear.cpp). Inputs are rounded to bfloat16. A row's product does not depend on the others.

namespace {

constexpr int64_t QUANTIZED_GROUP = 4 * LANES;  // columns, QUANTIZED_COLUMNS in cpu/linear_layers.py

#if defined(__AVX512BF16__)
// Weights [columns / QUANTIZED_GROUP, depth / 2, QUANTIZED_GROUP, 2], scales [columns rounded up to a group]
struct Int8Weights {
  static constexpr int64_t PREFETCH = 0, BUFFER = MAX_DEPTH * QUANTIZED_GROUP;
  const int8_t* groups;
  const float* scales;

  const Half* lines(int64_t at, int64_t count, Half* buffer) const {
    for (int64_t n = 0; n < count; n += 2 * LANES) {
      const int8_t* from = groups + at + n;
      if (n % 64 == 0) __builtin_prefetch(from + PREFETCH_BYTES);
      const __m512bh pair = _mm512_cvtne2ps_pbh(widened(from + LANES), widened(from));
      store(buffer + n, pair);
    }
    return buffer;
  }

  static __m512 widened(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
  }

  Floats scaled(Floats sums, int64_t column) const { return sums * load<Floats>(scales + column); }
};
#endif

#if defined(__AVX512BF16__)
// x [..., depth], float32 or bfloat16, bias [columns] of x's type → [..., columns], which
// `multiply(x, bias, out, rows)` computes from x in bfloat16 with its depth padded with zeros.
template <typename Multiply>
Tensor quantized_product(
    const Tensor& x, int64_t padded, const std::optional<Tensor>& bias, int64_t columns,
    const Multiply& multiply) {
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const int64_t depth = x.size(-1), rows = depth ? x.numel() / depth : 0;
  if (!rows) return out.zero_();
  const Tensor half = x.to(at::kBFloat16), bias_row = bias ? bias->contiguous() : Tensor();
  const Tensor wide =
      padded > depth ? at::constant_pad_nd(half, {0, padded - depth}) : half.contiguous();
  dispatch(x, [&](auto kind) {
    using O = decltype(kind);
    const O* added = bias ? bias_row.const_data_ptr<O>() : nullptr;
    multiply(wide.const_data_ptr<Half>(), added, out.mutable_data_ptr<O>(), rows);
  });
  return out;
}
#endif

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
