// The gated delta rule: S ← diag(d) S, S ← S + k ((v − kᵀ S) β), out = qᵀ S, token by token. Columns of a
// state do not depend on each other, so a thread keeps a tile of them in its cache for all tokens. A
// token's result does not depend on the division of its sequence into chunks.

namespace {

constexpr int64_t TILE_VECTORS = 4;
constexpr int64_t TILE_COLUMNS = TILE_VECTORS * LANES;
constexpr float NORM_EPSILON = 1e-6f;

// query, key [rows, key heads, keys]; value, out [rows, heads, columns]; beta [rows, heads]; decay
// [rows, heads, 1 or keys], logarithms; states [slots, heads, keys, columns]
template <typename T>
struct GatedDeltaRule {
  const T *query, *key, *value;
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

  void run(const Segment& segment, int64_t head, int64_t column, float* tile) const {
    const int64_t width = std::min(TILE_COLUMNS, columns - column);
    float *q = tile + keys * TILE_COLUMNS, *k = q + keys, *d = k + keys, *kd = d + keys;
    if (segment.source != NO_SLOT) {
      const float* from = state(segment.source, head) + column;
      for (int64_t i = 0; i < keys; ++i)
        for (int64_t j = 0; j < TILE_VECTORS; ++j)
          store(tile + i * TILE_COLUMNS + j * LANES,
                load_floats(from + i * columns + j * LANES, width - j * LANES));
    } else {
      std::fill_n(tile, keys * TILE_COLUMNS, 0.0f);
    }
    const int64_t key_head = head / (heads / key_heads);
    for (int64_t token = segment.offset; token < segment.offset + segment.tokens; ++token) {
      prepare(query + (token * key_heads + key_head) * keys, q, 1.0f / std::sqrt(float(keys)));
      prepare(key + (token * key_heads + key_head) * keys, k, 1.0f);
      const float* g = decay + (token * heads + head) * (decays_keys ? keys : 1);
      if (decays_keys)
        for (int64_t i = 0; i < keys; ++i) d[i] = std::exp(g[i]);
      else
        std::fill_n(d, keys, std::exp(g[0]));
      for (int64_t i = 0; i < keys; ++i) kd[i] = k[i] * d[i];
      const int64_t at = (token * heads + head) * columns + column;
      step(tile, q, k, d, kd, beta[token * heads + head], value + at, out + at, width);
    }
    float* to = state(segment.target, head) + column;
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < TILE_VECTORS; ++j)
        store_floats(to + i * columns + j * LANES,
                     load<Floats>(tile + i * TILE_COLUMNS + j * LANES), width - j * LANES);
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

  void step(
      float* tile, const float* q, const float* k, const float* d, const float* kd, float rate,
      const T* v, T* result, int64_t width) const {
    // sums of even and of odd keys, since an addition takes several cycles
    Floats even[TILE_VECTORS]{}, odd[TILE_VECTORS]{}, delta[TILE_VECTORS];
    int64_t i = 0;
    for (; i + 1 < keys; i += 2)
      for (int64_t j = 0; j < TILE_VECTORS; ++j) {
        const float* s = tile + i * TILE_COLUMNS + j * LANES;
        even[j] += kd[i] * load<Floats>(s);
        odd[j] += kd[i + 1] * load<Floats>(s + TILE_COLUMNS);
      }
    if (i < keys)
      for (int64_t j = 0; j < TILE_VECTORS; ++j)
        even[j] += kd[i] * load<Floats>(tile + i * TILE_COLUMNS + j * LANES);
    for (int64_t j = 0; j < TILE_VECTORS; ++j) {
      delta[j] = (load_floats(v + j * LANES, width - j * LANES) - (even[j] + odd[j])) * rate;
      even[j] = odd[j] = Floats{};
    }
    const auto update = [&](int64_t n, Floats* sums) {
      for (int64_t j = 0; j < TILE_VECTORS; ++j) {
        float* s = tile + n * TILE_COLUMNS + j * LANES;
        const Floats x = d[n] * load<Floats>(s) + k[n] * delta[j];
        store(s, x);
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
  const Tensor qs = query.contiguous(), ks = key.contiguous(), vs = value.contiguous();
  const Tensor out = at::zeros(v, value.options());
  dispatch(query, [&](auto kind) {
    using T = decltype(kind);
    GatedDeltaRule<T>{
        qs.const_data_ptr<T>(), ks.const_data_ptr<T>(), vs.const_data_ptr<T>(),
        gate.const_data_ptr<float>(), rate.const_data_ptr<float>(),
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
