// Linear layers of float32 by AMX tiles, which multiply bfloat16 and sum in float32.
//
// A float32 number is the sum of three bfloat16 numbers with eight bits of it each, from high to low:
// a = a0 + a1 + a2. Of the nine products of a·b, six exceed float32's rounding: a0·b0, a0·b1, a1·b0,
// a1·b1, a0·b2, a2·b0 (Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence
// Datatype For Higher-Precision Computations", 2019). Weights are split once, inputs at each call. A
// row's product does not depend on the other rows.

#include "matmul.h"
#include "panels.h"
#include "tensors.h"

namespace {

constexpr int64_t DEPTH = 32;  // numbers in a line of a tile, which has LANES lines
constexpr int64_t TILE = LANES * DEPTH;
constexpr int64_t SIDE = 2 * LANES;  // rows and columns of a block: two by two tiles
constexpr int64_t CHAIN = 768;  // depth summed in tiles before the sums are added in float32
constexpr int64_t INPUT_BYTES = 5 << 18;  // of a thread's inputs, within its level 2 cache

constexpr int64_t PARTS = 3;
constexpr int64_t SLICE = PARTS * 2 * TILE;  // one side of a block, DEPTH numbers deep

inline int64_t depth_steps(int64_t depth) { return (depth + DEPTH - 1) / DEPTH; }

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

// Splits 16 numbers into their parts, a tile pair apart.
inline void split(Floats x, Half* to) {
#pragma GCC unroll 3
  for (int64_t part = 0; part < PARTS; ++part) {
    const Halves high = (Halves)_mm512_cvtneps_pbh((__m512)x);
    store(to + part * 2 * TILE, high);
    x -= floats(words(high) << 16);
  }
}

// Lanes that are not finite in bfloat16, and so cannot be split.
inline Ints cannot_split(Floats x) { return ((Words)x & 0x7fffffffu) >= 0x7f7f8000u; }

inline bool any(Ints lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); }

// Writes a row into slices [PARTS, 2, LANES, DEPTH], padded with zeros; returns whether all its
// numbers could be split.
bool write_slices(const float* row, int64_t depth, Half* to) {
  Ints unsplittable{};
  for (int64_t k = 0; k < depth_steps(depth); ++k)
    for (int64_t n = 0; n < DEPTH; n += LANES) {
      const Floats x = load_floats(row + k * DEPTH + n, depth - k * DEPTH - n);
      unsplittable |= cannot_split(x);
      split(x, to + k * SLICE + n);
    }
  return !any(unsplittable);
}

// The first slice of a row.
Half* slice_of(Half* slices, int64_t row, int64_t depth) {
  return slices + row / SIDE * depth_steps(depth) * SLICE + row % SIDE * DEPTH;
}

// sums [SIDE, SIDE] = rows' slices · columns' slices. Without LOWER, only the first 16 rows.
template <bool LOWER>
void multiply_slices(const Half* rows, const Half* columns, int64_t count, float* sums) {
  const auto load_rows = [&](int64_t part) {
    _tile_loadd(4, rows + 2 * part * TILE, 64);
    if (LOWER) _tile_loadd(5, rows + (2 * part + 1) * TILE, 64);
  };
  const auto load_columns = [&](int64_t part) {
    _tile_loadd(6, columns + 2 * part * TILE, 64);
    _tile_loadd(7, columns + (2 * part + 1) * TILE, 64);
  };
  const auto add_products = [] {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (LOWER) _tile_dpbf16ps(2, 5, 6);
    if (LOWER) _tile_dpbf16ps(3, 5, 7);
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < count; ++k, rows += SLICE, columns += SLICE) {
    load_rows(0);  // each product shares an operand with the previous one
    load_columns(2), add_products();
    load_columns(1), add_products();
    load_rows(1), add_products();
    load_columns(0), add_products();
    load_rows(2), add_products();
    load_rows(0), add_products();
  }
  _tile_stored(0, sums, SIDE * 4);
  _tile_stored(1, sums + LANES, SIDE * 4);
  if (LOWER) _tile_stored(2, sums + LANES * SIDE, SIDE * 4);
  if (LOWER) _tile_stored(3, sums + LANES * SIDE + LANES, SIDE * 4);
}

// x [rows, depth], tiles [columns / SIDE, depth_steps(depth), SLICE], out [rows, columns]
struct AmxLinear {
  const float* x;
  const Half* tiles;
  const float* bias;
  float* out;
  int64_t rows, depth, columns;

  // Divides rows among threads; where there are few rows, their columns too.
  void multiply() const {
    const int64_t threads = at::get_num_threads(), groups = (columns + SIDE - 1) / SIDE;
    const int64_t row_bytes = depth_steps(depth) * SLICE / SIDE * sizeof(Half);
    const int64_t fitting = std::max(INPUT_BYTES / row_bytes / SIDE * SIDE, SIDE);
    int64_t shares = rounded_up((rows + fitting - 1) / fitting, threads);
    shares = std::min(shares, (rows + SIDE - 1) / SIDE);
    const int64_t share = rounded_up((rows + shares - 1) / shares, LANES);
    shares = (rows + share - 1) / share;
    const int64_t cuts = std::min(groups, (threads + shares - 1) / shares);
    at::parallel_for(0, shares * cuts, 1, [&](int64_t begin, int64_t end) {
      const TileConfig configured;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n / cuts * share, cut = n % cuts;
        multiply(row, std::min(row + share, rows), groups * cut / cuts, groups * (cut + 1) / cuts);
      }
    });
  }

  void multiply(int64_t first, int64_t last, int64_t begin, int64_t end) const {
    thread_local std::vector<Half> memory;
    const int64_t count = rounded_up(last - first, SIDE) * depth_steps(depth) * SLICE / SIDE;
    if (int64_t(memory.size()) < count + DEPTH) memory.resize(count + DEPTH);
    Half* slices = memory.data() + (-uintptr_t(memory.data()) % 64) / sizeof(Half);
    std::vector<int64_t> unsplit;
    for (int64_t row = first; row < last; ++row)
      if (!write_slices(x + row * depth, depth, slice_of(slices, row - first, depth)))
        unsplit.push_back(row);
    keep_stores(slices);
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t row = first; row < last; row += SIDE)
        multiply(slice_of(slices, row - first, depth), row, std::min(row + SIDE, last), group);
      for (int64_t row : unsplit) multiply_unsplit(row, group);
    }
  }

  void multiply(const Half* slices, int64_t row, int64_t last, int64_t group) const {
    constexpr int64_t chain = CHAIN / DEPTH;
    const int64_t all = depth_steps(depth);
    const Half* weights = tiles + group * all * SLICE;
    const auto multiply_chain =
        last - row > LANES ? multiply_slices<true> : multiply_slices<false>;
    alignas(64) float totals[SIDE * SIDE], sums[SIDE * SIDE];
    for (int64_t k = 0; k < all; k += chain) {
      const int64_t at = k * SLICE;
      multiply_chain(slices + at, weights + at, std::min(chain, all - k), k ? sums : totals);
      if (k)
        for (int64_t n = 0; n < (last - row) * SIDE; n += LANES)
          store(totals + n, load<Floats>(totals + n) + load<Floats>(sums + n));
    }
    for (int64_t r = 0; r < last - row; ++r)
      for (int64_t lane = 0; lane < SIDE; lane += LANES)
        write(load<Floats>(totals + r * SIDE + lane), row + r, group * SIDE + lane);
  }

  // A row that cannot be split: in float32, with weights summed from their parts.
  void multiply_unsplit(int64_t row, int64_t group) const {
    for (int64_t half = 0; half < 2; ++half) {
      const Half* weights = tiles + group * depth_steps(depth) * SLICE + half * TILE;
      Floats sums{};
      for (int64_t k = 0; k < depth; ++k) {
        const Half* line = weights + k / DEPTH * SLICE + k % DEPTH / 2 * DEPTH;
        Floats weight{};
        for (int64_t part = 0; part < PARTS; ++part) {
          const Words pairs = load<Words>(line + part * 2 * TILE);
          weight += floats(k % 2 ? pairs & 0xffff0000u : pairs << 16);
        }
        sums += x[row * depth + k] * weight;
      }
      write(sums, row, group * SIDE + half * LANES);
    }
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
};

// Packs the weights' columns. Their slices are those of rows with each tile transposed: a line holds
// pairs of one depth.
void pack_columns(const Tensor& weight, Half* tiles) {
  const int64_t depth = weight.size(1);
  const float* rows = weight.const_data_ptr<float>();
  at::parallel_for(0, (weight.size(0) + SIDE - 1) / SIDE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * SIDE; row < std::min(end * SIDE, weight.size(0)); ++row)
      TORCH_CHECK(
          write_slices(rows + row * depth, depth, slice_of(tiles, row, depth)),
          "amx_pack: a weight is not finite");
    Half* last = slice_of(tiles, end * SIDE, depth);
    for (Half* tile = slice_of(tiles, begin * SIDE, depth); tile < last; tile += TILE) {
      Line lines[LANES];
      for (int64_t n = 0; n < LANES; ++n) lines[n] = load<Line>(tile + n * DEPTH);
      transpose(lines);
      for (int64_t n = 0; n < LANES; ++n) store(tile + n * DEPTH, lines[n]);
    }
  });
}

#endif

// weight [out, in] float32 → tiles [out / SIDE, in / DEPTH, SLICE] bfloat16
Tensor amx_pack(const Tensor& weight) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  TORCH_CHECK(TileConfig::available(), "AMX is not permitted on this CPU");
  const Tensor source = weight.contiguous();
  const Tensor tiles = at::zeros(
      {(source.size(0) + SIDE - 1) / SIDE, depth_steps(source.size(1)), SLICE},
      source.options().dtype(at::kBFloat16));
  pack_columns(source, tiles.mutable_data_ptr<Half>());
  return tiles;
#else
  TORCH_CHECK(false, "this CPU has no AMX");
#endif
}

// x [..., in] float32, tiles from amx_pack → [..., out]
Tensor amx_linear(
    const Tensor& x, const Tensor& tiles, const std::optional<Tensor>& bias, int64_t columns) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  const Tensor source = x.contiguous();
  const Tensor bias_row = bias ? bias->contiguous() : Tensor();
  const int64_t depth = source.size(-1), groups = (columns + SIDE - 1) / SIDE;
  TORCH_CHECK(
      tiles.sizes() == at::IntArrayRef({groups, depth_steps(depth), SLICE}) &&
          x.scalar_type() == at::kFloat &&
          (!bias || (bias_row.numel() == columns && bias_row.scalar_type() == at::kFloat)),
      "amx_linear of ", x.sizes(), " ", x.scalar_type(), " and tiles ", tiles.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  if (out.numel())
    AmxLinear{
        source.const_data_ptr<float>(), tiles.const_data_ptr<Half>(),
        bias ? bias_row.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
        out.numel() / columns, depth, columns}
        .multiply();
  return out;
#else
  TORCH_CHECK(false, "this CPU has no AMX");
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(onequeue, m) {
  m.def("amx_pack(Tensor weight) -> Tensor", &amx_pack);
  m.def(
      "amx_linear(Tensor x, Tensor tiles, Tensor? bias, int columns) -> Tensor", &amx_linear);
}
