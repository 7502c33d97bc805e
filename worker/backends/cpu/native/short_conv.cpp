// Causal convolutions of each channel over the last few tokens. A token's result does not depend on the
// division of its sequence into chunks.

#include "segments.h"

namespace {

constexpr int64_t MAX_TAPS = 8;

inline Floats silu(Floats x) {
  const Floats e = power_of_2((x < 0.0f ? x : -x) * LOG2_E);
  return x * ((x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e));
}

// x [rows, channels] with rows `stride` apart; weight [channels, taps], of type W as the bias
// [channels] or null; states [slots, taps, channels], the last inputs; out [rows, channels]
template <typename T, typename W>
struct ShortConv {
  const T* x;
  int64_t stride;
  const W *weight, *bias;
  T* states;
  T* out;
  int64_t channels, taps;
  bool activates;
  const Segments& segments;

  void run() const {
    const int64_t groups = (channels + LANES - 1) / LANES;
    at::parallel_for(0, groups, 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) run(n * LANES);
    });
  }

  void run(int64_t channel) const {
    const int64_t count = std::min(LANES, channels - channel);
    Floats weights[MAX_TAPS]{}, inputs[MAX_TAPS];
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t k = 0; k < taps; ++k)
        weights[k][lane] = float(weight[(channel + lane) * taps + k]);
    const Floats offset = bias ? load_floats(bias + channel, count) : Floats{};
    segments.each([&](const Segment& s) {
      for (int64_t k = 1; k < taps; ++k)
        inputs[k] = s.source == NO_SLOT
            ? Floats{}
            : load_floats(states + (s.source * taps + k) * channels + channel, count);
      for (int64_t row = s.offset; row < s.offset + s.tokens; ++row) {
        Floats sum = offset;
        for (int64_t k = 1; k < taps; ++k) inputs[k - 1] = inputs[k];
        inputs[taps - 1] = load_floats(x + row * stride + channel, count);
        for (int64_t k = 0; k < taps; ++k) sum += weights[k] * inputs[k];
        T* to = out + row * channels + channel;
        store_floats(to, sum, count);
        if (activates) store_floats(to, silu(load_floats(to, count)), count);  // rounded before, as torch
      }
      for (int64_t k = 0; k < taps; ++k)
        store_floats(states + (s.target * taps + k) * channels + channel, inputs[k], count);
    });
  }
};

// x [1, channels, rows] → the same; weight [channels, taps]; bias [channels]; states [slots, channels,
// taps], whose memory holds [taps, channels]; segments as Segments. `activates`: by SiLU.
Tensor short_conv(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& states,
    const Tensor& segments, bool activates) {
  TORCH_CHECK(
      x.dim() == 3 && x.size(0) == 1 && weight.dim() == 2 && weight.size(0) == x.size(1) &&
          weight.size(1) <= MAX_TAPS && states.dim() == 3 && states.is_contiguous() &&
          states.size(1) == x.size(1) && states.size(2) == weight.size(1) &&
          states.scalar_type() == x.scalar_type() &&
          (!bias || (bias->numel() == x.size(1) && bias->scalar_type() == weight.scalar_type())),
      "a convolution of ", x.sizes(), " by ", weight.sizes(), " with states ", states.sizes());
  const int64_t rows = x.size(2), channels = x.size(1);
  const Segments parts(segments, rows, states.size(0));
  const Tensor by_row = x[0].t(), in = by_row.stride(1) == 1 ? by_row : by_row.contiguous();
  const Tensor taps = weight.contiguous(), offsets = bias ? bias->contiguous() : Tensor();
  const Tensor out = parts.results({rows, channels}, x.options());
  dispatch(x, [&](auto kind) {
    using T = decltype(kind);
    dispatch(weight, [&](auto other) {
      using W = decltype(other);
      ShortConv<T, W>{
          in.const_data_ptr<T>(), in.stride(0), taps.const_data_ptr<W>(),
          bias ? offsets.const_data_ptr<W>() : nullptr, states.mutable_data_ptr<T>(),
          out.mutable_data_ptr<T>(), channels, weight.size(1), activates, parts}
          .run();
    });
  });
  return out.t().unsqueeze(0);
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("short_conv", &short_conv);
}
