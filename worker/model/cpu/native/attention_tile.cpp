// What a tile of attention is made of, and how it is computed: some tokens' queries of one key head,
// which are the rows of a product with some hundred keys at a time (Dao et al., "FlashAttention").
// Scores, weights and sums are float32 and stay in a thread's own memory.

#include <vector>

namespace {

constexpr int64_t TILE_ROWS = 256;  // queries
constexpr int64_t TILE_KEYS = 256;
constexpr int64_t LEAST_KEYS = 256;  // of a part
constexpr int64_t BLOCK = LANES;  // as in kv_cache.py
constexpr int64_t AHEAD = 2 * BLOCK;  // keys that are fetched before they are needed

// A layer's way of looking. A token sees keys from first to before last.
struct Look {
  double scale = 1, softcap = 0;  // a softcap of 0: none
  int64_t window = 0, chunk = 0;  // 0: none
  bool causal = true;

  int64_t first(int64_t position) const {
    const int64_t near = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return chunk ? std::max(near, position / chunk * chunk) : near;
  }
  int64_t last(int64_t position, int64_t length) const {
    if (causal) return position + 1;
    return window ? std::min(length, position + window) : length;
  }
};

// Queries grow with their position, but were made to grow with their row (Llama 4).
struct Temperature {
  double floor_scale = 0, attn_scale = 0;  // 0: they don't

  float mend(int64_t position, int64_t row) const {
    return attn_scale ? float(at(position) / at(row)) : 1.0f;
  }
  double at(int64_t place) const {
    return std::log1p(std::floor((place + 1) / floor_scale)) * attn_scale + 1;
  }
};

// `width` tokens from position `start` on, whose queries are rows from `row` on. Keys of all tokens
// lie in blocks of a table, or side by side from row `keys` on.
struct Span {
  int64_t row, width, start;
  const int32_t* table = nullptr;
  int64_t keys = 0;

  int64_t length() const { return start + width; }
};

template <typename T>
struct Matrix {  // tokens, heads, size
  T* data;
  int64_t token, head;  // from one to the next
  int64_t size;

  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

template <typename T>
struct Attention {
  Matrix<const T> query, keys, values;
  Matrix<T> out;
  const T* sinks;  // one a query head, or null
  int64_t key_heads, group;  // query heads of a key head
  Look look;
  Temperature temperature;
  const std::vector<Span>& spans;
};

// A thread's share: some tokens of a span, one key head, some of the keys that they see.
struct Part {
  const Span* span;
  int64_t head;
  int64_t begin, end;  // tokens of the span
  int64_t first, last;  // keys
  float* sums = nullptr;  // where the part's go if there are others: peak, total, values of each row
};

template <typename T>
class Tile {
 public:
  Tile(const Attention<T>& attention, const Part& part)
      : of(attention), part(part), rows((part.end - part.begin) * attention.group),
        depth(rounded_up(of.query.size, STEP<T>)), size(rounded_up(of.values.size, LANES)) {
    thread_local std::vector<char> memory;
    const int64_t room = rounded_up(rows, LANES);
    int64_t used = 0;
    const auto place = [&](int64_t count, int64_t bytes) {
      const int64_t begin = used;
      used += rounded_up(count * bytes, 64);
      return begin;
    };
    const int64_t at[] = {
        place(room * depth, sizeof(Operand<T>)), place(TILE_KEYS * depth, sizeof(Operand<T>)),
        place(TILE_KEYS * size, sizeof(Operand<T>)), place(room * TILE_KEYS, sizeof(Operand<T>)),
        place(room * TILE_KEYS, 4), place(room * size, 4), place(room, 4), place(room, 4)};
    if (int64_t(memory.size()) < used + 64) memory.resize(used + 64);
    char* begin = memory.data() + 63 - (uintptr_t(memory.data()) + 63) % 64;
    queries = reinterpret_cast<Operand<T>*>(begin + at[0]);
    key_panels = reinterpret_cast<Operand<T>*>(begin + at[1]);
    value_panels = reinterpret_cast<Operand<T>*>(begin + at[2]);
    weights = reinterpret_cast<Operand<T>*>(begin + at[3]);
    scores = reinterpret_cast<float*>(begin + at[4]);
    summed = reinterpret_cast<float*>(begin + at[5]);
    peaks = reinterpret_cast<float*>(begin + at[6]);
    totals = reinterpret_cast<float*>(begin + at[7]);
  }

  void attend() {
    const Multiplier<Operand<T>> multiplier{};
    gather_queries();
    begin_sums();
    for (int64_t key = part.first; key < part.last; key += TILE_KEYS) {
      const int64_t count = rounded_up(std::min(part.last - key, TILE_KEYS), STEP<T>);
      pack(key, count);
      multiplier.multiply(
          {queries, depth, key_panels, depth * LANES, scores, TILE_KEYS, depth, false},
          rows, count / LANES);
      for (int64_t row = 0; row < rows; ++row) weigh(row, key, count);
      multiplier.multiply(
          {weights, TILE_KEYS, value_panels, count * LANES, summed, size, count, true},
          rows, size / LANES);
    }
    for (int64_t row = 0; row < rows; ++row) part.sums ? keep(row) : finish(row);
  }

 private:
  const Attention<T>& of;
  const Part& part;
  const int64_t rows, depth, size;
  Operand<T>*queries, *key_panels, *value_panels, *weights;
  float *scores, *summed, *peaks, *totals;

  int64_t token(int64_t row) const { return part.begin + row / of.group; }
  int64_t head(int64_t row) const { return part.head * of.group + row % of.group; }

  void gather_queries() {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = part.span->row + token(row);
      const T* from = of.query.at(at, head(row));
      const float factor = of.temperature.mend(part.span->start + token(row), at);
      for (int64_t d = 0; d < depth; d += LANES) {
        const Floats given = load_floats(from + d, of.query.size - d);
        T rounded[LANES];  // as the model would have it
        store_floats(rounded, given * factor);
        store_floats(queries + row * depth + d, load_floats(rounded, LANES));
      }
    }
  }

  void begin_sums() {
    const bool sunk = of.sinks && part.first == seen_from();
    for (int64_t row = 0; row < rows; ++row) {
      peaks[row] = sunk ? float(of.sinks[head(row)]) * LOG2_E : -INFINITE;
      totals[row] = sunk ? 1 : 0;
    }
    std::fill_n(summed, rows * size, 0.0f);
  }

  int64_t seen_from() const {
    return of.look.first(part.span->start + part.begin) / BLOCK * BLOCK;
  }

  void pack(int64_t key, int64_t count) {
    for (int64_t n = 0; n < count; n += BLOCK, key += BLOCK) {
      const int64_t some = std::clamp<int64_t>(part.last - key, 0, BLOCK);
      const int64_t place = place_of(key);
      fetch(place_of(key + AHEAD));
      pack_keys<T>(
          of.keys.at(place, part.head), of.keys.token, some, of.query.size,
          key_panels + n * depth);
      pack_values<T>(
          of.values.at(place, part.head), of.values.token, some, of.values.size,
          value_panels + n * LANES, count * LANES);
    }
  }

  // Where the keys from there on lie, or the last ones.
  int64_t place_of(int64_t key) const {
    key = std::min(key, (part.last - 1) / BLOCK * BLOCK);
    return part.span->table ? part.span->table[key / BLOCK] * BLOCK : part.span->keys + key;
  }

  // Blocks lie anywhere: the CPU is told which come next.
  void fetch(int64_t place) const {
    for (int64_t k = 0; k < BLOCK; ++k) {
      fetch(of.keys.at(place + k, part.head), of.query.size);
      fetch(of.values.at(place + k, part.head), of.values.size);
    }
  }
  static void fetch(const T* from, int64_t count) {
    for (int64_t n = 0; n < count; n += 64 / sizeof(T)) __builtin_prefetch(from + n);
  }

  // From scores to weights of `count` keys from `key` on, relative to the row's largest score so
  // far; what was summed before is made relative to it too.
  void weigh(int64_t row, int64_t key, int64_t count) {
    const int64_t position = part.span->start + token(row);
    const int64_t end = std::min(of.look.last(position, part.span->length()), part.last) - key;
    const int64_t first = std::max<int64_t>(0, of.look.first(position) - key);
    const int64_t last = std::min(end, count);
    float* score = scores + row * TILE_KEYS;
    Operand<T>* weight = weights + row * TILE_KEYS;
    const int64_t begin = std::min(first / LANES * LANES, count);
    const int64_t done = first < last ? rounded_up(last, LANES) : begin;
    for (int64_t n = 0; n < begin; n += LANES) store_floats(weight + n, Floats{});
    for (int64_t n = done; n < count; n += LANES) store_floats(weight + n, Floats{});
    if (first >= last) return;
    const bool capping = of.look.softcap > 0;
    Floats most = Floats{} - INFINITE;
    for (int64_t n = begin; n < done; n += LANES) {
      Floats x = load<Floats>(score + n);
      if (capping) x = capped(x * float(of.look.scale), of.look.softcap);
      if (n < first || n + LANES > last) {
        const Ints lane = LANE + int32_t(n);
        x = lane < int32_t(first) ? Floats{} - INFINITE : x;
        x = lane < int32_t(last) ? x : Floats{} - INFINITE;
      }
      if (capping || n < first || n + LANES > last) store(score + n, x);
      most = larger(x, most);
    }
    const float unit = LOG2_E * (capping ? 1.0f : float(of.look.scale));  // weights are powers of 2
    const float peak = std::max(peaks[row], largest(most) * unit);
    Floats total{};
    for (int64_t n = begin; n < done; n += LANES) {
      const Floats x = power_of_2(load<Floats>(score + n) * unit - peak);
      total += x;
      store_floats(weight + n, x);
    }
    const float shrink = std::exp2(peaks[row] - peak);
    peaks[row] = peak;
    totals[row] = totals[row] * shrink + sum(total);
    if (shrink == 1) return;
    float* to = summed + row * size;
    for (int64_t d = 0; d < size; d += LANES) store(to + d, load<Floats>(to + d) * shrink);
  }

  void keep(int64_t row) {
    float* to = part.sums + row * (2 + size);
    to[0] = peaks[row];
    to[1] = totals[row];
    std::copy_n(summed + row * size, size, to + 2);
  }

  void finish(int64_t row) {
    const float* from = summed + row * size;
    T* to = of.out.at(part.span->row + token(row), head(row));
    for (int64_t d = 0; d < of.values.size; d += LANES)
      store_floats(to + d, load<Floats>(from + d) / totals[row], of.values.size - d);
  }
};

}  // namespace
