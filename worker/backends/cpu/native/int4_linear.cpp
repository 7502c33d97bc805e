// Linear layers of int4 weights with a scale and an offset per column and INT4_DEPTH inputs, on a CPU
// that multiplies bfloat16. With AMX, weights are widened to bfloat16 and multiplied with all rows, as
// int8 weights are (quantized.h); elsewhere codes are multiplied and their sums scaled. A row's
// product does not depend on the others.

#include "quantized.h"

namespace {

constexpr int64_t INT4_DEPTH = 32;  // in cpu/linear_layers.py too
// Weights of a block, and its bytes: scales and offsets [QUANTIZED_GROUP] in bfloat16, then the codes.
constexpr int64_t INT4_WEIGHTS = INT4_DEPTH * QUANTIZED_GROUP;
constexpr int64_t INT4_BYTES = 2 * QUANTIZED_GROUP * 2 + INT4_WEIGHTS / 2;

#if defined(__AVX512BF16__)
// Blocks [columns / QUANTIZED_GROUP, depth / INT4_DEPTH, INT4_BYTES]. Codes: a line of 64 bytes holds
// two inputs in pairs for each of 16 columns, in words of 16 bits; the n-th four bits of a word are
// those of column 16 n + its own.
constexpr int64_t LINE_BYTES = 64;
constexpr int PANELS_OF_GROUP = QUANTIZED_GROUP / LANES;

inline Floats bf16_floats(const uint8_t* from) { return floats(words(load<Halves>(from)) << 16); }

struct Factors {
  Floats scales[PANELS_OF_GROUP], offsets[PANELS_OF_GROUP];

  explicit Factors(const uint8_t* block) {
    for (int n = 0; n < PANELS_OF_GROUP; ++n) {
      scales[n] = bf16_floats(block + 2 * LANES * n);
      offsets[n] = bf16_floats(block + 2 * (QUANTIZED_GROUP + LANES * n));
    }
    for (int n = 0; n < 4 * QUANTIZED_GROUP; n += 64) __builtin_prefetch(block + QUANTIZED_PREFETCH_BYTES + n);
  }
};

// Weights widened to bfloat16, for AMX tiles.
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
    const Factors factors(block);
    for (const uint8_t* from = block + 4 * GROUP; from < block + INT4_BYTES; from += LINE_BYTES) {
      __builtin_prefetch(from + QUANTIZED_PREFETCH_BYTES);
      const __m512i codes = load<__m512i>(from);
#pragma GCC unroll 4
      for (int n = 0; n < PANELS_OF_GROUP; ++n, to += 2 * LANES) {
        const auto weights = [&](int shift) {  // a permutation reads the lower four bits
          const __m512 whole = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, shift), values);
          return _mm512_fmadd_ps(whole, (__m512)factors.scales[n], (__m512)factors.offsets[n]);
        };
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(weights(16 + 4 * n), weights(4 * n));
        store(to, _mm512_permutexvar_epi16(in_pairs(), halves));
      }
    }
  }

  static __m512i in_pairs() {
    Ints pairs;
    for (int n = 0; n < LANES; ++n) pairs[n] = n | (LANES + n) << 16;
    return (__m512i)pairs;
  }

  Floats scaled(Floats sums, int64_t) const { return sums; }
};

// The product by vector instructions: x [rows, depth], out [rows, columns], bias [columns] or null. Codes
// are whole numbers, which bfloat16 holds exactly. Their sum over a block is scaled, and the offset is
// multiplied with the sum of the block's inputs, `totals` [rows, depth / INT4_DEPTH].
template <typename O>
struct Int4Linear {
  static constexpr int R = INTERLEAVED_SUMS / PANELS_OF_GROUP;
  static constexpr int64_t DIRECT_ROWS = 4 * R;  // for more rows, codes are unpacked to memory first
  const Half* x;
  const uint8_t* blocks;
  const O* bias;
  O* out;
  int64_t rows, depth, columns;

  void multiply() const {
    const int64_t deep = depth / INT4_DEPTH, groups = rounded_up(columns, QUANTIZED_GROUP) / QUANTIZED_GROUP;
    std::vector<float> totals(rows * deep);
    at::parallel_for(0, rows * deep, 1 << 12, [&](int64_t begin, int64_t end) {
      const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
      for (int64_t n = begin; n < end; ++n) {
        const __m512bh inputs = (__m512bh)load<__m512i>(x + n * INT4_DEPTH);
        totals[n] = sum((Floats)_mm512_dpbf16_ps(__m512{}, inputs, ones));
      }
    });
    const int64_t share = rows_of_share(rows, groups, MAX_ROWS);
    at::parallel_for(0, (rows + share - 1) / share * groups, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> sums(std::min(rows, share) * QUANTIZED_GROUP);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n / groups * share;
        multiply(row, std::min(share, rows - row), n % groups, totals.data(), sums.data());
      }
    });
  }

  void multiply(int64_t first, int64_t count, int64_t group, const float* totals, float* sums) const {
    const int64_t deep = depth / INT4_DEPTH;
    std::fill_n(sums, count * QUANTIZED_GROUP, 0.0f);
    alignas(64) WeightsLine lines[INT4_DEPTH / 2];
    for (int64_t k = 0; k < deep; ++k) {
      const uint8_t* block = blocks + (group * deep + k) * INT4_BYTES;
      const Factors factors(block);
      const uint8_t* codes = block + 4 * QUANTIZED_GROUP;
      const auto add = [&](const auto& weights) {
        for (int64_t row = 0; row < count; row += R)
          rows_block(
              std::min<int64_t>(R, count - row), x + (first + row) * depth + k * INT4_DEPTH,
              totals + (first + row) * deep + k, factors, sums + row * QUANTIZED_GROUP, weights,
              std::make_integer_sequence<int, R>());
      };
      if (count <= DIRECT_ROWS) {
        add([&](int line) { return whole(codes + line * LINE_BYTES); });
      } else {
        for (int n = 0; n < INT4_DEPTH / 2; ++n) lines[n] = whole(codes + n * LINE_BYTES);
        add([&](int line) -> const WeightsLine& { return lines[line]; });
      }
    }
    for (int64_t row = first; row < first + count; ++row)
      for (int64_t column = group * QUANTIZED_GROUP; column < (group + 1) * QUANTIZED_GROUP;
           column += LANES, sums += LANES)
        write(load<Floats>(sums), row, column);
  }

  struct WeightsLine {
    __m512i panels[PANELS_OF_GROUP];
  };

  // The codes of a line as whole numbers from -8 to 7.
  static WeightsLine whole(const uint8_t* line) {
    const __m512i values = _mm512_broadcast_i64x4(_mm256_setr_epi16(  // a permutation reads five bits
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
    __builtin_prefetch(line + QUANTIZED_PREFETCH_BYTES);
    const __m512i codes = load<__m512i>(line);
    WeightsLine to;
#pragma GCC unroll 4
    for (int n = 0; n < PANELS_OF_GROUP; ++n)
      to.panels[n] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * n), values);
    return to;
  }

  template <typename Lines, int... N>
  void rows_block(
      int64_t count, const Half* from, const float* totals, const Factors& factors, float* sums,
      const Lines& lines, std::integer_sequence<int, N...>) const {
    ((count == N + 1 ? add_block<N + 1>(from, totals, factors, sums, lines) : void()), ...);
  }

  // `lines(n)`: the weights of a line.
  template <int ROWS, typename Lines>
  void add_block(
      const Half* from, const float* totals, const Factors& factors, float* sums,
      const Lines& lines) const {
    Floats parts[ROWS][PANELS_OF_GROUP]{};
    for (int line = 0; line < INT4_DEPTH / 2; ++line) {
      const WeightsLine& weights = lines(line);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(from + r * depth + 2 * line));
#pragma GCC unroll 4
        for (int n = 0; n < PANELS_OF_GROUP; ++n)
          parts[r][n] = (Floats)_mm512_dpbf16_ps((__m512)parts[r][n], pair, (__m512bh)weights.panels[n]);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m512 total = _mm512_set1_ps(totals[r * (depth / INT4_DEPTH)]);
      for (int n = 0; n < PANELS_OF_GROUP; ++n) {
        float* to = sums + r * QUANTIZED_GROUP + n * LANES;
        const __m512 sum = _mm512_fmadd_ps(total, (__m512)factors.offsets[n], load<__m512>(to));
        store(to, _mm512_fmadd_ps((__m512)parts[r][n], (__m512)factors.scales[n], sum));
      }
    }
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
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
  const uint8_t* from = blocks.const_data_ptr<uint8_t>();
  return quantized_product(
      x, padded, bias, columns, [&]<typename O>(const Half* in, const O* bias_row, O* out, int64_t rows) {
        if (has_tiles())
          Linear<Half, QUANTIZED_GROUP, Int4Weights, O>{
              in, Int4Weights{from}, bias_row, out, rows, padded, columns}
              .multiply();
        else
          Int4Linear<O>{in, from, bias_row, out, rows, padded, columns}.multiply();
      });
#else
  TORCH_CHECK(false, "no kernel for int4 weights on this CPU");
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("int4_linear", &int4_linear);
}
