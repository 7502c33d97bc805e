// Linear layers of packed weights. oneDNN's layout: groups of 32 or 64 columns, each stored
// line after line; a line holds one row of a float32 matrix, or two of a bfloat16 matrix in pairs. The
// caller finds the width of the groups by comparing products. Sums are float32, in the order of the
// depth: a row's product does not depend on the other rows or on the number of threads.

#pragma once

#include "matmul.h"
#include "tensors.h"

namespace {

constexpr int64_t MAX_ROWS = 288;  // that a thread multiplies with a group of columns at a time
constexpr int64_t SLICE_ROWS = 2 * LANES;  // between two threads, rows are divided at multiples: AMX tiles
constexpr int64_t FEW_SLICE_ROWS = 4;  // the same for at most SLICE_ROWS rows, without tiles
constexpr int64_t MAX_DEPTH = 512;  // so much of a group stays in the level 2 cache
constexpr int64_t FEW_ROWS_BYTES = 24576;  // in the level 1 cache: few rows wait for memory

// Calls layer.multiply(row, count, group, sums) for all rows, at most `most` at a time, and groups of GROUP
// columns. `sums` [count, GROUP] belongs to the thread. Threads have about as many slices of rows each: two
// may divide the rows of a group.
template <int64_t GROUP, typename Layer>
void multiply_shares(const Layer& layer, int64_t rows, int64_t columns, int64_t most) {
  const int64_t slice = rows <= SLICE_ROWS && !has_tiles() ? FEW_SLICE_ROWS : SLICE_ROWS;
  const int64_t groups = (columns + GROUP - 1) / GROUP, slices = (rows + slice - 1) / slice;
  const int64_t shares = (slices * slice + most - 1) / most, per_share = (slices + shares - 1) / shares;
  at::parallel_for(0, shares * groups * per_share, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(std::min(rows, per_share * slice) * GROUP);
    for (int64_t n = begin, count; n < end; n += count) {
      const int64_t part = n / per_share, first = n % per_share;
      count = std::min(per_share - first, end - n);
      const int64_t row = (part / groups * per_share + first) * slice;
      if (row < rows) layer.multiply(row, std::min(count * slice, rows - row), part % groups, sums.data());
    }
  });
}

// Weights [columns / GROUP, depth / PER_WORD, GROUP, PER_WORD] of type T.
template <typename T, int64_t GROUP>
struct PackedWeights {
  using Number = T;  // of `lines`
  static constexpr bool PREFETCHES = true;
  static constexpr int64_t BUFFER = 1;
  const T* groups;

  // Some lines of a group, in place.
  const T* lines(int64_t at, int64_t, T*) const { return groups + at; }
  Floats scaled(Floats sums, int64_t) const { return sums; }
};

// x [rows, depth], out [rows, columns] of type O, bias [columns] of the same or null
template <typename T, int64_t GROUP, typename Weights = PackedWeights<T, GROUP>, typename O = T>
struct Linear {
  // bfloat16 takes half of the cache, and its weights may have to be widened for each share of the rows
  static constexpr int64_t MAX_SHARE = sizeof(T) == 2 ? 1056 : MAX_ROWS;

  const T* x;
  Weights weights;
  const O* bias;
  O* out;
  int64_t rows, depth, columns;

  void multiply() const { multiply_shares<GROUP>(*this, rows, columns, MAX_SHARE); }

  // Multiplies some rows with a group. AMX tiles take 32 rows, the last ones fewer.
  void multiply(int64_t row, int64_t count, int64_t group, float* sums) const {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    if (whole) sum(row, whole, group, sums);
    if (count > whole) sum(row + whole, count - whole, group, sums + whole * GROUP);
    for (int64_t last = row + count; row < last; ++row, sums += GROUP)
      for (int64_t lane = 0; lane < GROUP; lane += LANES)
        write(load<Floats>(sums + lane), row, group * GROUP + lane);
  }

  void sum(int64_t row, int64_t count, int64_t group, float* sums) const {
    const Multiplier<T> multiplier(count);
    using W = typename Weights::Number;
    alignas(64) W buffer[Weights::BUFFER];
    const bool few = count <= 2 * LANES && !has_tiles();
    const int64_t most = few ? FEW_ROWS_BYTES / (GROUP * int64_t(sizeof(W))) : MAX_DEPTH;
    for (int64_t k = 0; k < depth; k += most) {
      const int64_t deep = std::min(most, depth - k);
      const W* lines = weights.lines((group * depth + k) * GROUP, deep * GROUP, buffer);
      const Product<T, GROUP, Weights::PREFETCHES, W> product{
          x + row * depth + k, depth, lines, STEP<W>, sums, GROUP, deep, k > 0};
      multiplier.multiply(product, count, GROUP / LANES);
    }
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    sums = weights.scaled(sums, column);
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
};

// Whether the CPU has instructions for T that make the native product as fast as oneDNN's.
#if defined(__AVX512F__)
template <typename T>
constexpr bool HAS_KERNEL = std::is_same_v<T, Operand<T>>;
#else
template <typename T>
constexpr bool HAS_KERNEL = false;
#endif

}  // namespace
