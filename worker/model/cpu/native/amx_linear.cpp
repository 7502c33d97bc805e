// Linear layers of float32 by the CPU's matrix tiles, which multiply bfloat16 and sum in float32.
//
// A float32 number is the sum of three bfloat16 numbers with eight bits of it each, from high to low:
// a = a0 + a1 + a2. Of the nine products that a·b then is, six weigh as much as float32 can tell:
// a0·b0, a0·b1, a1·b0, a1·b1, a0·b2, a2·b0 (Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations", 2019). Weights are split once, rows as
// they come. A row's product does not depend on the rows beside it.

#include <ATen/ops/zeros.h>

namespace {

constexpr int64_t DEEP = 32;  // numbers in a line of a tile, which has LANES lines
constexpr int64_t TILE = LANES * DEEP;
constexpr int64_t SIDE = 2 * LANES;  // rows and columns of a block: two by two tiles
constexpr int64_t CHAIN = 768;  // depth that is summed at a time; the sums are added then
constexpr int64_t ROOM = 5 << 18;  // bytes of a thread's rows, which stay in its level 2 cache

constexpr int64_t PARTS = 3;
constexpr int64_t SLICE = PARTS * 2 * TILE;  // a side of a block, as deep as a tile

inline int64_t steps(int64_t depth) { return (depth + DEEP - 1) / DEEP; }

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

// 16 numbers to the lines of their parts.
inline void split(Floats given, Half* to) {
#pragma GCC unroll 3
  for (int64_t part = 0; part < PARTS; ++part) {
    const Halves high = (Halves)_mm512_cvtneps_pbh((__m512)given);
    store(to + part * 2 * TILE, high);
    given -= floats(words(high) << 16);
  }
}

// Where bfloat16 is infinite, or not a number, while parts must be finite.
inline Ints too_large(Floats given) { return ((Words)given & 0x7fffffffu) >= 0x7f7f8000u; }

inline bool any(Ints lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); }

// A row in slices [PARTS, 2, LANES, DEEP], zeros after its end; whether all its numbers could be split.
bool slice(const float* row, int64_t depth, Half* to) {
  Ints large{};
  for (int64_t k = 0; k < steps(depth); ++k)
    for (int64_t n = 0; n < DEEP; n += LANES) {
      const Floats given = load_floats(row + k * DEEP + n, depth - k * DEEP - n);
      large |= too_large(given);
      split(given, to + k * SLICE + n);
    }
  return !any(large);
}

// Where the first slice of a row begins.
Half* slice_of(Half* slices, int64_t row, int64_t depth) {
  return slices + row / SIDE * steps(depth) * SLICE + row % SIDE * DEEP;
}

// sums [SIDE, SIDE] = rows' slices · columns' slices; LOWER: more than 16 rows are wanted.
template <bool LOWER>
void multiply_slices(const Half* rows, const Half* columns, int64_t count, float* sums) {
  const auto take_rows = [&](int64_t part) {
    _tile_loadd(4, rows + 2 * part * TILE, 64);
    if (LOWER) _tile_loadd(5, rows + (2 * part + 1) * TILE, 64);
  };
  const auto take_columns = [&](int64_t part) {
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
    take_rows(0);  // each product shares a side with the one before
    take_columns(2), add_products();
    take_columns(1), add_products();
    take_rows(1), add_products();
    take_columns(0), add_products();
    take_rows(2), add_products();
    take_rows(0), add_products();
  }
  _tile_stored(0, sums, SIDE * 4);
  _tile_stored(1, sums + LANES, SIDE * 4);
  if (LOWER) _tile_stored(2, sums + LANES * SIDE, SIDE * 4);
  if (LOWER) _tile_stored(3, sums + LANES * SIDE + LANES, SIDE * 4);
}

// x [rows, depth], tiles [columns / SIDE, steps(depth), SLICE], out [rows, columns]
struct TileLinear {
  const float* x;
  const Half* tiles;
  const float* bias;
  float* out;
  int64_t rows, depth, columns;

  // A thread takes some rows, or, where they are few, some columns of them.
  void multiply() const {
    const int64_t threads = at::get_num_threads(), groups = (columns + SIDE - 1) / SIDE;
    const int64_t row_bytes = steps(depth) * SLICE / SIDE * sizeof(Half);
    const int64_t fitting = std::max(ROOM / row_bytes / SIDE * SIDE, SIDE);
    int64_t shares = rounded_up((rows + fitting - 1) / fitting, threads);
    shares = std::min(shares, (rows + SIDE - 1) / SIDE);
    const int64_t some = rounded_up((rows + shares - 1) / shares, LANES);
    shares = (rows + some - 1) / some;
    const int64_t cuts = std::min(groups, (threads + shares - 1) / shares);
    at::parallel_for(0, shares * cuts, 1, [&](int64_t begin, int64_t end) {
      const Tiles configured;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n / cuts * some, cut = n % cuts;
        multiply(row, std::min(row + some, rows), groups * cut / cuts, groups * (cut + 1) / cuts);
      }
    });
  }

  void multiply(int64_t first, int64_t last, int64_t begin, int64_t end) const {
    thread_local std::vector<Half> memory;
    const int64_t count = rounded_up(last - first, SIDE) * steps(depth) * SLICE / SIDE;
    if (int64_t(memory.size()) < count + DEEP) memory.resize(count + DEEP);
    Half* slices = memory.data() + (-uintptr_t(memory.data()) % 64) / sizeof(Half);
    std::vector<int64_t> unsplit;
    for (int64_t row = first; row < last; ++row)
      if (!slice(x + row * depth, depth, slice_of(slices, row - first, depth)))
        unsplit.push_back(row);
    written(slices);
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t row = first; row < last; row += SIDE)
        multiply(slice_of(slices, row - first, depth), row, std::min(row + SIDE, last), group);
      for (int64_t row : unsplit) multiply_plainly(row, group);
    }
  }

  void multiply(const Half* slices, int64_t row, int64_t last, int64_t group) const {
    constexpr int64_t chain = CHAIN / DEEP;
    const int64_t all = steps(depth);
    const Half* weights = tiles + group * all * SLICE;
    const auto multiply_some =
        last - row > LANES ? multiply_slices<true> : multiply_slices<false>;
    alignas(64) float totals[SIDE * SIDE], sums[SIDE * SIDE];
    for (int64_t k = 0; k < all; k += chain) {
      const int64_t at = k * SLICE;
      multiply_some(slices + at, weights + at, std::min(chain, all - k), k ? sums : totals);
      if (k)
        for (int64_t n = 0; n < (last - row) * SIDE; n += LANES)
          store(totals + n, load<Floats>(totals + n) + load<Floats>(sums + n));
    }
    for (int64_t r = 0; r < last - row; ++r)
      for (int64_t lane = 0; lane < SIDE; lane += LANES)
        put(load<Floats>(totals + r * SIDE + lane), row + r, group * SIDE + lane);
  }

  // Of numbers that have no parts, in float32, of which the weights' parts are made up again.
  void multiply_plainly(int64_t row, int64_t group) const {
    for (int64_t half = 0; half < 2; ++half) {
      const Half* weights = tiles + group * steps(depth) * SLICE + half * TILE;
      Floats sums{};
      for (int64_t k = 0; k < depth; ++k) {
        const Half* line = weights + k / DEEP * SLICE + k % DEEP / 2 * DEEP;
        Floats weight{};
        for (int64_t part = 0; part < PARTS; ++part) {
          const Words pairs = load<Words>(line + part * 2 * TILE);
          weight += floats(k % 2 ? pairs & 0xffff0000u : pairs << 16);
        }
        sums += x[row * depth + k] * weight;
      }
      put(sums, row, group * SIDE + half * LANES);
    }
  }

  void put(Floats made, int64_t row, int64_t column) const {
    const int64_t left = columns - column;
    if (bias) made += load_floats(bias + column, left);
    store_floats(out + row * columns + column, made, left);
  }
};

// Slices of columns are those of rows, but for lines of a tile, which are columns of pairs.
void lay_out(const Tensor& weight, Half* tiles) {
  const int64_t depth = weight.size(1);
  const float* rows = weight.const_data_ptr<float>();
  at::parallel_for(0, (weight.size(0) + SIDE - 1) / SIDE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * SIDE; row < std::min(end * SIDE, weight.size(0)); ++row)
      TORCH_CHECK(
          slice(rows + row * depth, depth, slice_of(tiles, row, depth)),
          "weights that are not finite");
    Half* last = slice_of(tiles, end * SIDE, depth);
    for (Half* tile = slice_of(tiles, begin * SIDE, depth); tile < last; tile += TILE) {
      Line lines[LANES];
      for (int64_t n = 0; n < LANES; ++n) lines[n] = load<Line>(tile + n * DEEP);
      transpose(lines);
      for (int64_t n = 0; n < LANES; ++n) store(tile + n * DEEP, lines[n]);
    }
  });
}

#endif

// [out, in] → [out / SIDE, in / DEEP, SLICE]
Tensor amx_pack(const Tensor& weight) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  TORCH_CHECK(Tiles::there(), "this CPU lets us have no matrix tiles");
  const Tensor given = weight.contiguous();
  const Tensor tiles = at::zeros(
      {(given.size(0) + SIDE - 1) / SIDE, steps(given.size(1)), SLICE},
      given.options().dtype(at::kBFloat16));
  lay_out(given, tiles.mutable_data_ptr<Half>());
  return tiles;
#else
  TORCH_CHECK(false, "this CPU has no matrix tiles");
#endif
}

// x [..., in], what amx_pack made of a weight [out, in], → [..., out]
Tensor amx_linear(
    const Tensor& x, const Tensor& tiles, const std::optional<Tensor>& bias, int64_t columns) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  const Tensor given = x.contiguous();
  const Tensor added = bias ? bias->contiguous() : Tensor();
  const int64_t depth = given.size(-1), groups = (columns + SIDE - 1) / SIDE;
  TORCH_CHECK(
      tiles.sizes() == at::IntArrayRef({groups, steps(depth), SLICE}) &&
          x.scalar_type() == at::kFloat &&
          (!bias || (added.numel() == columns && added.scalar_type() == at::kFloat)),
      "a product of ", x.sizes(), " ", x.scalar_type(), " with tiles ", tiles.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  if (out.numel())
    TileLinear{
        given.const_data_ptr<float>(), tiles.const_data_ptr<Half>(),
        bias ? added.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
        out.numel() / columns, depth, columns}
        .multiply();
  return out;
#else
  TORCH_CHECK(false, "this CPU has no matrix tiles");
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(onequeue, m) {
  m.def("amx_pack(Tensor weight) -> Tensor", &amx_pack);
  m.def(
      "amx_linear(Tensor x, Tensor tiles, Tensor? bias, int columns) -> Tensor", &amx_linear);
}
