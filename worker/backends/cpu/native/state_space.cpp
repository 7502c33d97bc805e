// The recurrence of Mamba-2's state-space layers: S ← exp(A dt) S + (x dt) Bᵀ, out = S C + D x, token by
// token. Rows of a state do not depend on each other, so a thread keeps some in its cache for all
// tokens. A token's result does not depend on the division of its sequence into chunks.

#include "segments.h"

namespace {

constexpr int64_t STATE_ROWS = 16;

// x [rows, heads, size]; dt [rows, heads]; decay, skip [heads]; b, c [rows, groups, width]; out as x;
// states [slots, heads, size, width]
template <typename T>
struct StateSpace {
  const T* x;
  const float *dt, *decay, *skip;
  const T *b, *c;
  float* states;
  float* out;
  int64_t heads, size, groups, width;
  const Segments& segments;

  void run() const {
    const int64_t tiles = (size + STATE_ROWS - 1) / STATE_ROWS, padded = rounded_up(width, LANES);
    at::parallel_for(0, segments.chains * heads * tiles, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> memory((STATE_ROWS + 2) * padded);
      for (int64_t n = begin; n < end; ++n)
        segments.each(n / tiles / heads, [&](const Segment& s) {
          run(s, n / tiles % heads, n % tiles * STATE_ROWS, padded, memory.data());
        });
    });
  }

  void run(const Segment& segment, int64_t head, int64_t first, int64_t padded, float* tile) const {
    const int64_t count = std::min(STATE_ROWS, size - first), group = head / (heads / groups);
    float *bs = tile + STATE_ROWS * padded, *cs = bs + padded;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < padded; j += LANES)
        store(
            tile + i * padded + j,
            segment.source == NO_SLOT
                ? Floats{}
                : load_floats(state(segment.source, head, first + i) + j, width - j));
    for (int64_t token = segment.offset; token < segment.offset + segment.tokens; ++token) {
      const int64_t at = token * heads + head;
      const T *from_b = b + (token * groups + group) * width, *from_c = c + (token * groups + group) * width;
      for (int64_t j = 0; j < padded; j += LANES) {
        store(bs + j, load_floats(from_b + j, width - j));
        store(cs + j, load_floats(from_c + j, width - j));
      }
      const float kept = std::exp(decay[head] * dt[at]);
      for (int64_t i = 0; i < count; ++i) {
        const float in = float(x[at * size + first + i]);
        const float added = in * dt[at];
        Floats sums{};
        for (int64_t j = 0; j < padded; j += LANES) {
          float* s = tile + i * padded + j;
          const Floats updated = load<Floats>(s) * kept + load<Floats>(bs + j) * added;
          store(s, updated);
          sums += updated * load<Floats>(cs + j);
        }
        out[at * size + first + i] = sum(sums) + (skip ? skip[head] * in : 0.0f);
      }
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < width; j += LANES)
        store_floats(
            state(segment.target, head, first + i) + j, load<Floats>(tile + i * padded + j), width - j);
  }

  float* state(int64_t slot, int64_t head, int64_t row) const {
    return states + ((slot * heads + head) * size + row) * width;
  }
};

// Sizes as in StateSpace, after a dimension of 1 where they begin with rows; segments as Segments. The
// output is float32.
Tensor state_space(
    const Tensor& x, const Tensor& dt, const Tensor& decay, const Tensor& b, const Tensor& c,
    const std::optional<Tensor>& skip, const Tensor& states, const Tensor& segments) {
  const auto sizes = x.sizes();
  TORCH_CHECK(
      sizes.size() == 4 && sizes[0] == 1 && b.dim() == 4 && b.size(0) == 1 && b.size(1) == sizes[1] &&
          c.sizes() == b.sizes() && b.size(2) > 0 && sizes[2] % b.size(2) == 0 &&
          dt.numel() == sizes[1] * sizes[2] && decay.numel() == sizes[2] &&
          (!skip || skip->numel() == sizes[2]) && b.scalar_type() == x.scalar_type() &&
          c.scalar_type() == x.scalar_type(),
      "the recurrence of ", sizes, ", steps ", dt.sizes(), ", inputs ", b.sizes(), " and outputs ",
      c.sizes());
  TORCH_CHECK(
      states.scalar_type() == at::kFloat && states.is_contiguous() && states.dim() == 4 &&
          states.size(1) == sizes[2] && states.size(2) == sizes[3] && states.size(3) == b.size(3),
      "states ", states.sizes(), " for ", sizes, " and inputs ", b.sizes());
  const Segments parts(segments, sizes[1], states.size(0));
  const auto floats_of = [](const Tensor& t) { return t.to(at::kFloat).contiguous(); };
  const Tensor steps = floats_of(dt), decays = floats_of(decay), skips = skip ? floats_of(*skip) : Tensor();
  const Tensor xs = x.contiguous(), bs = b.contiguous(), cs = c.contiguous();
  const Tensor out = parts.results(sizes, x.options().dtype(at::kFloat));
  dispatch(x, [&](auto kind) {
    using T = decltype(kind);
    StateSpace<T>{
        xs.const_data_ptr<T>(), steps.const_data_ptr<float>(), decays.const_data_ptr<float>(),
        skip ? skips.const_data_ptr<float>() : nullptr, bs.const_data_ptr<T>(), cs.const_data_ptr<T>(),
        states.mutable_data_ptr<float>(), out.mutable_data_ptr<float>(), sizes[2], sizes[3], b.size(2),
        b.size(3), parts}
        .run();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("state_space", &state_space);
}
