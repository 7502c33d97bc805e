// Linear layers of bfloat16 weights on a CPU without bfloat16 instructions. Weights are read as two
// bytes each and widened to float32 in registers; inputs are widened once. Sums are float32, in the
// order of the depth: a row's product does not depend on the other rows.

#include "tensors.h"

namespace {

constexpr int64_t SPREAD = 2 * LANES;    // columns of a panel, PANEL_COLUMNS in cpu/linear_layers.py
constexpr int64_t CHUNK = 1024;          // depth of a pass over the rows
constexpr int64_t ROWS_BYTES = 1 << 19;  // of inputs that stay in the level 2 cache
constexpr int64_t PREFETCH = 2048;       // numbers ahead
constexpr int64_t GRAIN = 1 << 16;       // numbers that a thread widens, at least

// Floats of a register, and the number of registers that hold sums.
#if defined(__AVX512F__)
constexpr int REGISTER = 16, ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int REGISTER = 8, ACCUMULATORS = 12;
#else
constexpr int REGISTER = 4, ACCUMULATORS = 12;
#endif
constexpr int ROW_BLOCK = ACCUMULATORS / 2;  // rows, with two registers each

typedef float Numbers __attribute__((vector_size(4 * REGISTER)));
typedef uint32_t Pairs __attribute__((vector_size(4 * REGISTER)));

inline Numbers even(Pairs pairs) { return (Numbers)(pairs << 16); }
inline Numbers odd(Pairs pairs) { return (Numbers)(pairs & 0xffff0000u); }

// x [rows, depth], panels [columns / SPREAD, depth / 2, SPREAD, 2], out [rows, columns]
struct Bf16WeightLinear {
  const float* x;
  const Half* panels;
  const float* bias;
  Half* out;
  int64_t rows, depth, columns;

  void multiply() const {
    const int64_t groups = (columns + SPREAD - 1) / SPREAD;
    const int64_t fitting = std::max<int64_t>(ROWS_BYTES / 4 / depth / ROW_BLOCK, 1) * ROW_BLOCK;
    const int64_t shares = (rows + fitting - 1) / fitting;  // of about as many rows each
    at::parallel_for(0, shares * groups, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> sums((rows / shares + 1) * SPREAD);
      for (int64_t n = begin; n < end; ++n) {
        const int64_t share = n / groups;
        multiply(rows * share / shares, rows * (share + 1) / shares, n % groups, sums.data());
      }
    });
  }

  void multiply(int64_t first, int64_t last, int64_t group, float* sums) const {
    const Half* from = panels + group * depth * SPREAD;
    for (int64_t k = 0; k < depth; k += CHUNK)
      for (int64_t row = first; row < last; row += ROW_BLOCK)
        rows_block(
            std::min<int64_t>(ROW_BLOCK, last - row), x + row * depth + k, from + k * SPREAD,
            std::min(CHUNK, depth - k), sums + (row - first) * SPREAD, k > 0,
            std::make_integer_sequence<int, ROW_BLOCK>());
    for (int64_t row = first; row < last; ++row, sums += SPREAD)
      for (int64_t lane = 0; lane < SPREAD; lane += LANES)
        write(load<Floats>(sums + lane), row, group * SPREAD + lane);
  }

  template <int... N>
  void rows_block(
      int64_t count, const float* a, const Half* lines, int64_t deep, float* sums, bool add,
      std::integer_sequence<int, N...>) const {
    ((count == N + 1 ? columns_block<N + 1>(a, lines, deep, sums, add) : void()), ...);
  }

  template <int ROWS>
  void columns_block(const float* a, const Half* lines, int64_t deep, float* sums, bool add) const {
    constexpr int all = SPREAD / REGISTER, P = ROWS * all <= ACCUMULATORS ? all : 2;
    for (int p = 0; p < all; p += P)
      block<ROWS, P>(a, lines + 2 * p * REGISTER, deep, sums + p * REGISTER, add);
  }

  template <int ROWS, int P>
  void block(const float* a, const Half* lines, int64_t deep, float* to, bool add) const {
    Numbers sums[ROWS][P];
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < P; ++p)
        sums[r][p] = add ? load<Numbers>(to + r * SPREAD + p * REGISTER) : Numbers{};
    const auto add_products = [&](const float* numbers, const Numbers* weights) {
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) sums[r][p] += numbers[r * depth] * weights[p];
    };
    for (int64_t k = 0; k < deep; k += 2, lines += 2 * SPREAD) {
      Numbers evens[P], odds[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const Pairs pairs = load<Pairs>(lines + 2 * p * REGISTER);
        evens[p] = even(pairs), odds[p] = odd(pairs);
        __builtin_prefetch(lines + PREFETCH + 2 * p * REGISTER);
      }
      add_products(a + k, evens);
      add_products(a + k + 1, odds);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < P; ++p) store(to + r * SPREAD + p * REGISTER, sums[r][p]);
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
};

// x [..., depth] as float32 [rows, depth rounded up to pairs]
Tensor widened(const Tensor& x, int64_t rows, int64_t depth) {
  const int64_t padded = rounded_up(depth, 2);
  const Tensor source = x.contiguous();
  const Tensor wide = at::empty({rows, padded}, x.options().dtype(at::kFloat));
  const Half* from = source.const_data_ptr<Half>();
  float* to = wide.mutable_data_ptr<float>();
  at::parallel_for(0, rows, GRAIN / depth + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t n = 0; n < padded; n += LANES)
        store_floats(
            to + row * padded + n, load_floats(from + row * depth + n, depth - n), padded - n);
  });
  return wide;
}

// x [..., in], panels [columns / SPREAD, in / 2, SPREAD, 2] padded with zeros → [..., columns]; all
// bfloat16 except the bias, which is float32
Tensor bf16_weight_linear(
    const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, int64_t columns) {
  const int64_t depth = x.size(-1), pairs = (depth + 1) / 2;
  const int64_t groups = (columns + SPREAD - 1) / SPREAD;
  TORCH_CHECK(
      panels.sizes() == at::IntArrayRef({groups, pairs, SPREAD, 2}) && panels.is_contiguous() &&
          x.scalar_type() == at::kBFloat16 && panels.scalar_type() == at::kBFloat16 &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == at::kFloat)),
      "bf16_weight_linear of ", x.sizes(), " ", x.scalar_type(), " and panels ", panels.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const int64_t rows = x.numel() / std::max<int64_t>(depth, 1);
  if (!rows) return out.zero_();
  const Tensor wide = widened(x, rows, depth), bias_row = bias ? bias->contiguous() : Tensor();
  Bf16WeightLinear{
      wide.const_data_ptr<float>(), panels.const_data_ptr<Half>(),
      bias ? bias_row.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<Half>(), rows, 2 * pairs,
      columns}
      .multiply();
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("bf16_weight_linear", &bf16_weight_linear);
}
