// Attention of spans of tokens over keys and values where they lie, in tiles: some tokens' queries
// of one key head, which are the rows of a product with some hundred keys at a time (Dao et al.,
// "FlashAttention"). Scores, weights and sums are float32 and stay in a thread's own memory. What
// one thread would be long with is split along the keys and put together at the end.

#include <ATen/Parallel.h>

#include <atomic>
#include <vector>

namespace {

constexpr int64_t TILE_ROWS = 256;  // queries
constexpr int64_t TILE_KEYS = 256;
constexpr int64_t LEAST_KEYS = 256;  // of a part
constexpr int64_t BLOCK = LANES;  // as in kv_cache.py

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
    gather_queries();
    begin_sums();
    for (int64_t key = part.first; key < part.last; key += TILE_KEYS) {
      const int64_t count = rounded_up(std::min(part.last - key, TILE_KEYS), STEP<T>);
      pack(key, count);
      multiply<Operand<T>>(
          {queries, depth, key_panels, depth * LANES, scores, TILE_KEYS, depth, false},
          rows, count / LANES);
      for (int64_t row = 0; row < rows; ++row) weigh(row, key, count);
      multiply<Operand<T>>(
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
      peaks[row] = sunk ? float(of.sinks[head(row)]) : -INFINITE;
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
      const int64_t place = !part.span->table ? part.span->keys + key
          : some                              ? part.span->table[key / BLOCK] * BLOCK
                                              : 0;
      pack_keys<T>(
          of.keys.at(place, part.head), of.keys.token, some, of.query.size,
          key_panels + n * depth);
      pack_values<T>(
          of.values.at(place, part.head), of.values.token, some, of.values.size,
          value_panels + n * LANES, count * LANES);
    }
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
    Floats most = Floats{} - INFINITE;
    for (int64_t n = begin; n < done; n += LANES) {
      Floats x = load<Floats>(score + n) * float(of.look.scale);
      if (of.look.softcap > 0) x = capped(x, of.look.softcap);
      const Ints lane = LANE + int32_t(n);
      if (n < first) x = lane < int32_t(first) ? Floats{} - INFINITE : x;
      if (n + LANES > last) x = lane < int32_t(last) ? x : Floats{} - INFINITE;
      store(score + n, x);
      most = x > most ? x : most;
    }
    const float peak = std::max(peaks[row], largest(most));
    Floats total{};
    for (int64_t n = begin; n < done; n += LANES) {
      const Floats x = exponential(load<Floats>(score + n) - peak);
      total += x;
      store_floats(weight + n, x);
    }
    const float shrink = exponential(peaks[row] - peak);
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
    for (int64_t d = 0; d < of.values.size; ++d) to[d] = from[d] / totals[row];
  }

  template <typename O>
  static void multiply(const Product<O>& product, int64_t count_rows, int64_t panels) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<O, Half>) {
      static const bool has_tiles = at::cpu::init_amx();
      if (has_tiles) {
        const Tiles tiles;
        Tiles::multiply(product, count_rows, panels);
        return;
      }
    }
#endif
    product.multiply(count_rows, panels);
  }
};

// What was kept of the parts of some tokens and a head becomes their output.
template <typename T>
void put_together(const Attention<T>& of, const Part* parts, int64_t count) {
  const int64_t each = 2 + rounded_up(of.values.size, LANES);
  const int64_t rows = (parts->end - parts->begin) * of.group;
  std::vector<float> summed(of.values.size);
  for (int64_t row = 0; row < rows; ++row) {
    float peak = -INFINITE, total = 0;
    for (int64_t n = 0; n < count; ++n) peak = std::max(peak, parts[n].sums[row * each]);
    std::fill(summed.begin(), summed.end(), 0.0f);
    for (int64_t n = 0; n < count; ++n) {
      const float* sums = parts[n].sums + row * each;
      const float weight = exponential(sums[0] - peak);
      total += weight * sums[1];
      for (int64_t d = 0; d < of.values.size; ++d) summed[d] += weight * sums[2 + d];
    }
    T* to = of.out.at(
        parts->span->row + parts->begin + row / of.group, parts->head * of.group + row % of.group);
    for (int64_t d = 0; d < of.values.size; ++d) to[d] = summed[d] / total;
  }
}

// The work of a step's layer, the longest first, as far as that is known.
template <typename T>
std::vector<Part> parts_of(const Attention<T>& of) {
  std::vector<Part> made;
  const int64_t tokens = std::max<int64_t>(1, TILE_ROWS / of.group);
  for (const Span& span : of.spans)
    for (int64_t end = span.width; end > 0; end -= tokens)
      for (int64_t head = 0; head < of.key_heads; ++head) {
        const int64_t begin = std::max<int64_t>(0, end - tokens);
        const int64_t first = of.look.first(span.start + begin) / BLOCK * BLOCK;
        const int64_t last = of.look.last(span.start + end - 1, span.length());
        made.push_back({&span, head, begin, end, first, last});
      }
  return made;
}

// As many parts as there are threads, where keys suffice: all of some tokens one after another.
std::vector<Part> split(const std::vector<Part>& whole, int64_t threads) {
  std::vector<Part> made;
  const int64_t wanted = threads / int64_t(whole.size());
  for (Part part : whole) {
    const int64_t last = part.last;
    const int64_t count = std::clamp<int64_t>((last - part.first) / LEAST_KEYS, 1, wanted);
    const int64_t each = rounded_up((last - part.first + count - 1) / count, BLOCK);
    for (; part.first < last; part.first += each) {
      part.last = std::min(last, part.first + each);
      made.push_back(part);
    }
  }
  return made;
}

template <typename Run>
void in_parallel(int64_t count, const Run& run) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t n; (n = next++) < count;) run(n);
  });
}

template <typename T>
void attend(const Attention<T>& of) {
  const std::vector<Part> whole = parts_of(of);
  const int64_t threads = at::get_num_threads(), count = whole.size();
  if (!count) return;
  if (count * 2 > threads) {
    in_parallel(count, [&](int64_t n) { Tile<T>(of, whole[n]).attend(); });
    return;
  }
  std::vector<Part> parts = split(whole, threads);
  const int64_t each = 2 + rounded_up(of.values.size, LANES);
  int64_t room = 0;
  for (const Part& part : parts) room += (part.end - part.begin) * of.group * each;
  std::vector<float> sums(room);
  float* free = sums.data();
  for (Part& part : parts) {
    part.sums = free;
    free += (part.end - part.begin) * of.group * each;
  }
  in_parallel(parts.size(), [&](int64_t n) { Tile<T>(of, parts[n]).attend(); });
  for (size_t n = 0, end; n < parts.size(); n = end) {
    const Part& part = parts[n];
    for (end = n + 1; end < parts.size(); ++end)
      if (parts[end].span != part.span || parts[end].head != part.head ||
          parts[end].begin != part.begin)
        break;
    put_together(of, &part, end - n);
  }
}

}  // namespace
