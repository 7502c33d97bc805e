// Linear layers with weights that oneDNN has packed. With few rows, as in decoding, the native product
// reads the weights once; more rows go to oneDNN. The layout: groups of 32 or 64 columns, each stored
// line after line; a line holds one row of a float32 matrix, or two of a bfloat16 matrix in pairs. The
// caller finds the width of the groups by comparing products.

namespace {

constexpr int64_t FEW_ROWS = 32;  // most rows of the native product
constexpr int64_t PREFETCH_BYTES = 8192;
constexpr int64_t MIN_ROW_STEP = 16;         // between padded row counts
constexpr int64_t MIN_COPIED_BYTES = 65536;  // per thread

// x [rows, depth], groups [columns / GROUP, depth / PER_WORD, GROUP, PER_WORD], out [rows, columns]
template <typename T, int64_t GROUP>
struct Linear {
  const T *x, *groups, *bias;
  T* out;
  int64_t rows, depth, columns;

  void multiply() const {
    at::parallel_for(0, (columns + GROUP - 1) / GROUP, 1, [this](int64_t begin, int64_t end) {
      multiply(begin, end);
    });
  }

  void multiply(int64_t begin, int64_t end) const {
    const Multiplier<T> multiplier(rows);
    alignas(64) float sums[FEW_ROWS * GROUP];
    for (int64_t group = begin; group < end; ++group) {
      const Product<T, GROUP, PREFETCH_BYTES> product{
          x, depth, groups + group * depth * GROUP, STEP<T>, sums, GROUP, depth, false};
      multiplier.multiply(product, rows, GROUP / LANES);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t lane = 0; lane < GROUP; lane += LANES)
          write(load<Floats>(sums + row * GROUP + lane), row, group * GROUP + lane);
    }
  }

  void write(Floats sums, int64_t row, int64_t column) const {
    const int64_t count = columns - column;
    if (bias) sums += load_floats(bias + column, count);
    store_floats(out + row * columns + column, sums, count);
  }
};

template <typename F>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

Tensor onednn_product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  static const auto product = find_op<Tensor(
      const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
      c10::List<std::optional<c10::Scalar>>, std::optional<std::string_view>)>(
      "mkldnn::_linear_pointwise");
  return product.call(x, packed, bias, "none", c10::List<std::optional<c10::Scalar>>(), "");
}

// Rounds up to one of eight row counts per power of two. oneDNN creates a kernel for each new count,
// which takes as long as the product of hundreds of rows.
int64_t padded_rows(int64_t rows) {
  int64_t step = MIN_ROW_STEP;
  while (step * 16 <= rows) step *= 2;
  return rounded_up(rows, step);
}

// The product by oneDNN, of x padded with rows of zeros.
Tensor multiply_many(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  const int64_t depth = x.size(-1), rows = x.numel() / depth, padded = padded_rows(rows);
  if (rows == padded) return onednn_product(x, packed, bias);
  const Tensor source = x.contiguous(), all = at::empty({padded, depth}, x.options());
  const int64_t bytes = depth * x.element_size();
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(all.mutable_data_ptr());
  at::parallel_for(0, rows, MIN_COPIED_BYTES / bytes + 1, [=](int64_t begin, int64_t end) {
    std::memcpy(to + begin * bytes, from + begin * bytes, (end - begin) * bytes);
  });
  std::memset(to + rows * bytes, 0, (padded - rows) * bytes);
  auto sizes = x.sizes().vec();
  sizes.back() = packed.size(0);
  return onednn_product(all, packed, bias).narrow(0, 0, rows).view(sizes);
}

template <typename T, int64_t GROUP>
void multiply_few(const Tensor& x, const void* packed, const Tensor* bias, const Tensor& out) {
  Linear<T, GROUP>{
      x.const_data_ptr<T>(), static_cast<const T*>(packed),
      bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(),
      x.numel() / x.size(-1), x.size(-1), out.size(-1)}
      .multiply();
}

// Whether the CPU has instructions for T that make the native product as fast as oneDNN's.
#if defined(__AVX512F__)
template <typename T>
constexpr bool HAS_KERNEL = std::is_same_v<T, Operand<T>>;
#else
template <typename T>
constexpr bool HAS_KERNEL = false;
#endif

// The packed weights, after a check that groups of `width` columns fit their size.
const void* packed_data(const Tensor& packed, int64_t width, int64_t depth) {
  static const auto bytes_of = find_op<int64_t(const Tensor&)>("mkldnn::_nbytes");
  static const auto address_of = find_op<int64_t(const Tensor&)>("mkldnn::data_ptr");
  const int64_t bytes = rounded_up(packed.size(0), width) * depth * packed.element_size();
  TORCH_CHECK(bytes_of.call(packed) == bytes, "the weights have another layout");
  return reinterpret_cast<const void*>(address_of.call(packed));
}

// x [..., in], packed [out, in] of the same dtype in groups of `width` columns → [..., out]
Tensor packed_linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width) {
  const int64_t depth = packed.size(1), columns = packed.size(0);
  TORCH_CHECK(
      x.size(-1) == depth && x.scalar_type() == packed.scalar_type() &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "packed_linear of ", x.sizes(), " ", x.scalar_type(), " and weights ", packed.sizes(), " ",
      packed.scalar_type());
  const int64_t rows = depth ? x.numel() / depth : 0;
  if (rows < 1) return onednn_product(x, packed, bias);
  if (rows > FEW_ROWS) return multiply_many(x, packed, bias);
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const Tensor bias_row = bias ? bias->contiguous() : Tensor();
  dispatch(x, [&](auto kind) {
    using T = decltype(kind);
    TORCH_CHECK(
        HAS_KERNEL<T> && (width == 32 || width == 64), "no kernel for ", x.scalar_type(),
        " in groups of ", width, " columns");
    if constexpr (HAS_KERNEL<T>) {
      const int64_t missing = -depth & (STEP<T> - 1);  // the weights' padding is zeros
      const Tensor padded = missing ? at::constant_pad_nd(x, {0, missing}) : x.contiguous();
      const auto multiply = width == 32 ? multiply_few<T, 32> : multiply_few<T, 64>;
      multiply(padded, packed_data(packed, width, depth + missing), bias ? &bias_row : nullptr, out);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, MkldnnCPU, m) {
  m.impl("packed_linear", &packed_linear);
}
