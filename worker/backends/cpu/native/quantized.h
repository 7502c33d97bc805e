// Int8 weights, and what products with int8 and int4 weights share, on a CPU that multiplies bfloat16.

#pragma once

#include "linear.h"

namespace {

constexpr int64_t QUANTIZED_GROUP = 4 * LANES;  // columns, QUANTIZED_COLUMNS in cpu/linear_layers.py

// Ahead of the weights that are read: fewer bytes than of bfloat16, as each takes more time.
constexpr int64_t QUANTIZED_PREFETCH_BYTES = 2048;

#if defined(__AVX512BF16__)
// Weights [columns / QUANTIZED_GROUP, depth / 2, QUANTIZED_GROUP, 2], scales [columns rounded up to a group]
struct Int8Weights {
  static constexpr int64_t PREFETCH = 0, BUFFER = MAX_DEPTH * QUANTIZED_GROUP;
  const int8_t* groups;
  const float* scales;

  const Half* lines(int64_t at, int64_t count, Half* buffer) const {
    for (int64_t n = 0; n < count; n += 2 * LANES) {
      const int8_t* from = groups + at + n;
      if (n % 64 == 0) __builtin_prefetch(from + QUANTIZED_PREFETCH_BYTES);
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

}  // namespace
