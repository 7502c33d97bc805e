// Panels of keys and values, the right operand of a product (matmul.h): 16 columns of a matrix side by
// side, row after row. Keys are columns and values rows, 16 tokens at a time. Of bfloat16 a line holds
// two rows with their numbers in pairs, which a CPU that multiplies bfloat16 takes as they are; for
// other CPUs it becomes two lines of float32. A KV cache stores its blocks of 16 tokens as panels,
// whose size need not be a multiple of 16.

#pragma once

#include "vectors.h"

namespace {

template <int S, int... J>
inline void exchange(Line& a, Line& b, std::integer_sequence<int, J...>) {
  const Line low = __builtin_shufflevector(a, b, ((J & S) ? WIDTH + J - S : J)...);
  b = __builtin_shufflevector(a, b, ((J & S) ? WIDTH + J : J + S)...);
  a = low;
}

// Transposes WIDTH lines by exchanging blocks of S numbers, for S = 1, 2, 4, …
template <int S = 1>
inline void transpose(Line* lines) {
  if constexpr (S < WIDTH) {
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i)
      if (!(i & S)) exchange<S>(lines[i], lines[i + S], std::make_integer_sequence<int, WIDTH>());
    transpose<2 * S>(lines);
  }
}

// Packs the keys of 16 tokens, `stride` apart, as the columns of a panel; columns from `count` on
// become zeros. A panel is `size` deep, rounded up to STEP.
template <typename T>
void pack_keys(const T* keys, int64_t stride, int64_t count, int64_t size, Operand<T>* panel) {
  constexpr int64_t step = WIDTH * PER_WORD<T>;
  for (int64_t d = 0; d < rounded_up(size, STEP<T>); d += step)
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

// Packs the values of 16 tokens as rows of panels, one panel for each 16 of `size`, `distance` apart.
template <typename T>
void pack_values(
    const T* values, int64_t stride, int64_t count, int64_t size, Operand<T>* panels,
    int64_t distance) {
  for (int64_t d = 0; d < size; d += LANES, panels += distance)
    for (int64_t k = 0; k < LANES; k += 2) {
      const T* row = values + k * stride + d;
      const int64_t rest = size - d;
      if constexpr (std::is_same_v<Operand<T>, float>) {
        for (int64_t i = 0; i < 2; ++i)
          store(panels + (k + i) * LANES, load_floats(row + i * stride, k + i < count ? rest : 0));
      } else {
        const Words low = words(load_part<Halves>(row, k < count ? rest : 0));
        const Words high = words(load_part<Halves>(row + stride, k + 1 < count ? rest : 0));
        store(panels + k * LANES, low | high << 16);
      }
    }
}

// ── a cache's blocks: `panel` is that of a block's keys, or values, for one head ──

// Columns of a block's panels of values: one panel has all if 16 do not divide them.
inline int64_t panel_width(int64_t size) { return size % LANES ? size : LANES; }

template <typename T>
void write_key(const T* from, int64_t size, int64_t token, T* panel) {
  constexpr int64_t word = PER_WORD<T>;
  for (int64_t d = 0; d < size; d += word) std::copy_n(from + d, word, panel + d * LANES + token * word);
}

template <typename T>
void write_value(const T* from, int64_t size, int64_t token, T* panel) {
  constexpr int64_t word = PER_WORD<T>;
  const int64_t width = panel_width(size);
  T* to = panel + token / word * width * word + token % word;
  for (int64_t d = 0; d < size; d += width, to += width * LANES)
    for (int64_t column = 0; column < width; ++column) to[column * word] = from[d + column];
}

// Stores a line of words, or the lines of its first and second rows if a word is a pair of float32.
template <typename T>
void store_line(Words line, Operand<T>* to) {
  if constexpr (std::is_same_v<T, Operand<T>>) {
    store(to, line);
  } else {
    store(to, line << 16);
    store(to + LANES, line & 0xffff0000u);
  }
}

// Copies the keys of a block to a panel that is `size` deep, rounded up to STEP.
template <typename T>
void copy_keys(const T* from, int64_t size, Operand<T>* panel) {
  for (int64_t d = 0; d < size; d += PER_WORD<T>)
    store_line<T>(load<Words>(from + d * LANES), panel + d * LANES);
  std::fill(panel + size * LANES, panel + rounded_up(size, STEP<T>) * LANES, Operand<T>(0));
}

// Copies the values of a block to panels as pack_values does.
template <typename T>
void copy_values(const T* from, int64_t count, int64_t size, Operand<T>* panels, int64_t distance) {
  constexpr int64_t word = PER_WORD<T>;
  const int64_t width = panel_width(size);
  for (int64_t d = 0; d < size; d += LANES, panels += distance)
    for (int64_t k = 0; k < LANES; k += word) {
      const T* line = from + d / width * width * LANES + (k * width + d % width * word);
      Words words{};
      if (k < count) words = load_part<Words>(line, std::min(LANES, size - d) * word);
      if (word == 2 && k + 1 == count) words &= 0xffffu;
      store_line<T>(words, panels + k * LANES);
    }
}

}  // namespace
