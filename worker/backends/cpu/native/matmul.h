// Products of rows with panels (panels.h): by vector instructions, or by AMX tiles.

#pragma once

#include "vectors.h"

#include <ATen/cpu/Utils.h>

namespace {

#if defined(__AVX512F__)
constexpr int SUMS = 16, PANELS = 2;  // accumulator registers, and the panels that share them
constexpr int INTERLEAVED_SUMS = 24;  // where panels are interleaved
#else
constexpr int SUMS = 6, PANELS = 1, INTERLEAVED_SUMS = 6;
#endif
// How many bytes ahead weights are prefetched: NEAR by tiles and by one pass of up to FEW_ROWS, which
// does little else. FEW_PASSES or fewer over the weights wait for memory, and prefetch into the level 2
// cache; more prefetch into the level 1 cache.
constexpr int64_t NEAR = 8192, FAR = 32768, FEW_ROWS = 3, FEW_PASSES = 4;

// Prefetches `bytes`, in lines of 64.
inline void prefetch(const void* from, int64_t bytes, bool to_level_1) {
  const char *at = static_cast<const char*>(from), *end = at + bytes;
  if (to_level_1)
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 3);
  else
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

inline Sums add_product(Sums sum, const float* a, const float* line) { return sum + *a * load<Sums>(line); }
// Two numbers of a row and of each column, the weights widened to float32.
inline Sums add_product(Sums sum, const float* a, const Half* line) {
  const Line pairs = load<Line>(line);
  sum += a[0] * (Sums)(pairs << 16);
  return sum + a[1] * (Sums)(pairs & 0xffff0000u);
}
#if defined(__AVX512BF16__)
inline Sums add_product(Sums sum, const Half* a, const Half* line) {
  const __m512i pair = _mm512_set1_epi32(load<int32_t>(a));
  return (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)load<__m512i>(line));
}
#endif

// A product's operands: c [rows, 16 · panels] = a [rows, depth] · panels of type W, plus c if `add`. Lines of a
// panel are LINE words apart, more than LANES where panels are interleaved. With PREFETCHES, lines
// that come next in memory are prefetched, by each pass over the panels its share.
template <typename T, int64_t LINE = LANES, bool PREFETCHES = false, typename W = T>
struct Product {
  static constexpr int P = LINE == LANES ? PANELS : LINE / LANES;
  static constexpr int R = (LINE == LANES ? SUMS : INTERLEAVED_SUMS) / P;

  const T* a;
  int64_t a_row;
  const W* panels;
  int64_t panel;  // stride
  float* c;
  int64_t c_row;
  int64_t depth;
  bool add;

  template <int ROWS, int COUNT>
  void block(int64_t row, int64_t at, int64_t pass, int64_t passes) const {
    constexpr int REGISTERS = COUNT * LANES / WIDTH;
    const T* from = a + row * a_row;
    const W* lines = panels + at * panel;
    float* to = c + row * c_row + at * LANES;
    Sums sums[ROWS][REGISTERS];
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < REGISTERS; ++n) sums[r][n] = add ? load<Sums>(to + r * c_row + n * WIDTH) : Sums{};
    for (int64_t k = 0, turn = pass; k < depth; k += PER_WORD<W>, --turn) {
      if (PREFETCHES && turn == 0) {
        const bool near = passes == 1 && ROWS <= FEW_ROWS;
        const W* ahead = lines + k * LINE + (near ? NEAR : FAR) / sizeof(W);
        prefetch(ahead, COUNT * LANES * 4, near || passes > FEW_PASSES);
        turn = passes;
      }
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < REGISTERS; ++n) {
          const int64_t column = n * WIDTH % LANES * PER_WORD<W>;
          const W* line = lines + n * WIDTH / LANES * panel + k * LINE + column;
          sums[r][n] = add_product(sums[r][n], from + r * a_row + k, line);
        }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int n = 0; n < REGISTERS; ++n) store(to + r * c_row + n * WIDTH, sums[r][n]);
  }

  template <int COUNT, int... N>
  void rows_block(
      int64_t rows, int64_t row, int64_t at, int64_t pass, int64_t passes,
      std::integer_sequence<int, N...>) const {
    ((rows == N + 1 ? block<N + 1, COUNT>(row, at, pass, passes) : void()), ...);
  }

  void multiply(int64_t rows, int64_t panel_count) const {
    constexpr auto up_to = std::make_integer_sequence<int, R>();
    const int64_t passes = (rows + R - 1) / R;  // of about as many rows each
    for (int64_t at = 0; at < panel_count; at += P)
      for (int64_t n = 0; n < passes; ++n) {
        const int64_t row = rows * n / passes, count = rows * (n + 1) / passes - row;
        if (at + P <= panel_count)
          rows_block<P>(count, row, at, n, passes, up_to);
        else
          rows_block<1>(count, row, at, n, passes, up_to);
      }
  }
};

// Holds the CPU's configuration for products of up to so many rows while it exists.
template <typename T>
struct Multiplier {
  explicit Multiplier(int64_t = 2 * LANES) {}

  template <typename P = Product<T>>
  void multiply(const P& product, int64_t rows, int64_t panels) const {
    product.multiply(rows, panels);
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// GCC does not know that tile instructions read memory: this keeps earlier stores to it in place.
inline void keep_stores(const void* from) { asm volatile("" : : "r"(from) : "memory"); }

// Configures the AMX tiles, 16 lines of 64 bytes each, for products of up to so many rows; the
// destructor restores the previous configuration. Does nothing where AMX is not available.
class TileConfig {
 public:
  explicit TileConfig(int64_t rows = 2 * LANES) {
    if (!available()) return;
    alignas(64) Config ours{};
    ours.palette = 1;
    for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.lines[tile] = LANES;
    for (int tile : {0, 1, 4}) ours.lines[tile] = std::min(rows, LANES);
    for (int tile : {2, 3, 5}) ours.lines[tile] = std::clamp(rows - LANES, int64_t(1), LANES);
    _tile_storeconfig(&before);
    keep_stores(&ours);
    _tile_loadconfig(&ours);
  }
  ~TileConfig() {
    if (!available()) return;
    if (before.palette)
      _tile_loadconfig(&before);
    else
      _tile_release();
  }

  static bool available() {
    static const bool has = at::cpu::init_amx();
    return has;
  }

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  };
  alignas(64) Config before;
};

template <>
class Multiplier<Half> {
 public:
  explicit Multiplier(int64_t rows = 2 * LANES) : configured(rows) {}

  // Rows beyond the configured count are rounded up to 16: `a` and `c` must have room for them.
  template <typename P = Product<Half>>
  void multiply(const P& product, int64_t rows, int64_t count) const {
    if (!TileConfig::available()) return product.multiply(rows, count);
    for (int64_t at = 0; at < count; at += 2)
      for (int64_t row = 0; row < rows; row += 32)
        block(product, row, at, row + 16 < rows, at + 1 < count);
  }

 private:
  const TileConfig configured;

  // A block of two by two tiles, or fewer.
  template <int64_t LINE, bool PREFETCHES>
  static void block(
      const Product<Half, LINE, PREFETCHES>& product, int64_t row, int64_t at, bool lower, bool right) {
    const Half* a = product.a + row * product.a_row;
    const Half* b = product.panels + at * product.panel;
    float* c = product.c + row * product.c_row + at * LANES;
    float* under = c + LANES * product.c_row;
    const int64_t a_bytes = product.a_row * 2, c_bytes = product.c_row * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (product.add) {
      _tile_loadd(0, c, c_bytes);
      if (right) _tile_loadd(1, c + LANES, c_bytes);
      if (lower) _tile_loadd(2, under, c_bytes);
      if (lower && right) _tile_loadd(3, under + LANES, c_bytes);
    }
    for (int64_t k = 0; k < product.depth; k += 32) {
      if (PREFETCHES) prefetch(b + k * LINE + NEAR / 2, 64 * LINE, true);
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, b + k * LINE, 4 * LINE);
      _tile_dpbf16ps(0, 4, 6);
      if (right) {
        _tile_loadd(7, b + product.panel + k * LINE, 4 * LINE);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (lower) {
        _tile_loadd(5, a + LANES * product.a_row + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (right) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    if (right) _tile_stored(1, c + LANES, c_bytes);
    if (lower) _tile_stored(2, under, c_bytes);
    if (lower && right) _tile_stored(3, under + LANES, c_bytes);
  }
};

inline bool has_tiles() { return TileConfig::available(); }
#else
inline bool has_tiles() { return false; }
#endif

}  // namespace
