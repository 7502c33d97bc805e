// The attention operations that torch calls: of a layer over the paged cache, and over packed rows.
// `begin_step` passes the layout of a step's tokens before the model runs; it is held per thread.

#include "attention.h"
#include "tensors.h"

namespace {

struct Layer {
  Tensor keys, values;  // [blocks, BLOCK, heads, size]; values may be a part of the keys
  bool panels;  // each block holds [heads], panels of its keys or values (panels.h)
  int64_t chunk;
  Temperature temperature;
};

struct Step {
  std::vector<Layer> layers;
  std::vector<Span> spans;
  Tensor tables;  // memory that the spans point into
  int64_t shared_layer = 0;  // the layer that SHARED_LAYER stands for
};

thread_local std::optional<Step> step;

constexpr int64_t SHARED_LAYER = -1;  // as in paged.py
constexpr int64_t MIN_WRITTEN = 2048;  // numbers of keys and values that a thread writes, at least

// Checks that a span's blocks are in its table and in the cache.
void check_blocks(const Span& span, const Tensor& tables, int64_t blocks) {
  const int64_t count = (span.length() + BLOCK - 1) / BLOCK;
  const int64_t size = tables.const_data_ptr<int32_t>() + tables.numel() - span.table;
  TORCH_CHECK(count <= size, "a table of ", size, " blocks for a span of ", count);
  for (int64_t n = 0; n < count; ++n)
    TORCH_CHECK(
        0 <= span.table[n] && span.table[n] < blocks, "block ", span.table[n], " of ", blocks);
}

// layers: [L, 4] panels, chunk, floor_scale, attn_scale; spans: [n, 4] row, width, start, offset in `tables`
void begin_step(
    at::TensorList keys, at::TensorList values, const Tensor& layers, const Tensor& spans,
    const Tensor& tables) {
  Step next;
  const double* layer = layers.const_data_ptr<double>();
  for (size_t n = 0; n < keys.size(); ++n, layer += 4)
    next.layers.push_back(
        {keys[n], values[n], layer[0] != 0, int64_t(layer[1]), {layer[2], layer[3]}});
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < spans.size(0); ++n, span += 4)
    next.spans.push_back(
        {span[0], span[1], span[2], tables.const_data_ptr<int32_t>() + span[3]});
  for (const Span& span : next.spans) check_blocks(span, tables, next.layers.at(0).keys.size(0));
  next.tables = tables;
  step = std::move(next);
}

void end_step() { step.reset(); }

void begin_layers(int64_t layer) { step->shared_layer = layer; }

template <typename T>
Matrix<const T> rows_of(const Tensor& x) {  // [1, heads, T, size]
  return {x.const_data_ptr<T>(), x.stride(2), x.stride(1), x.size(3)};
}

template <typename T>
Matrix<T> rows_of_cache(const Tensor& cache, bool panels) {
  const int64_t head = cache.stride(2) * (panels ? BLOCK : 1);
  return {static_cast<T*>(cache.data_ptr()), cache.stride(1), head, cache.size(3)};
}

// Writes some rows of the step. `write_panel`: write_key or write_value, if the cache holds panels.
template <typename T>
void write(
    const Tensor& x, const Tensor& cache, const std::vector<Span>& spans, int64_t first, int64_t last,
    void (*write_panel)(const T*, int64_t, int64_t, T*)) {
  const Matrix<const T> from = rows_of<T>(x);
  const Matrix<T> to = rows_of_cache<T>(cache, write_panel);
  const int64_t heads = x.size(1);
  for (const Span& span : spans)
    for (int64_t row = std::max(first, span.row); row < std::min(last, span.row + span.width); ++row) {
      const int64_t position = span.start + row - span.row;
      const int64_t block = span.table[position / BLOCK] * BLOCK, within = position % BLOCK;
      for (int64_t head = 0; head < heads; ++head) {
        const T* numbers = from.at(row, head);
        if (write_panel)
          write_panel(numbers, from.size, within, to.at(block, head));
        else
          std::copy_n(numbers, from.size, to.at(block + within, head));
      }
    }
}

template <typename T>
Matrix<T> rows_of_output(const Tensor& out) {
  return {out.mutable_data_ptr<T>(), out.stride(1), out.stride(2), out.size(3)};
}

Tensor with_contiguous_rows(const Tensor& x) {
  return x.stride(3) == 1 ? x : x.contiguous();
}

Tensor output_for(const Tensor& query, const Tensor& value) {
  return at::empty({1, query.size(2), query.size(1), value.size(3)}, query.options());
}

// Checks that the sizes match, since memory is read by them.
void check(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  TORCH_CHECK(
      q.size() == 4 && k.size() == 4 && v.size() == 4 && q[0] == 1 && k[0] == 1 && v[0] == 1 &&
          k[1] > 0 && q[1] % k[1] == 0 && v[1] == k[1] && k[2] == q[2] && v[2] == q[2] &&
          k[3] == q[3],
      "attention of queries ", q, ", keys ", k, " and values ", v);
}

void check_cache(const Tensor& x, const Tensor& cache) {
  TORCH_CHECK(
      x.size(1) == cache.size(2) && x.size(3) == cache.size(3), x.sizes(),
      " for a cache of ", cache.sizes());
}

// query, key, value [1, heads, T, size] → [1, T, heads, size]. Writes keys and values to the cache.
// Without a step from begin_step, as in steps that another backend runs, calls the Python implementation.
Tensor paged_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& sinks, int64_t layer, double scale, int64_t window,
    double softcap) {
  if (!step) {
    static const auto fallback = c10::Dispatcher::singleton()
        .findSchemaOrThrow("onequeue::torch_attention", "")
        .typed<Tensor(
            const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, c10::SymInt,
            double, c10::SymInt, double)>();
    return fallback.call(query, key, value, sinks, layer, scale, window, softcap);
  }
  if (layer <= SHARED_LAYER) layer = step->shared_layer + SHARED_LAYER - layer;
  const Layer& cached = step->layers.at(layer);
  check(query, key, value);
  check_cache(key, cached.keys);
  check_cache(value, cached.values);
  TORCH_CHECK(!sinks || sinks->numel() == query.size(1), "the sinks are not one per query head");
  for (const Span& span : step->spans)
    TORCH_CHECK(
        span.row + span.width <= query.size(2), "a span ends after the last of ", query.size(2),
        " rows");
  const Mask mask{scale, softcap, window, cached.chunk, true};
  const Tensor q = with_contiguous_rows(query), k = with_contiguous_rows(key),
               v = with_contiguous_rows(value);
  const Tensor out = output_for(query, value);
  const Tensor sink_row = sinks ? sinks->to(query.scalar_type()).contiguous() : Tensor();
  dispatch(query, [&](auto kind) {
    using T = decltype(kind);
    const bool panels = cached.panels;
    const int64_t grain = MIN_WRITTEN / (k.size(1) * (k.size(3) + v.size(3))) + 1;
    at::parallel_for(0, q.size(2), grain, [&, &spans = step->spans](int64_t begin, int64_t end) {
      write<T>(k, cached.keys, spans, begin, end, panels ? write_key<T> : nullptr);
      write<T>(v, cached.values, spans, begin, end, panels ? write_value<T> : nullptr);
    });
    attend<T>(
        {rows_of<T>(q), rows_of_cache<const T>(cached.keys, panels),
         rows_of_cache<const T>(cached.values, panels), rows_of_output<T>(out),
         sinks ? sink_row.const_data_ptr<T>() : nullptr, k.size(1), q.size(1) / k.size(1), mask,
         cached.temperature, step->spans, panels});
  });
  return out;
}

// query, key, value [1, heads, T, size] → [1, T, heads, size] of packed rows: sequences of `lengths`
// tokens one after another, each attending to itself only, in both directions unless causal.
Tensor packed_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
    double scale, int64_t window, bool causal) {
  check(query, key, value);
  const Tensor q = with_contiguous_rows(query), k = with_contiguous_rows(key),
               v = with_contiguous_rows(value);
  const Tensor out = output_for(query, value);
  std::vector<Span> spans;
  int64_t row = 0;
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < lengths.numel(); row += length[n++])
    spans.push_back({row, length[n], 0, nullptr, row});
  TORCH_CHECK(row == q.size(2), "sequences of ", row, " tokens in ", q.size(2), " rows");
  dispatch(query, [&](auto kind) {
    using T = decltype(kind);
    attend<T>(
        {rows_of<T>(q), rows_of<T>(k), rows_of<T>(v), rows_of_output<T>(out), nullptr, k.size(1),
         q.size(1) / k.size(1), {scale, 0, window, 0, causal}, {}, spans});
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, CPU, m) {
  m.impl("paged_attention", &paged_attention);
}

TORCH_LIBRARY_FRAGMENT(onequeue, m) {
  m.def(
      "begin_step(Tensor[] keys, Tensor[] values, Tensor layers, Tensor spans, Tensor tables) -> ()",
      &begin_step);
  m.def("end_step() -> ()", &end_step);
  m.def("begin_layers(int layer) -> ()", &begin_layers);
  m.def(
      "packed_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, "
      "int window, bool causal) -> Tensor",
      &packed_attention);
}
