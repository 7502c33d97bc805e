// Products of rows with panels: by vectors, or by the matrix tiles that some CPUs have.

#include <ATen/cpu/Utils.h>

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, PANELS = 2;
#else
constexpr int ROWS = 6, PANELS = 1;
#endif

inline Floats add_product(Floats to, const float* a, const float* line) {
  return to + *a * load<Floats>(line);
}
#if defined(__AVX512BF16__)
inline Floats add_product(Floats to, const Half* a, const Half* line) {
  const __m512i pair = _mm512_set1_epi32(load<int32_t>(a));
  return (Floats)_mm512_dpbf16_ps((__m512)to, (__m512bh)pair, (__m512bh)load<__m512i>(line));
}
#endif

// A product's operands: c [rows, 16 · panels] = a [rows, depth] · panels, or added to what is there.
template <typename T>
struct Product {
  const T* a;
  int64_t a_row;
  const T* panels;
  int64_t panel;  // from one to the next
  float* c;
  int64_t c_row;
  int64_t depth;
  bool add;

  template <int R, int P>
  void block(int64_t row, int64_t at) const {
    const T* from = a + row * a_row;
    const T* lines = panels + at * panel;
    float* to = c + row * c_row + at * LANES;
    Floats sums[R][P];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        sums[r][p] = add ? load<Floats>(to + r * c_row + p * LANES) : Floats{};
    for (int64_t k = 0; k < depth; k += PER_WORD<T>)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p)
          sums[r][p] =
              add_product(sums[r][p], from + r * a_row + k, lines + p * panel + k * LANES);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(to + r * c_row + p * LANES, sums[r][p]);
  }

  template <int P, int... R>
  void rows_block(int64_t rows, int64_t row, int64_t at, std::integer_sequence<int, R...>) const {
    ((rows == R + 1 ? block<R + 1, P>(row, at) : void()), ...);
  }

  void multiply(int64_t rows, int64_t count) const {
    constexpr auto up_to = std::make_integer_sequence<int, ROWS>();
    for (int64_t at = 0; at < count; at += PANELS)
      for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, rows - row);
        if (at + PANELS <= count)
          rows_block<PANELS>(some, row, at, up_to);
        else
          rows_block<1>(some, row, at, up_to);
      }
  }
};

// What multiplies, while it exists.
template <typename T>
struct Multiplier {
  void multiply(const Product<T>& product, int64_t rows, int64_t panels) const {
    product.multiply(rows, panels);
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// By the CPU's matrix tiles, 16 lines of 64 bytes each, if it lets us; others' configuration of
// them is put back.
template <>
class Multiplier<Half> {
 public:
  Multiplier() {
    if (!has_tiles()) return;
    alignas(64) Config ours{};
    ours.palette = 1;
    for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.lines[tile] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
  }
  ~Multiplier() {
    if (!has_tiles()) return;
    if (before.palette)
      _tile_loadconfig(&before);
    else
      _tile_release();
  }

  // Rows are made up to 16 there: so many must lie in `a` and `c`.
  void multiply(const Product<Half>& of, int64_t rows, int64_t count) const {
    if (!has_tiles()) return of.multiply(rows, count);
    for (int64_t at = 0; at < count; at += 2)
      for (int64_t row = 0; row < rows; row += 32)
        block(of, row, at, row + 16 < rows, at + 1 < count);
  }

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  };
  alignas(64) Config before;

  static bool has_tiles() {
    static const bool has = at::cpu::init_amx();
    return has;
  }

  // Two by two tiles, or fewer.
  static void block(const Product<Half>& of, int64_t row, int64_t at, bool lower, bool right) {
    const Half* a = of.a + row * of.a_row;
    const Half* b = of.panels + at * of.panel;
    float* c = of.c + row * of.c_row + at * LANES;
    float* under = c + LANES * of.c_row;
    const int64_t a_bytes = of.a_row * 2, c_bytes = of.c_row * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (of.add) {
      _tile_loadd(0, c, c_bytes);
      if (right) _tile_loadd(1, c + LANES, c_bytes);
      if (lower) _tile_loadd(2, under, c_bytes);
      if (lower && right) _tile_loadd(3, under + LANES, c_bytes);
    }
    for (int64_t k = 0; k < of.depth; k += 32) {
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, b + k * LANES, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (right) {
        _tile_loadd(7, b + of.panel + k * LANES, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (lower) {
        _tile_loadd(5, a + LANES * of.a_row + k, a_bytes);
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
#endif

}  // namespace
