// Linear layers of int4 weights with a scale and an offset per column and INPUT_DEPTH inputs
// (quantized.h).

#include "quantized.h"

namespace {

#if defined(__AVX512VNNI__)
// Weights of a block, and its bytes: scales and offsets [QUANTIZED_GROUP] in bfloat16, then the codes.
constexpr int64_t INT4_WEIGHTS = INPUT_DEPTH * QUANTIZED_GROUP;
constexpr int64_t INT4_FACTORS = 2 * QUANTIZED_GROUP * 2;
constexpr int64_t INT4_BYTES = INT4_FACTORS + INT4_WEIGHTS / 2;

inline __m512 bf16_floats(const uint8_t* from) {
  return (__m512)floats(words(load<Halves>(from)) << 16);
}

struct Factors {
  __m512 scales[PANELS_OF_GROUP], offsets[PANELS_OF_GROUP];

  Factors() = default;
  explicit Factors(const uint8_t* block) {
    for (int n = 0; n < PANELS_OF_GROUP; ++n) {
      scales[n] = bf16_floats(block + 2 * LANES * n);
      offsets[n] = bf16_floats(block + 2 * (QUANTIZED_GROUP + LANES * n));
    }
  }
};

// Blocks [columns / QUANTIZED_GROUP, depth / INPUT_DEPTH, BLOCK_BYTES]. Codes: a line of 64 bytes holds
// LINE_INPUTS inputs for each of 16 columns in the lower four bits, for the next 16 in the others. A
// weight is (code - ZERO) · scale + offset.
struct Int4Weights {
  static constexpr int ZERO = 8, ROWS = 4;
  static constexpr int64_t BLOCK_BYTES = INT4_BYTES;
  using Number = Half;
  static constexpr bool PREFETCHES = false;
  static constexpr int64_t BUFFER = MAX_DEPTH * QUANTIZED_GROUP;
  static constexpr int64_t DIRECT_PASSES = 2;
  const uint8_t* blocks;

  const uint8_t* block(int64_t number) const { return blocks + number * BLOCK_BYTES; }

  static void unpack(const uint8_t* block, int64_t line, __m512i* to) {
    const __m512i four_bits = _mm512_set1_epi8(15);
    const uint8_t* from = block + INT4_FACTORS + line * 2 * LINE_BYTES;
    for (int n = 0; n < PANELS_OF_GROUP; n += 2, from += LINE_BYTES) {
      const __m512i both = load<__m512i>(from);
      to[n] = _mm512_and_si512(both, four_bits);
      to[n + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), four_bits);
    }
  }

  static void add_scaled(
      const Factors& factors, const InputBlock& x, const __m512i* parts, __m512* sums) {
    const __m512 scale = _mm512_set1_ps(x.scale), total = _mm512_set1_ps(x.total);
    for (int n = 0; n < PANELS_OF_GROUP; ++n) {
      const __m512 scaled = _mm512_mul_ps(factors.scales[n], _mm512_cvtepi32_ps(parts[n]));
      sums[n] = _mm512_fmadd_ps(total, factors.offsets[n], sums[n]);
      sums[n] = _mm512_fmadd_ps(scale, scaled, sums[n]);
    }
  }

  struct Codes {
    const uint8_t* blocks;

    void line(int64_t block, int64_t line, __m512i (&to)[PANELS_OF_GROUP]) const {
      unpack(blocks + block * BLOCK_BYTES, line, to);
    }
    void add_scaled(int64_t block, const InputBlock& x, const __m512i* parts, __m512* sums) const {
      Int4Weights::add_scaled(Factors(blocks + block * BLOCK_BYTES), x, parts, sums);
    }
  };

  struct UnpackedCodes : PlainCodes {
    const Factors* factors;

    void add_scaled(int64_t block, const InputBlock& x, const __m512i* parts, __m512* sums) const {
      Int4Weights::add_scaled(factors[block], x, parts, sums);
    }
  };

  // Calls add(codes) with the codes of `count` blocks. For many passes they are unpacked to memory first.
  template <typename Add>
  void with_codes(int64_t first, int64_t count, int64_t passes, const Add& add) const {
    const uint8_t* from = block(first);
    if (passes <= DIRECT_PASSES) return add(Codes{from});
    alignas(64) uint8_t buffer[MAX_BLOCKS * INT4_WEIGHTS];
    Factors factors[MAX_BLOCKS];
    uint8_t* to = buffer;
    for (int64_t n = 0; n < count; ++n, from += BLOCK_BYTES) {
      factors[n] = Factors(from);
      for (int line = 0; line < LINES_OF_BLOCK; ++line, to += PANELS_OF_GROUP * LINE_BYTES) {
        __m512i panels[PANELS_OF_GROUP];
        unpack(from, line, panels);
        for (int panel = 0; panel < PANELS_OF_GROUP; ++panel) store(to + panel * LINE_BYTES, panels[panel]);
      }
    }
    add(UnpackedCodes{{buffer}, factors});
  }

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  const Half* lines(int64_t at, int64_t count, Half* buffer) const {
    const uint8_t* block = blocks + at / INT4_WEIGHTS * BLOCK_BYTES;
    for (int64_t n = 0; n < count; n += INT4_WEIGHTS, block += BLOCK_BYTES) widen(block, buffer + n);
    return buffer;
  }

  static void widen(const uint8_t* block, Half* to) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const Factors factors(block);
    for (int four = 0; four < LINES_OF_BLOCK; ++four, to += 4 * QUANTIZED_GROUP)
      for (int n = 0; n < PANELS_OF_GROUP; ++n) {
        const uint8_t* from = block + INT4_FACTORS + (2 * four + n / 2) * LINE_BYTES;
        __builtin_prefetch(from + QUANTIZED_PREFETCH_BYTES);
        const __m512i codes = _mm512_srli_epi32(load<__m512i>(from), n % 2 * 4);
        const auto weights = [&](int shift) {  // a permutation reads the lower four bits
          const __m512 whole = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, shift), values);
          return _mm512_fmadd_ps(whole, factors.scales[n], factors.offsets[n]);
        };
        for (int pair = 0; pair < 2; ++pair) {
          const auto halves = (__m512i)_mm512_cvtne2ps_pbh(weights(16 * pair + 8), weights(16 * pair));
          Half* line = to + 2 * pair * QUANTIZED_GROUP;
          store(line + 2 * LANES * n, _mm512_permutexvar_epi16(in_pairs(), halves));
        }
      }
  }

  static __m512i in_pairs() {
    Ints pairs;
    for (int n = 0; n < LANES; ++n) pairs[n] = n | (LANES + n) << 16;
    return (__m512i)pairs;
  }
#endif

  Floats scaled(Floats sums, int64_t) const { return sums; }
};
#endif

// x [..., depth], float32 or bfloat16; blocks as Int4Weights, of a depth padded with zeros; bias
// [columns] of x's type → [..., columns]
Tensor int4_linear(
    const Tensor& x, const Tensor& blocks, const std::optional<Tensor>& bias, int64_t columns) {
#if defined(__AVX512VNNI__)
  static_assert(MAX_DEPTH % INPUT_DEPTH == 0);
  const int64_t padded = rounded_up(x.size(-1), INPUT_DEPTH);
  const int64_t groups = (columns + QUANTIZED_GROUP - 1) / QUANTIZED_GROUP;
  TORCH_CHECK(
      blocks.sizes() == at::IntArrayRef({groups, padded / INPUT_DEPTH, INT4_BYTES}) &&
          blocks.is_contiguous() && blocks.scalar_type() == at::kByte &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "int4_linear of ", x.sizes(), " ", x.scalar_type(), " and blocks ", blocks.sizes());
  return quantized_product(x, padded, Int4Weights{blocks.const_data_ptr<uint8_t>()}, bias, columns);
#else
  TORCH_CHECK(false, "no kernel for int4 weights on this CPU");
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("int4_linear", &int4_linear);
}
