// Products of small matrices, of which one lies in panels: 16 of its columns side by side, row after
// row. That is how keys (a column each) and values (a row each) are read from the cache, 16 tokens
// at a time, and what a vector unit multiplies without shuffling. Where the CPU multiplies
// bfloat16, two rows share a line, their numbers in pairs; elsewhere numbers become float32.
//
// Vectors are the compiler's own (GCC, Clang): it makes of them what the CPU has.

#include <ATen/cpu/Utils.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// What a cache stores, and what products take of it.
using Half = c10::BFloat16;
#if defined(__AVX512BF16__)
template <typename T>
using Operand = T;
#else
template <typename T>
using Operand = float;
#endif
template <typename T>
constexpr int64_t PER_WORD = 4 / sizeof(T);
// Depths of products are multiples of this.
template <typename T>
constexpr int64_t STEP = LANES * PER_WORD<T>;

inline int64_t rounded_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

template <typename V>
inline V load(const void* from) {
  V made;
  std::memcpy(&made, from, sizeof made);
  return made;
}

template <typename V>
inline void store(void* to, V given) {
  std::memcpy(to, &given, sizeof given);
}

// The first `count` numbers from there, then zeros.
template <typename V, typename T>
inline V load_part(const T* from, int64_t count) {
  if (count >= int64_t(sizeof(V) / sizeof(T))) return load<V>(from);
  V made{};
  if (count > 0) std::memcpy(&made, from, count * sizeof(T));
  return made;
}

inline Floats floats(Words bits) { return load<Floats>(&bits); }
inline Words words(Halves halves) { return __builtin_convertvector(halves, Words); }

inline Floats load_floats(const float* from, int64_t count) {
  return load_part<Floats>(from, count);
}
inline Floats load_floats(const Half* from, int64_t count) {
  return floats(words(load_part<Halves>(from, count)) << 16);
}

inline void store_floats(float* to, Floats given) { store(to, given); }
inline void store_floats(Half* to, Floats given) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)given));
#else
  for (int64_t lane = 0; lane < LANES; ++lane) to[lane] = given[lane];
#endif
}

inline float largest(Floats given) {
  float made = given[0];
  for (int64_t lane = 1; lane < LANES; ++lane) made = std::max(made, given[lane]);
  return made;
}

inline float sum(Floats given) {
  float made = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) made += given[lane];
  return made;
}

// e to the x, of numbers up to 0: 2 to a whole number times a polynomial, within 2e-7 of it.
inline Floats exponential(Floats x) {
  const Ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  const Floats n = __builtin_convertvector(whole, Floats);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Floats made = p * floats(((Words)whole + 127u) << 23);
  return x < -87.0f ? Floats{} : made;
}

inline float exponential(float x) { return std::exp(x); }

// cap · tanh(x / cap)
inline Floats capped(Floats x, float cap) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats t = exponential(size * (-2.0f / cap));
  const Floats made = cap * (1.0f - t) / (1.0f + t);
  return x < 0.0f ? -made : made;
}

// ── packing ──

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef uint32_t Line __attribute__((vector_size(4 * WIDTH)));

template <int S, int... J>
inline void exchange(Line& a, Line& b, std::integer_sequence<int, J...>) {
  const Line low = __builtin_shufflevector(a, b, ((J & S) ? WIDTH + J - S : J)...);
  b = __builtin_shufflevector(a, b, ((J & S) ? WIDTH + J : J + S)...);
  a = low;
}

// WIDTH lines become columns: blocks of S change places, for S = 1, 2, 4, …
template <int S = 1>
inline void transpose(Line* lines) {
  if constexpr (S < WIDTH) {
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i)
      if (!(i & S)) exchange<S>(lines[i], lines[i + S], std::make_integer_sequence<int, WIDTH>());
    transpose<2 * S>(lines);
  }
}

// 16 tokens' keys from there on, `stride` apart, as the columns of a panel; those beyond `count`
// are zeros, whatever lies there. A panel is `size` deep, rounded up to STEP.
template <typename T>
void pack_keys(const T* keys, int64_t stride, int64_t count, int64_t size, Operand<T>* panel) {
  constexpr int64_t each = WIDTH * PER_WORD<T>;
  for (int64_t d = 0; d < rounded_up(size, STEP<T>); d += each)
    for (int64_t begin = 0; begin < LANES; begin += WIDTH) {
      Line lines[WIDTH];
      for (int64_t k = 0; k < WIDTH; ++k)
        lines[k] = begin + k < count
            ? load_part<Line>(keys + (begin + k) * stride + d, size - d)
            : Line{};
      transpose(lines);
      for (int64_t i = 0; i < WIDTH; ++i) {
        Operand<T>* to = panel + (d + i * PER_WORD<T>) * LANES;
        if constexpr (std::is_same_v<T, Operand<T>>) {
          store(to + begin * PER_WORD<T>, lines[i]);
        } else {
          store(to + begin, lines[i] << 16);
          store(to + LANES + begin, lines[i] & 0xffff0000u);
        }
      }
    }
}

// 16 tokens' values as rows of panels, one for each 16 of `size`, which lie `apart`.
template <typename T>
void pack_values(
    const T* values, int64_t stride, int64_t count, int64_t size, Operand<T>* panels,
    int64_t apart) {
  for (int64_t d = 0; d < size; d += LANES, panels += apart)
    for (int64_t k = 0; k < LANES; k += 2) {
      const T* row = values + k * stride + d;
      const int64_t left = size - d;
      if constexpr (std::is_same_v<Operand<T>, float>) {
        for (int64_t i = 0; i < 2; ++i)
          store(panels + (k + i) * LANES, load_floats(row + i * stride, k + i < count ? left : 0));
      } else {
        const Words low = words(load_part<Halves>(row, k < count ? left : 0));
        const Words high = words(load_part<Halves>(row + stride, k + 1 < count ? left : 0));
        store(panels + k * LANES, low | high << 16);
      }
    }
}

// ── products ──

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

#if defined(__AMX_BF16__)
// The CPU's matrix tiles: 16 lines of 64 bytes each, and the configuration that others left.
class Tiles {
 public:
  Tiles() {
    alignas(64) Config ours{};
    ours.palette = 1;
    for (int tile = 0; tile < 8; ++tile) ours.bytes[tile] = 64, ours.lines[tile] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
  }
  ~Tiles() {
    if (before.palette)
      _tile_loadconfig(&before);
    else
      _tile_release();
  }

  // Rows are made up to 16 there: so many must lie in `a` and `c`.
  static void multiply(const Product<Half>& of, int64_t rows, int64_t count) {
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
