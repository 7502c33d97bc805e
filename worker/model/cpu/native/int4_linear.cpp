// Linear layers of int4 weights with a scale and an offset per column and INT4_DEPTH inputs, on a CPU
// that multiplies bfloat16: weights are widened to bfloat16 and multiplied with all rows, as int8
// weights are (int8_linear.cpp). A row's product does not depend on the others.

namespace {

constexpr int64_t INT4_DEPTH = 32;  // in cpu/linear.py too
// Weights of a block, and its bytes: scales and offsets [QUANTIZED_GROUP] in bfloat16, then the codes.
constexpr int64_t INT4_WEIGHTS = INT4_DEPTH * QUANTIZED_GROUP;
constexpr int64_t INT4_BYTES = 2 * QUANTIZED_GROUP * 2 + INT4_WEIGHTS / 2;

#if defined(__AVX512BF16__)
// Blocks [columns / QUANTIZED_GROUP, depth / INT4_DEPTH, INT4_BYTES]. The order of weights is that of
// Int8Weights; 16 bytes hold 32 of them, the first 16 in their lower halves.
struct Int4Weights {
  static constexpr int64_t GROUP = QUANTIZED_GROUP, PREFETCH = 0, BUFFER = MAX_DEPTH * GROUP;
  const uint8_t* blocks;

  const Half* lines(int64_t at, int64_t count, Half* buffer) const {
    const uint8_t* block = blocks + at / INT4_WEIGHTS * INT4_BYTES;
    for (int64_t n = 0; n < count; n += INT4_WEIGHTS, block += INT4_BYTES) widen(block, buffer + n);
    return buffer;
  }

  static void widen(const uint8_t* block, Half* to) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    constexpr int eights = GROUP / 8;
    __m512 scales[eights], offsets[eights];
    for (int n = 0; n < eights; ++n) {
      scales[n] = in_pairs(block + 16 * n);
      offsets[n] = in_pairs(block + 2 * GROUP + 16 * n);
    }
    for (const uint8_t* from = block + 4 * GROUP; from < block + INT4_BYTES; from += GROUP) {
      __builtin_prefetch(from + PREFETCH_BYTES);
#pragma GCC unroll 4
      for (int n = 0; n < eights; n += 2, to += 2 * LANES) {
        const __m512i codes = _mm512_cvtepu8_epi32(load<__m128i>(from + 8 * n));
        const __m512i upper = _mm512_srli_epi32(codes, 4);
        // a permutation reads the lower four bits
        const __m512 low = _mm512_permutexvar_ps(codes, values);
        const __m512 high = _mm512_permutexvar_ps(upper, values);
        store(
            to, _mm512_cvtne2ps_pbh(
                    _mm512_fmadd_ps(high, scales[n + 1], offsets[n + 1]),
                    _mm512_fmadd_ps(low, scales[n], offsets[n])));
      }
    }
  }

  // Eight bfloat16 numbers, each twice.
  static __m512 in_pairs(const uint8_t* from) {
    const __m512i words = _mm512_cvtepu16_epi64(load<__m128i>(from));
    return (__m512)_mm512_or_si512(_mm512_slli_epi64(words, 48), _mm512_slli_epi64(words, 16));
  }

  Floats scaled(Floats sums, int64_t) const { return sums; }
};
#endif

// x [..., depth], float32 or bfloat16; blocks as Int4Weights, of a depth padded with zeros; bias
// [columns] of x's type → [..., columns]
Tensor int4_linear(
    const Tensor& x, const Tensor& blocks, const std::optional<Tensor>& bias, int64_t columns) {
#if defined(__AVX512BF16__)
  static_assert(INT4_DEPTH == STEP<Half> && MAX_DEPTH % INT4_DEPTH == 0);
  const int64_t padded = rounded_up(x.size(-1), INT4_DEPTH);
  const int64_t groups = (columns + QUANTIZED_GROUP - 1) / QUANTIZED_GROUP;
  TORCH_CHECK(
      blocks.sizes() == at::IntArrayRef({groups, padded / INT4_DEPTH, INT4_BYTES}) &&
          blocks.is_contiguous() && blocks.scalar_type() == at::kByte &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "int4_linear of ", x.sizes(), " ", x.scalar_type(), " and blocks ", blocks.sizes());
  return quantized_product(
      x, Int4Weights{blocks.const_data_ptr<uint8_t>()}, padded, bias, columns);
#else
  TORCH_CHECK(false, "no kernel for int4 weights on this CPU");
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("int4_linear", &int4_linear);
}
