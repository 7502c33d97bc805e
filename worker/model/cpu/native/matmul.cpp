// Products of rows with panels: by vectors, or by the matrix tiles that some CPUs have.

#include <ATen/cpu/Utils.h>

namespace {

#if defined(__AVX512F__)
constexpr int SUMS = 16, PANELS = 2;  // vectors that are summed at once
#else
constexpr int SUMS = 6, PANELS = 1;
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
// Lines of a panel are LINE words apart, where several panels share them; what lies FETCHED bytes
// ahead is fetched.
template <typename T, int64_t LINE = LANES, int64_t FETCHED = 0>
struct Product {
  static constexpr int P = LINE == LANES ? PANELS : LINE / LANES;
  static constexpr int R = SUMS / P;

  const T* a;
  int64_t a_row;
  const T* panels;
  int64_t panel;  // from one to the next
  float* c;
  int64_t c_row;
  int64_t depth;
  bool add;

  static void fetch(const T* lines, int64_t bytes) {
    const char* ahead = reinterpret_cast<const char*>(lines) + FETCHED;
    for (int64_t n = 0; FETCHED && n < bytes; n += 64) __builtin_prefetch(ahead + n);
  }

  template <int ROWS, int COUNT>
  void block(int64_t row, int64_t at) const {
    const T* from = a + row * a_row;
    const T* lines = panels + at * panel;
    float* to = c + row * c_row + at * LANES;
    Floats sums[ROWS][COUNT];
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < COUNT; ++p)
        sums[r][p] = add ? load<Floats>(to + r * c_row + p * LANES) : Floats{};
    for (int64_t k = 0; k < depth; k += PER_WORD<T>) {
      fetch(lines + k * LINE, COUNT * LANES * 4);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < COUNT; ++p)
          sums[r][p] = add_product(sums[r][p], from + r * a_row + k, lines + p * panel + k * LINE);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < COUNT; ++p) store(to + r * c_row + p * LANES, sums[r][p]);
  }

  template <int COUNT, int... N>
  void rows_block(int64_t rows, int64_t row, int64_t at, std::integer_sequence<int, N...>) const {
    ((rows == N + 1 ? block<N + 1, COUNT>(row, at) : void()), ...);
  }

  void multiply(int64_t rows, int64_t count) const {
    constexpr auto up_to = std::make_integer_sequence<int, R>();
    for (int64_t at = 0; at < count; at += P)
      for (int64_t row = 0; row < rows; row += R) {
        const int64_t some = std::min<int64_t>(R, rows - row);
        if (at + P <= count)
          rows_block<P>(some, row, at, up_to);
        else
          rows_block<1>(some, row, at, up_to);
      }
  }
};

// What multiplies up to so many rows at once, or any number of them, while it exists.
template <typename T>
struct Multiplier {
  explicit Multiplier(int64_t = 2 * LANES) {}

  template <typename Given = Product<T>>
  void multiply(const Given& product, int64_t rows, int64_t panels) const {
    product.multiply(rows, panels);
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// Instructions of tiles read more than GCC knows of: what was written there is there from here on.
inline void written(const void* from) { asm volatile("" : : "r"(from) : "memory"); }

// The CPU's matrix tiles, 16 lines of 64 bytes each, if it lets us, for products of up to so many rows
// while this exists; others' configuration of them is put back.
class Tiles {
 public:
  explicit Tiles(int64_t rows = 2 * LANES) {
    if (!there()) return;
    alignas(64) Config ours{};
    ours.palette = 1;
    for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.lines[tile] = LANES;
    for (int tile : {0, 1, 4}) ours.lines[tile] = std::min(rows, LANES);
    for (int tile : {2, 3, 5}) ours.lines[tile] = std::clamp(rows - LANES, int64_t(1), LANES);
    _tile_storeconfig(&before);
    written(&ours);
    _tile_loadconfig(&ours);
  }
  ~Tiles() {
    if (!there()) return;
    if (before.palette)
      _tile_loadconfig(&before);
    else
      _tile_release();
  }

  static bool there() {
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

  // More rows than it was made for are made up to 16: so many must lie in `a` and `c`.
  template <typename Given = Product<Half>>
  void multiply(const Given& of, int64_t rows, int64_t count) const {
    if (!Tiles::there()) return of.multiply(rows, count);
    for (int64_t at = 0; at < count; at += 2)
      for (int64_t row = 0; row < rows; row += 32)
        block(of, row, at, row + 16 < rows, at + 1 < count);
  }

 private:
  const Tiles configured;

  // Two by two tiles, or fewer.
  template <int64_t LINE, int64_t FETCHED>
  static void block(
      const Product<Half, LINE, FETCHED>& of, int64_t row, int64_t at, bool lower, bool right) {
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
      of.fetch(b + k * LINE, 64 * LINE);
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, b + k * LINE, 4 * LINE);
      _tile_dpbf16ps(0, 4, 6);
      if (right) {
        _tile_loadd(7, b + of.panel + k * LINE, 4 * LINE);
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
