// A tile of attention: the queries of some tokens for one key head are the rows of products with
// TILE_KEYS keys at a time, whose sums are merged (Dao et al., "FlashAttention", 2022). Scores, weights
// and sums are float32 and stay in the thread's own memory. Keys are divided at multiples of TILE_KEYS
// and merged in order, so a query's result depends on its own keys only: not on the other queries, the
// chunks of its prompt or the number of threads.

#pragma once

#include "matmul.h"
#include "panels.h"

#include <vector>

namespace {

constexpr int64_t TILE_ROWS = 256;  // queries of a tile
constexpr int64_t TILE_KEYS = 256;
constexpr int64_t BLOCK = LANES;  // tokens of a cache block, as in kv_cache.py
constexpr int64_t KEY_STEP = 2 * BLOCK;  // a multiple of every STEP: where a part's keys may begin
constexpr int64_t PREFETCH_KEYS = 2 * BLOCK;  // ahead of those that are read
constexpr int64_t DIRECT_ROWS = 16;  // up to so many queries multiply with a cache's panels in place

// The mask and the scores of a layer. A token attends to keys in [first, last).
struct Mask {
  double scale = 1, softcap = 0;  // softcap 0: none
  int64_t window = 0, chunk = 0;  // 0: none
  bool causal = true;

  int64_t first(int64_t position) const {
    const int64_t in_window = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return chunk ? std::max(in_window, position / chunk * chunk) : in_window;
  }
  int64_t last(int64_t position, int64_t length) const {
    if (causal) return position + 1;
    return window ? std::min(length, position + window) : length;
  }
};

// Llama 4's temperature tuning scales queries by their position, but transformers has scaled them by
// their row of the step: `correction` is the quotient.
struct Temperature {
  double floor_scale = 0, attn_scale = 0;  // 0: off

  float correction(int64_t position, int64_t row) const {
    return attn_scale ? float(at(position) / at(row)) : 1.0f;
  }
  double at(int64_t index) const {
    return std::log1p(std::floor((index + 1) / floor_scale)) * attn_scale + 1;
  }
};

// `width` tokens from position `start` on, whose queries are in rows from `row` on. The keys of all
// tokens lie in the blocks of a table, or, without a table, side by side from row `keys` on.
struct Span {
  int64_t row, width, start;
  const int32_t* table = nullptr;
  int64_t keys = 0;

  int64_t length() const { return start + width; }
};

template <typename T>
struct Matrix {  // tokens, heads, size; or panels of BLOCK tokens (panels.h), at a block's first token
  T* data;
  int64_t token, head;  // strides
  int64_t size;

  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

template <typename T>
struct Attention {
  Matrix<const T> query, keys, values;
  Matrix<T> out;
  const T* sinks;  // one per query head, or null
  int64_t key_heads, group;  // query heads of a key head
  Mask mask;
  Temperature temperature;
  const std::vector<Span>& spans;
  bool panels = false;  // keys and values are panels
};

// Adds a query's sums over further keys to those in `sums`: the maximum of its scores, the sum of its
// weights, and `size` weighted values. Not inlined, so that every call rounds alike.
__attribute__((noinline)) inline void add_sums(
    float* sums, float peak, float total, const float* values, int64_t size) {
  const float common = std::max(sums[0], peak);
  const float smaller = std::exp2(std::min(sums[0], peak) - common);  // the other factor is 1
  const float before = sums[0] < common ? smaller : 1, after = peak < common ? smaller : 1;
  sums[0] = common;
  sums[1] = sums[1] * before + total * after;
  for (int64_t d = 0; d < size; d += LANES)
    store(sums + 2 + d, load<Floats>(sums + 2 + d) * before + load<Floats>(values + d) * after);
}

// The work of a tile: some tokens of a span, one key head, some of the keys that they attend to.
struct Part {
  const Span* span;
  int64_t head;
  int64_t begin, end;  // tokens of the span
  int64_t first, last;  // keys
  float* sums = nullptr;  // [rows, 2 + size] as in add_sums, if the keys are split; else null
};

// Divides the sums of a part's row by the sum of its weights, to which an attention sink adds one.
template <typename T>
void store_output(const Attention<T>& attention, const Part& part, int64_t row, float* sums) {
  const int64_t head = part.head * attention.group + row % attention.group;
  const int64_t size = attention.values.size;
  if (attention.sinks) {
    const std::vector<float> zeros(rounded_up(size, LANES));
    add_sums(sums, float(attention.sinks[head]) * LOG2_E, 1, zeros.data(), zeros.size());
  }
  T* to = attention.out.at(part.span->row + part.begin + row / attention.group, head);
  for (int64_t d = 0; d < size; d += LANES)
    store_floats(to + d, load<Floats>(sums + 2 + d) / sums[1], size - d);
}

template <typename T>
class Tile {
 public:
  Tile(const Attention<T>& attention, const Part& part, const Part* following)
      : attention(attention), part(part), following(following),
        rows((part.end - part.begin) * attention.group),
        depth(rounded_up(attention.query.size, STEP<T>)),
        size(rounded_up(attention.values.size, LANES)) {
    thread_local std::vector<char> memory;
    const int64_t padded_rows = rounded_up(rows, LANES);
    int64_t used = 0;
    const auto reserve = [&](int64_t count, int64_t bytes) {
      const int64_t begin = used;
      used += rounded_up(count * bytes, 64);
      return begin;
    };
    const int64_t offsets[] = {
        reserve(padded_rows * depth, sizeof(Operand<T>)),
        reserve(TILE_KEYS * depth, sizeof(Operand<T>)),
        reserve(TILE_KEYS * size, sizeof(Operand<T>)),
        reserve(padded_rows * TILE_KEYS, sizeof(Operand<T>)),
        reserve(padded_rows * TILE_KEYS, 4),
        reserve(padded_rows * size, 4),
        reserve(padded_rows, 4),
        reserve(padded_rows, 4),
        reserve(part.sums ? 0 : rows * (2 + size), 4)};
    if (int64_t(memory.size()) < used + 64) memory.resize(used + 64);
    char* begin = memory.data() + 63 - (uintptr_t(memory.data()) + 63) % 64;
    queries = reinterpret_cast<Operand<T>*>(begin + offsets[0]);
    key_panels = reinterpret_cast<Operand<T>*>(begin + offsets[1]);
    value_panels = reinterpret_cast<Operand<T>*>(begin + offsets[2]);
    weights = reinterpret_cast<Operand<T>*>(begin + offsets[3]);
    scores = reinterpret_cast<float*>(begin + offsets[4]);
    summed = reinterpret_cast<float*>(begin + offsets[5]);
    peaks = reinterpret_cast<float*>(begin + offsets[6]);
    totals = reinterpret_cast<float*>(begin + offsets[7]);
    sums = part.sums ? part.sums : reinterpret_cast<float*>(begin + offsets[8]);
  }

  void attend() {
    const Multiplier<Operand<T>> multiplier{};
    gather_queries();
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(sums_of(row), 2 + size, 0.0f);
      *sums_of(row) = -INFINITE;
    }
    for (int64_t key = part.first, end; key < part.last; key = end) {
      end = std::min(part.last, (key / TILE_KEYS + 1) * TILE_KEYS);
      const int64_t count = rounded_up(end - key, STEP<T>);
      if (is_direct())
        multiply_keys(key, end);
      else {
        pack(key, count);
        multiplier.multiply(
            {queries, depth, key_panels, depth * LANES, scores, TILE_KEYS, depth, false},
            rows, count / LANES);
      }
      for (int64_t row = 0; row < rows; ++row) softmax(row, key, count);
      if (is_direct())
        multiply_values(key, end);
      else
        multiplier.multiply(
            {weights, TILE_KEYS, value_panels, count * LANES, summed, size, count, false},
            rows, size / LANES);
      for (int64_t row = 0; row < rows; ++row)
        if (totals[row] != 0)
          add_sums(sums_of(row), peaks[row], totals[row], summed + row * size, size);
    }
    for (int64_t row = 0; row < rows && !part.sums; ++row)
      store_output(attention, part, row, sums_of(row));
  }

 private:
  const Attention<T>& attention;
  const Part& part;
  const Part* following;  // that the thread probably takes next, or null
  const int64_t rows, depth, size;
  Operand<T>*queries, *key_panels, *value_panels, *weights;
  float *scores, *summed, *peaks, *totals, *sums;

  float* sums_of(int64_t row) const { return sums + row * (2 + size); }
  int64_t token(int64_t row) const { return part.begin + row / attention.group; }
  int64_t head(int64_t row) const { return part.head * attention.group + row % attention.group; }

  void gather_queries() {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = part.span->row + token(row);
      const T* from = attention.query.at(at, head(row));
      const float factor = attention.temperature.correction(part.span->start + token(row), at);
      for (int64_t d = 0; d < depth; d += LANES) {
        const Floats x = load_floats(from + d, attention.query.size - d);
        T rounded[LANES];  // to the model's dtype
        store_floats(rounded, x * factor);
        store_floats(queries + row * depth + d, load_floats(rounded, LANES));
      }
    }
  }

  void pack(int64_t key, int64_t count) {
    for (int64_t n = 0; n < count; n += BLOCK, key += BLOCK) {
      const int64_t valid = valid_in(key), key_size = attention.query.size;
      const T *keys = keys_of(key), *values = values_of(key);
      Operand<T>*key_panel = key_panels + n * depth, *value_panel = value_panels + n * LANES;
      prefetch(attention.keys, key + PREFETCH_KEYS);
      prefetch(attention.values, key + PREFETCH_KEYS);
      if (attention.panels) {
        copy_keys<T>(keys, key_size, key_panel);
        copy_values<T>(values, valid, attention.values.size, value_panel, count * LANES);
        continue;
      }
      pack_keys<T>(keys, attention.keys.token, valid, key_size, key_panel);
      pack_values<T>(
          values, attention.values.token, valid, attention.values.size, value_panel, count * LANES);
    }
  }

  // Whether products read a cache's panels in place, with the results of those that read copies.
  bool is_direct() const {
    return attention.panels && std::is_same_v<T, Operand<T>> && rows <= DIRECT_ROWS &&
        (sizeof(T) == 4 || !has_tiles()) && attention.values.size % LANES == 0;
  }

  // Computes the scores of some keys, of two blocks at a time. Prefetches their values.
  void multiply_keys(int64_t key, int64_t end) {
    for (float* to = scores; key < end; key += 2 * BLOCK, to += 2 * BLOCK) {
      const T *one = keys_of(key), *other = keys_of(key + BLOCK);
      const int64_t key_size = attention.query.size, blocks = key + BLOCK < end ? 2 : 1;
      for (int64_t n = 0; n < blocks; ++n) {
        prefetch(attention.keys, key + n * BLOCK + PREFETCH_KEYS);
        prefetch(attention.values, key + n * BLOCK);
      }
      Product<Operand<T>>{
          queries, depth, in_place(one), other - one, to, TILE_KEYS, key_size, false}
          .multiply(rows, blocks);
    }
  }

  // Sums the weighted values of some keys, block by block. Prefetches the keys that come next.
  void multiply_values(int64_t key, int64_t end) {
    for (int64_t n = 0; key + n < end; n += BLOCK) {
      const int64_t valid = valid_in(key + n);
      prefetch(attention.keys, end + n);
      const Operand<T>* panels = in_place(values_of(key + n));
      if (valid < BLOCK) {
        copy_values<T>(values_of(key + n), valid, size, value_panels, BLOCK * LANES);
        panels = value_panels;
      }
      Product<Operand<T>>{weights + n, TILE_KEYS, panels, BLOCK * LANES, summed, size, BLOCK, n > 0}
          .multiply(rows, size / LANES);
    }
  }

  static const Operand<T>* in_place(const void* panels) { return static_cast<const Operand<T>*>(panels); }

  // How many of a block's keys the part has, from its first on.
  int64_t valid_in(int64_t key) const { return std::clamp<int64_t>(part.last - key, 0, BLOCK); }
  const T* keys_of(int64_t key) const { return attention.keys.at(slot_of(key), part.head); }
  const T* values_of(int64_t key) const { return attention.values.at(slot_of(key), part.head); }

  // The slot of a block's first key, of the last block for keys beyond it.
  int64_t slot_of(int64_t key) const { return slot_in(part, std::min(key, (part.last - 1) / BLOCK * BLOCK)); }
  static int64_t slot_in(const Part& part, int64_t key) {
    return part.span->table ? part.span->table[key / BLOCK] * BLOCK : part.span->keys + key;
  }

  // Prefetches a block of keys or values into the level 2 cache; beyond the part, one of the part that
  // follows. Blocks lie anywhere, so the CPU cannot predict the next one. Inlined, since GCC removes calls
  // that only prefetch.
  __attribute__((always_inline)) void prefetch(const Matrix<const T>& blocks, int64_t key) const {
    const bool within = key < part.last;
    if (!within && !following) return;
    const Part& of = within ? part : *following;
    if (!within) key = of.first + (key - part.last) / BLOCK * BLOCK;
    if (key >= of.last) return;
    const T* from = blocks.at(slot_in(of, key), of.head);
    const int64_t stride = attention.panels ? blocks.size : blocks.token;
    for (int64_t k = 0; k < BLOCK; ++k, from += stride)
      for (int64_t n = 0; n < blocks.size; n += 64 / sizeof(T)) __builtin_prefetch(from + n, 0, 2);
  }

  // Turns the scores of `count` keys from `key` on into weights relative to the row's maximum.
  void softmax(int64_t row, int64_t key, int64_t count) {
    const int64_t position = part.span->start + token(row);
    const int64_t visible = attention.mask.last(position, part.span->length());
    const int64_t end = std::min(visible, part.last) - key;
    const int64_t first = std::max<int64_t>(0, attention.mask.first(position) - key);
    const int64_t last = std::min(end, count);
    float* score = scores + row * TILE_KEYS;
    Operand<T>* weight = weights + row * TILE_KEYS;
    const int64_t begin = std::min(first / LANES * LANES, count);
    const int64_t padded_end = first < last ? rounded_up(last, LANES) : begin;
    for (int64_t n = 0; n < begin; n += LANES) store_floats(weight + n, Floats{});
    for (int64_t n = padded_end; n < count; n += LANES) store_floats(weight + n, Floats{});
    totals[row] = 0;
    if (first >= last) return;
    const bool capping = attention.mask.softcap > 0;
    Floats maxima = Floats{} - INFINITE;
    for (int64_t n = begin; n < padded_end; n += LANES) {
      Floats x = load<Floats>(score + n);
      if (capping) x = capped(x * float(attention.mask.scale), attention.mask.softcap);
      if (n < first || n + LANES > last) {
        const Ints lane = LANE + int32_t(n);
        x = lane < int32_t(first) ? Floats{} - INFINITE : x;
        x = lane < int32_t(last) ? x : Floats{} - INFINITE;
      }
      if (capping || n < first || n + LANES > last) store(score + n, x);
      maxima = maximum(x, maxima);
    }
    const float unit = LOG2_E * (capping ? 1.0f : float(attention.mask.scale));  // exponents of 2
    const float peak = maximum(maxima) * unit;
    Floats total{};
    for (int64_t n = begin; n < padded_end; n += LANES) {
      const Floats x = power_of_2(load<Floats>(score + n) * unit - peak);
      total += x;
      store_floats(weight + n, x);
    }
    peaks[row] = peak;
    totals[row] = sum(total);
  }
};

}  // namespace
