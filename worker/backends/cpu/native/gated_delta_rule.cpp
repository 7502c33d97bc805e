// The gated delta rule: S ← diag(d) S, S ← S + k ((v − kᵀ S) β), out = qᵀ S, token by token. Columns of a
// state do not depend on each other, so a thread keeps a tile of them in its cache for all tokens. A
// token's result does not depend on the division of its sequence into chunks.

#include "segments.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t TILE_VECTORS = 8;  // their sums fit into the registers
#else
constexpr int64_t TILE_VECTORS = 4;
#endif
constexpr int64_t TILE_COLUMNS = TILE_VECTORS * LANES;
constexpr float NORM_EPSILON = 1e-6f;

// A tile of a state [keys, columns], of which a row begins so many numbers after the one before.
struct Columns {
  float* first;
  int64_t row;
};

// query, key [rows, key heads, keys] and value [rows, heads, columns] with rows that far apart; out
// [rows, heads, columns]; beta [rows, heads]; decay [rows, heads, 1 or keys], logarithms; states [slots,
// heads, keys, columns]
template <typename T>
struct GatedDeltaRule {
  const T *query, *key, *value;
  int64_t query_row, key_row, value_row;
  const float *decay, *beta;
  float* states;
  T* out;
  int64_t key_heads, heads, keys, columns;
  bool decays_keys, normalizes;
  const Segments& segments;

  void run() const {
    const int64_t tiles = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    at::parallel_for(0, segments.chains * heads * tiles, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> memory(keys * (TILE_COLUMNS + 4));
      for (int64_t n = begin; n < end; ++n)
        segments.each(n / tiles / heads, [&](const Segment& s) {
          run(s, n / tiles % heads, n % tiles * TILE_COLUMNS, memory.data());
        });
    });
  }

  float* state(int64_t slot, int64_t head) const {
    return states + (slot * heads + head) * keys * columns;
  }

  // Reads the first token's state from its slot and writes the last one's to its slot: others are in
  // the tile.
  void run(const Segment& segment, int64_t head, int64_t column, float* tile) const {
    const int64_t width = std::min(TILE_COLUMNS, columns - column);
    float *q = tile + keys * TILE_COLUMNS, *k = q + keys, *d = k + keys, *kd = d + keys;
    const Columns in_tile{tile, TILE_COLUMNS};
    Columns from = in_tile;
    if (segment.source == NO_SLOT)
      std::fill_n(tile, keys * TILE_COLUMNS, 0.0f);
    else
      from = {state(segment.source, head) + column, columns};
    const int64_t key_head = head / (heads / key_heads), end = segment.offset + segment.tokens;
    for (int64_t token = segment.offset; token < end; ++token) {
      prepare(query + token * query_row + key_head * keys, q, 1.0f / std::sqrt(float(keys)));
      prepare(key + token * key_row + key_head * keys, k, 1.0f);
      const float* g = decay + (token * heads + head) * (decays_keys ? keys : 1);
      if (decays_keys)
        for (int64_t i = 0; i < keys; ++i) d[i] = std::exp(g[i]);
      else
        std::fill_n(d, keys, std::exp(g[0]));
      for (int64_t i = 0; i < keys; ++i) kd[i] = k[i] * d[i];
      const Columns to =
          token + 1 < end ? in_tile : Columns{state(segment.target, head) + column, columns};
      const int64_t at = head * columns + column;
      const T* v = value + token * value_row + at;
      T* result = out + token * heads * columns + at;
      const float rate = beta[token * heads + head];
      if (width == TILE_COLUMNS)
        step<true>(from, to, q, k, d, kd, rate, v, result, width);
      else
        step<false>(from, to, q, k, d, kd, rate, v, result, width);
      from = in_tile;
    }
  }

  // Converts, normalizes and scales a query or key.
  void prepare(const T* from, float* to, float scale) const {
    Floats squares{};
    for (int64_t i = 0; i < keys; i += LANES) {
      const Floats x = load_floats(from + i, keys - i);
      squares += x * x;
      store_floats(to + i, x, keys - i);
    }
    if (normalizes) scale /= std::sqrt(sum(squares) + NORM_EPSILON);
    for (int64_t i = 0; i < keys; ++i) to[i] *= scale;
  }

  // WHOLE: `width` is that of a tile.
  template <bool WHOLE>
  void step(
      Columns from, Columns to, const float* q, const float* k, const float* d, const float* kd,
      float rate, const T* v, T* result, int64_t width) const {
    const auto loaded = [&](int64_t i, int64_t j) {
      const float* s = from.first + i * from.row + j * LANES;
      return WHOLE ? load<Floats>(s) : load_floats(s, width - j * LANES);
    };
    // sums of even and of odd keys, since an addition takes several cycles
    Floats even[TILE_VECTORS]{}, odd[TILE_VECTORS]{}, delta[TILE_VECTORS];
    int64_t i = 0;
    for (; i + 1 < keys; i += 2)
      for (int64_t j = 0; j < TILE_VECTORS; ++j) {
        even[j] += kd[i] * loaded(i, j);
        odd[j] += kd[i + 1] * loaded(i + 1, j);
      }
    if (i < keys)
      for (int64_t j = 0; j < TILE_VECTORS; ++j) even[j] += kd[i] * loaded(i, j);
    for (int64_t j = 0; j < TILE_VECTORS; ++j) {
      delta[j] = (load_floats(v + j * LANES, width - j * LANES) - (even[j] + odd[j])) * rate;
      even[j] = odd[j] = Floats{};
    }
    const auto update = [&](int64_t n, Floats* sums) {
      for (int64_t j = 0; j < TILE_VECTORS; ++j) {
        const Floats x = d[n] * loaded(n, j) + k[n] * delta[j];
        store_floats(to.first + n * to.row + j * LANES, x, WHOLE ? LANES : width - j * LANES);
        sums[j] += q[n] * x;
      }
    };
    for (i = 0; i + 1 < keys; i += 2) {
      update(i, even);
      update(i + 1, odd);
    }
    if (i < keys) update(i, even);
    for (int64_t j = 0; j < TILE_VECTORS; ++j)
      store_floats(result + j * LANES, even[j] + odd[j], width - j * LANES);
  }
};

// Sizes as in GatedDeltaRule, after a dimension of 1; segments as Segments.
Tensor gated_delta_rule(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
    const Tensor& beta, const Tensor& states, const Tensor& segments, bool normalizes) {
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  TORCH_CHECK(
      q.size() == 4 && k == q && v.size() == 4 && q[0] == 1 && v[0] == 1 && v[1] == q[1] &&
          q[2] > 0 && v[2] % q[2] == 0 && key.scalar_type() == query.scalar_type() &&
          value.scalar_type() == query.scalar_type(),
      "the delta rule of queries ", q, ", keys ", k, " and values ", v);
  const bool decays_keys = decay.dim() == 4;
  const int64_t gates = q[1] * v[2];
  TORCH_CHECK(
      decay.numel() == gates * (decays_keys ? q[3] : 1) && beta.numel() == gates,
      "decays ", decay.sizes(), " and rates ", beta.sizes());
  TORCH_CHECK(
      states.scalar_type() == at::kFloat && states.is_contiguous() && states.dim() == 4 &&
          states.size(1) == v[2] && states.size(2) == q[3] && states.size(3) == v[3],
      "states ", states.sizes(), " for keys ", k, " and values ", v);
  const Segments parts(segments, q[1], states.size(0));
  const Tensor gate = decay.to(at::kFloat).contiguous(), rate = beta.to(at::kFloat).contiguous();
  const auto by_row = [](const Tensor& t) {  // each row's numbers in sequence
    return t.stride(3) == 1 && t.stride(2) == t.size(3) ? t : t.contiguous();
  };
  const Tensor qs = by_row(query), ks = by_row(key), vs = by_row(value);
  const Tensor out = parts.results(v, value.options());
  dispatch(query, [&](auto kind) {
    using T = decltype(kind);
    GatedDeltaRule<T>{
        qs.const_data_ptr<T>(), ks.const_data_ptr<T>(), vs.const_data_ptr<T>(), qs.stride(1),
        ks.stride(1), vs.stride(1), gate.const_data_ptr<float>(), rate.const_data_ptr<float>(),
        states.mutable_data_ptr<float>(), out.mutable_data_ptr<T>(), q[2], v[2], q[3], v[3],
        decays_keys, normalizes, parts}
        .run();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("gated_delta_rule", &gated_delta_rule);
}
