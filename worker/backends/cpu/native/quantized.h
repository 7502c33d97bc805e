// Products with int8 and int4 weights. With AMX, weights are widened to bfloat16 and multiplied by tiles
// (linear.h). Elsewhere they are multiplied as integers (AVX512-VNNI): inputs are rounded to 8 bits, with a
// scale for each row and INPUT_DEPTH inputs. A row's product does not depend on the others.

#pragma once

#include "linear.h"

#include <memory>

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t QUANTIZED_GROUP = 4 * LANES;  // columns, QUANTIZED_COLUMNS in cpu/linear_layers.py
constexpr int64_t INPUT_DEPTH = 32;  // inputs that share a scale; INT8_DEPTH and INT4_DEPTH there

#if defined(__AVX512VNNI__)
constexpr int64_t QUANTIZED_PREFETCH_BYTES = 2048;  // of weights that are widened
constexpr int64_t PREFETCH_BLOCKS = 16;  // ahead, of weights that are multiplied as integers
constexpr int64_t MAX_BLOCKS = 4;  // so many blocks of a group stay in the level 1 cache
constexpr int PANELS_OF_GROUP = QUANTIZED_GROUP / LANES;
constexpr int64_t LINE_INPUTS = 4;  // that one instruction multiplies for each of 16 columns
constexpr int64_t LINES_OF_BLOCK = INPUT_DEPTH / LINE_INPUTS;
constexpr int64_t LINE_BYTES = 64;  // of a line of one panel

// INPUT_DEPTH inputs of a row, x ≈ scale · codes.
struct InputBlock {
  int8_t codes[INPUT_DEPTH];
  float scale, total;  // total: scale · the sum of the codes
  int32_t start;  // of sums with weights plus ZERO: -ZERO · the sum of the codes
};

using InputBlocks = std::unique_ptr<InputBlock[]>;

// The largest input has the code 127 or -127. With an input that is not finite the scale is NaN, and so are
// the row's products.
template <int ZERO, typename T>
inline void round_inputs(const T* from, int64_t count, InputBlock& to) {
  const __m512 low = (__m512)load_floats(from, count);
  const __m512 high = (__m512)load_floats(from + LANES, count - LANES);
  const __m512i bits = _mm512_set1_epi32(0x7fffffff);  // all but the sign
  const __m512i sizes = _mm512_max_epu32(
      _mm512_and_epi32((__m512i)low, bits), _mm512_and_epi32((__m512i)high, bits));
  const uint32_t largest_bits = _mm512_reduce_max_epu32(sizes);
  const float largest = load<float>(&largest_bits);
  const bool is_finite = largest_bits < 0x7f800000;
  to.scale = is_finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
  const __mmask16 kept = is_finite && largest > 1e-30f ? 0xffff : 0;  // a smaller one has no reciprocal
  const __m512 factor = _mm512_set1_ps(127 / largest);
  const __m512i one = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, factor));
  const __m512i other = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, factor));
  store(to.codes, _mm512_cvtsepi32_epi8(one));
  store(to.codes + LANES, _mm512_cvtsepi32_epi8(other));
  const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(one, other));
  to.total = to.scale * sum;
  to.start = -ZERO * sum;
}

// x [rows, depth] → [rows, depth / INPUT_DEPTH], rounded up
template <int ZERO, typename T>
InputBlocks round_inputs(const T* x, int64_t rows, int64_t depth) {
  const int64_t blocks = (depth + INPUT_DEPTH - 1) / INPUT_DEPTH;
  InputBlocks rounded(new InputBlock[rows * blocks]);
  const int64_t whole = depth / INPUT_DEPTH * INPUT_DEPTH;
  at::parallel_for(0, rows, std::max<int64_t>(1, 512 / blocks), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * depth;
      InputBlock* to = rounded.get() + row * blocks;
      for (int64_t k = 0; k < whole; k += INPUT_DEPTH) round_inputs<ZERO>(from + k, INPUT_DEPTH, *to++);
      if (whole < depth) round_inputs<ZERO>(from + whole, depth - whole, *to);
    }
  });
  return rounded;
}

// The product by integers: x [rows, blocks], out [rows, columns], bias [columns] or null. Weights are
// codes less Weights::ZERO. The sum over a block is exact; it is scaled and added in float32, in the
// order of the depth.
template <typename Weights, typename O>
struct IntegerLinear {
  static constexpr int R = Weights::ROWS;  // that a pass over the weights multiplies

  const InputBlock* x;
  Weights weights;
  const O* bias;
  O* out;
  int64_t rows, blocks, columns;

  void multiply() const { multiply_shares<QUANTIZED_GROUP>(*this, rows, columns, MAX_ROWS); }

  void multiply(int64_t row, int64_t count, int64_t group, float* sums) const {
    std::fill_n(sums, count * QUANTIZED_GROUP, 0.0f);
    for (int64_t k = 0; k < blocks; k += MAX_BLOCKS) {
      const int64_t deep = std::min(MAX_BLOCKS, blocks - k);
      const InputBlock* from = x + row * blocks + k;
      const int64_t block = group * blocks + k, passes = (count + R - 1) / R;
      weights.with_codes(block, deep, passes, [&](const auto& codes) {
        add(from, count, deep, passes, codes, weights.block(block + PREFETCH_BLOCKS), sums);
      });
    }
    for (int64_t last = row + count; row < last; ++row)
      for (int64_t lane = 0; lane < QUANTIZED_GROUP; lane += LANES, sums += LANES)
        write(load<Floats>(sums), row, group * QUANTIZED_GROUP + lane);
  }

  // Passes have about as many rows each. Each prefetches its share of the blocks that come next.
  template <typename Codes>
  void add(
      const InputBlock* from, int64_t count, int64_t deep, int64_t passes, const Codes& codes,
      const uint8_t* next, float* sums) const {
    constexpr int64_t LINES = Weights::BLOCK_BYTES / LINE_BYTES;
    for (int64_t n = 0; n < passes; ++n) {
      const int64_t row = count * n / passes, line = LINES * n / passes;
      const Ahead ahead{
          next + line * LINE_BYTES, (LINES * (n + 1) / passes - line) * LINE_BYTES, passes > FEW_PASSES};
      pass(
          count * (n + 1) / passes - row, from + row * blocks, deep, codes, ahead,
          sums + row * QUANTIZED_GROUP, std::make_integer_sequence<int, R>());
    }
  }

  // What to prefetch of a block.
  struct Ahead {
    const uint8_t* from;
    int64_t bytes;
    bool to_level_1;
  };

  template <typename Codes, int... N>
  void pass(
      int64_t count, const InputBlock* from, int64_t deep, const Codes& codes, const Ahead& ahead,
      float* sums, std::integer_sequence<int, N...>) const {
    ((count == N + 1 ? pass<N + 1>(from, deep, codes, ahead, sums) : void()), ...);
  }

  template <int ROWS, typename Codes>
  void pass(const InputBlock* from, int64_t deep, const Codes& codes, Ahead ahead, float* to) const {
    constexpr int P = PANELS_OF_GROUP;
    __m512 sums[ROWS][P];
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < P; ++n) sums[r][n] = load<__m512>(to + r * QUANTIZED_GROUP + n * LANES);
    for (int64_t block = 0; block < deep; ++block, ++from, ahead.from += Weights::BLOCK_BYTES) {
      prefetch(ahead.from, ahead.bytes, ahead.to_level_1);
      __m512i parts[ROWS][P];
      for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < P; ++n) parts[r][n] = _mm512_set1_epi32(from[r * blocks].start);
#pragma GCC unroll 8
      for (int line = 0; line < LINES_OF_BLOCK; ++line) {
        __m512i panels[P];
        codes.line(block, line, panels);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const int8_t* inputs = from[r * blocks].codes + line * LINE_INPUTS;
          const __m512i four = _mm512_set1_epi32(load<int32_t>(inputs));
#pragma GCC unroll 4
          for (int n = 0; n < P; ++n) parts[r][n] = _mm512_dpbusd_epi32(parts[r][n], panels[n], four);
        }
      }
      for (int r = 0; r < ROWS; ++r) codes.add_scaled(block, from[r * blocks], parts[r], sums[r]);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < P; ++n) store(to + r * QUANTIZED_GROUP + n * LANES, sums[r][n]);
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    sums = weights.scaled(sums, column);
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
};

// Lines of codes in memory: a byte for each of LINE_INPUTS inputs of each column.
struct PlainCodes {
  const uint8_t* codes;

  void line(int64_t block, int64_t line, __m512i (&to)[PANELS_OF_GROUP]) const {
    const uint8_t* from = codes + (block * LINES_OF_BLOCK + line) * PANELS_OF_GROUP * LINE_BYTES;
    for (int n = 0; n < PANELS_OF_GROUP; ++n) to[n] = load<__m512i>(from + n * LINE_BYTES);
  }
};

// Weights [columns / QUANTIZED_GROUP, depth / 4, QUANTIZED_GROUP, 4] plus ZERO, scales [columns
// rounded up to a group]
struct Int8Weights {
  static constexpr int ZERO = 128, ROWS = 3;  // GCC keeps the sums of so many rows in registers
  static constexpr int64_t BLOCK_BYTES = INPUT_DEPTH * QUANTIZED_GROUP;
  using Number = Half;
  static constexpr bool PREFETCHES = false;
  static constexpr int64_t BUFFER = MAX_DEPTH * QUANTIZED_GROUP;
  const uint8_t* panels;
  const float* scales;

  const uint8_t* block(int64_t number) const { return panels + number * BLOCK_BYTES; }

  struct Codes : PlainCodes {
    static void add_scaled(int64_t, const InputBlock& x, const __m512i* parts, __m512* sums) {
      const __m512 scale = _mm512_set1_ps(x.scale);
      for (int n = 0; n < PANELS_OF_GROUP; ++n)
        sums[n] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(parts[n]), sums[n]);
    }
  };

  // Calls add(codes) with the codes of some blocks.
  template <typename Add>
  void with_codes(int64_t first, int64_t, int64_t, const Add& add) const {
    add(Codes{{block(first)}});
  }

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  // Some lines of a group, as Linear reads them: of two inputs side by side.
  const Half* lines(int64_t at, int64_t count, Half* buffer) const {
    const uint8_t* from = panels + at;
    for (Half *to = buffer, *end = buffer + count; to < end; to += 2 * QUANTIZED_GROUP)
#pragma GCC unroll 4
      for (int n = 0; n < PANELS_OF_GROUP; ++n, from += LINE_BYTES, to += 2 * LANES) {
        __builtin_prefetch(from + QUANTIZED_PREFETCH_BYTES);
        const __m512i codes = load<__m512i>(from);
        store(to, pair(codes, _mm512_srli_epi32(codes, 8)));
        store(to + 2 * QUANTIZED_GROUP, pair(_mm512_srli_epi32(codes, 16), _mm512_srli_epi32(codes, 24)));
      }
    return buffer;
  }

  // Two inputs side by side, from the lowest bytes.
  static __m512i pair(__m512i first, __m512i second) {
    return _mm512_or_si512(_mm512_srli_epi32(weight(first), 16), weight(second));
  }
  // The lowest byte less ZERO, as float32: 2^23 plus the byte has it in its last bits.
  static __m512i weight(__m512i codes) {
    const __m512 large = _mm512_set1_ps(1 << 23);
    const __m512i sum = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(255), (__m512i)large, 0xea);
    return (__m512i)_mm512_sub_ps((__m512)sum, _mm512_set1_ps((1 << 23) + ZERO));
  }
#endif

  Floats scaled(Floats sums, int64_t column) const { return sums * load<Floats>(scales + column); }
};

// Calls run<Layer>(inputs, width): the layer that this CPU multiplies fastest, Linear or IntegerLinear, and
// x [..., depth] as its rows of `width`, the depth padded with zeros to `padded`.
template <typename Weights, typename O, typename Run>
void with_inputs(const Tensor& x, int64_t padded, const Run& run) {
  const int64_t depth = x.size(-1);
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if (has_tiles()) {
    const Tensor half = x.to(at::kBFloat16);
    const Tensor rows =
        padded > depth ? at::constant_pad_nd(half, {0, padded - depth}) : half.contiguous();
    using Layer = Linear<Half, QUANTIZED_GROUP, Weights, O>;
    return run.template operator()<Layer>(rows.const_data_ptr<Half>(), padded);
  }
#endif
  const Tensor dense = x.contiguous();
  const InputBlocks inputs =
      round_inputs<Weights::ZERO>(dense.const_data_ptr<O>(), x.numel() / depth, depth);
  run.template operator()<IntegerLinear<Weights, O>>(inputs.get(), padded / INPUT_DEPTH);
}

// x [..., depth], float32 or bfloat16; bias [columns] of x's type → [..., columns]
template <typename Weights>
Tensor quantized_product(
    const Tensor& x, int64_t padded, const Weights& weights, const std::optional<Tensor>& bias,
    int64_t columns) {
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const int64_t depth = x.size(-1), rows = depth ? x.numel() / depth : 0;
  if (!rows) return out.zero_();
  const Tensor bias_row = bias ? bias->contiguous() : Tensor();
  dispatch(x, [&](auto kind) {
    using O = decltype(kind);
    const O* added = bias ? bias_row.const_data_ptr<O>() : nullptr;
    with_inputs<Weights, O>(x, padded, [&]<typename Layer>(const auto* inputs, int64_t width) {
      Layer{inputs, weights, added, out.mutable_data_ptr<O>(), rows, width, columns}.multiply();
    });
  });
  return out;
}
#endif

}  // namespace
