// What torch calls: attention of a step's layer over the paged cache, and over packed rows. Where a
// step's tokens lie is told once, before the model runs, and held for the thread that runs it.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

namespace {

using at::Tensor;

struct Layer {
  Tensor keys, values;  // [blocks, BLOCK, heads, size]
  int64_t chunk;
  Temperature temperature;
};

struct Step {
  std::vector<Layer> layers;
  std::vector<Span> spans;
  Tensor tables;  // what spans point into
};

thread_local std::optional<Step> step;

// What a span's tokens are written to must be of its table and of the cache.
void check_blocks(const Span& span, const Tensor& tables, int64_t blocks) {
  const int64_t count = (span.length() + BLOCK - 1) / BLOCK;
  const int64_t left = tables.const_data_ptr<int32_t>() + tables.numel() - span.table;
  TORCH_CHECK(count <= left, "a table ends before block ", count);
  for (int64_t n = 0; n < count; ++n)
    TORCH_CHECK(
        0 <= span.table[n] && span.table[n] < blocks, "block ", span.table[n], " of ", blocks);
}

// layers: [L, 3] chunk, floor_scale, attn_scale; spans: [n, 4] row, width, start, place in `tables`
void begin_step(
    at::TensorList keys, at::TensorList values, const Tensor& layers, const Tensor& spans,
    const Tensor& tables) {
  Step made;
  const double* layer = layers.const_data_ptr<double>();
  for (size_t n = 0; n < keys.size(); ++n, layer += 3)
    made.layers.push_back({keys[n], values[n], int64_t(layer[0]), {layer[1], layer[2]}});
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < spans.size(0); ++n, span += 4)
    made.spans.push_back(
        {span[0], span[1], span[2], tables.const_data_ptr<int32_t>() + span[3]});
  for (const Span& span : made.spans) check_blocks(span, tables, made.layers.at(0).keys.size(0));
  made.tables = tables;
  step = std::move(made);
}

void end_step() { step.reset(); }

template <typename T>
Matrix<const T> rows_of(const Tensor& given) {  // [1, heads, T, size]
  return {given.const_data_ptr<T>(), given.stride(2), given.stride(1), given.size(3)};
}

template <typename T>
Matrix<const T> rows_of_cache(const Tensor& cache) {
  return {cache.const_data_ptr<T>(), cache.stride(1), cache.stride(2), cache.size(3)};
}

template <typename T>
void write(const Tensor& given, const Tensor& cache) {
  const Matrix<const T> from = rows_of<T>(given);
  T* to = cache.mutable_data_ptr<T>();
  const int64_t heads = given.size(1), token = heads * from.size;
  for (const Span& span : step->spans)
    at::parallel_for(0, span.width, 16384 / token + 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t place = span.start + n;
        T* slot = to + (span.table[place / BLOCK] * BLOCK + place % BLOCK) * token;
        for (int64_t head = 0; head < heads; ++head)
          std::copy_n(from.at(span.row + n, head), from.size, slot + head * from.size);
      }
    });
}

template <typename T>
Matrix<T> rows_of_output(const Tensor& out) {
  return {out.mutable_data_ptr<T>(), out.stride(1), out.stride(2), out.size(3)};
}

template <typename Run>
void with_type_of(const Tensor& given, const Run& run) {
  if (given.scalar_type() == at::kFloat) return run(float());
  TORCH_CHECK(given.scalar_type() == at::kBFloat16, "attention of ", given.scalar_type());
  run(Half());
}

Tensor with_rows(const Tensor& given) {
  return given.stride(3) == 1 ? given : given.contiguous();
}

Tensor output_for(const Tensor& query, const Tensor& value) {
  return at::empty({1, query.size(2), query.size(1), value.size(3)}, query.options());
}

// That the numbers of heads, rows and columns fit each other, by which memory is read.
void check(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto q = query.sizes(), k = key.sizes(), v = value.sizes();
  TORCH_CHECK(
      q.size() == 4 && k.size() == 4 && v.size() == 4 && q[0] == 1 && k[0] == 1 && v[0] == 1 &&
          k[1] > 0 && q[1] % k[1] == 0 && v[1] == k[1] && k[2] == q[2] && v[2] == q[2] &&
          k[3] == q[3],
      "attention of queries ", q, ", keys ", k, " and values ", v);
}

void check_cache(const Tensor& given, const Tensor& cache) {
  TORCH_CHECK(
      given.size(1) == cache.size(2) && given.size(3) == cache.size(3), given.sizes(),
      " for a cache of ", cache.sizes());
}

// [1, heads, T, size] in, [1, T, heads, size] out. What no step was begun for goes to Python.
Tensor paged_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& sinks, int64_t layer, double scale, int64_t window,
    double softcap) {
  if (!step) {
    static const auto plain = c10::Dispatcher::singleton()
        .findSchemaOrThrow("onequeue::torch_attention", "")
        .typed<Tensor(
            const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, c10::SymInt,
            double, c10::SymInt, double)>();
    return plain.call(query, key, value, sinks, layer, scale, window, softcap);
  }
  const Layer& own = step->layers.at(layer);
  check(query, key, value);
  check_cache(key, own.keys);
  check_cache(value, own.values);
  TORCH_CHECK(!sinks || sinks->numel() == query.size(1), "sinks for other heads");
  for (const Span& span : step->spans)
    TORCH_CHECK(span.row + span.width <= query.size(2), "more tokens were told than there are");
  const Look look{scale, softcap, window, own.chunk, true};
  const Tensor q = with_rows(query), k = with_rows(key), v = with_rows(value);
  const Tensor out = output_for(query, value);
  const Tensor sunk = sinks ? sinks->to(query.scalar_type()).contiguous() : Tensor();
  with_type_of(query, [&](auto kind) {
    using T = decltype(kind);
    write<T>(k, own.keys);
    write<T>(v, own.values);
    attend<T>(
        {rows_of<T>(q), rows_of_cache<T>(own.keys), rows_of_cache<T>(own.values),
         rows_of_output<T>(out), sinks ? sunk.const_data_ptr<T>() : nullptr, k.size(1),
         q.size(1) / k.size(1), look, own.temperature, step->spans});
  });
  return out;
}

// The same of rows that are kept apart, sequences of `lengths` tokens one after another, which see
// each other both ways unless causal.
Tensor packed_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
    double scale, int64_t window, bool causal) {
  check(query, key, value);
  const Tensor q = with_rows(query), k = with_rows(key), v = with_rows(value);
  const Tensor out = output_for(query, value);
  std::vector<Span> spans;
  int64_t row = 0;
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < lengths.numel(); row += length[n++])
    spans.push_back({row, length[n], 0, nullptr, row});
  TORCH_CHECK(row == q.size(2), "sequences of ", row, " tokens in ", q.size(2), " rows");
  with_type_of(query, [&](auto kind) {
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
  m.def(
      "packed_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, "
      "int window, bool causal) -> Tensor",
      &packed_attention);
}
