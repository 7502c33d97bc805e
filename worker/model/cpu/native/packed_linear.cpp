// Linear layers with few rows, as decoding has them: the weights are read once, from where oneDNN has
// packed them for its own products: in groups of 32 or 64 columns, line after line, a line having two
// rows of a bfloat16 matrix. How wide they are, whoever calls this finds by comparing products.

namespace {

constexpr int64_t FEW_ROWS = 32;  // what one reading serves
constexpr int64_t AHEAD_BYTES = 8192;
constexpr int64_t LEAST_STEP = 16;       // between usual numbers of rows
constexpr int64_t COPIED_BYTES = 65536;  // by a thread, at least

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
      const Product<T, GROUP, AHEAD_BYTES> product{
          x, depth, groups + group * depth * GROUP, STEP<T>, sums, GROUP, depth, false};
      multiplier.multiply(product, rows, GROUP / LANES);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t lane = 0; lane < GROUP; lane += LANES)
          put(load<Floats>(sums + row * GROUP + lane), row, group * GROUP + lane);
    }
  }

  void put(Floats made, int64_t row, int64_t column) const {
    const int64_t left = columns - column;
    if (bias) made += load_floats(bias + column, left);
    store_floats(out + row * columns + column, made, left);
  }
};

template <typename F>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

Tensor packed_product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  static const auto product = operation<Tensor(
      const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
      c10::List<std::optional<c10::Scalar>>, std::optional<std::string_view>)>(
      "mkldnn::_linear_pointwise");
  return product.call(x, packed, bias, "none", c10::List<std::optional<c10::Scalar>>(), "");
}

// One of eight numbers in each doubling: for each that it has not seen oneDNN makes a kernel, which
// takes as long as the product of hundreds of rows.
int64_t usual_rows(int64_t rows) {
  int64_t step = LEAST_STEP;
  while (step * 16 <= rows) step *= 2;
  return rounded_up(rows, step);
}

// By oneDNN, with rows of zeros behind them to be a usual number.
Tensor multiply_many(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  const int64_t depth = x.size(-1), rows = x.numel() / depth, filled = usual_rows(rows);
  if (rows == filled) return packed_product(x, packed, bias);
  const Tensor given = x.contiguous(), all = at::empty({filled, depth}, x.options());
  const int64_t bytes = depth * x.element_size();
  const auto* from = static_cast<const char*>(given.const_data_ptr());
  auto* to = static_cast<char*>(all.mutable_data_ptr());
  at::parallel_for(0, rows, COPIED_BYTES / bytes + 1, [=](int64_t begin, int64_t end) {
    std::memcpy(to + begin * bytes, from + begin * bytes, (end - begin) * bytes);
  });
  std::memset(to + rows * bytes, 0, (filled - rows) * bytes);
  auto sizes = x.sizes().vec();
  sizes.back() = packed.size(0);
  return packed_product(all, packed, bias).narrow(0, 0, rows).view(sizes);
}

template <typename T, int64_t GROUP>
void multiply_few(const Tensor& x, const void* packed, const Tensor* bias, const Tensor& out) {
  Linear<T, GROUP>{
      x.const_data_ptr<T>(), static_cast<const T*>(packed),
      bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(),
      x.numel() / x.size(-1), x.size(-1), out.size(-1)}
      .multiply();
}

// What there are instructions for that are as quick as oneDNN's.
#if defined(__AVX512F__)
template <typename T>
constexpr bool HAS_KERNEL = std::is_same_v<T, Operand<T>>;
#else
template <typename T>
constexpr bool HAS_KERNEL = false;
#endif

// Where the weights are, if they may lie in groups so wide.
const void* groups_at(const Tensor& packed, int64_t width, int64_t depth) {
  static const auto bytes_of = operation<int64_t(const Tensor&)>("mkldnn::_nbytes");
  static const auto address_of = operation<int64_t(const Tensor&)>("mkldnn::data_ptr");
  const int64_t bytes = rounded_up(packed.size(0), width) * depth * packed.element_size();
  TORCH_CHECK(bytes_of.call(packed) == bytes, "weights are packed in another way");
  return reinterpret_cast<const void*>(address_of.call(packed));
}

// x [..., in], packed [out, in] of one type, in groups of `width` columns.
Tensor linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t width) {
  const int64_t depth = packed.size(1), columns = packed.size(0);
  TORCH_CHECK(
      x.size(-1) == depth && x.scalar_type() == packed.scalar_type() &&
          (!bias || (bias->numel() == columns && bias->scalar_type() == x.scalar_type())),
      "a product of ", x.sizes(), " ", x.scalar_type(), " with ", packed.sizes(), " ",
      packed.scalar_type());
  const int64_t rows = depth ? x.numel() / depth : 0;
  if (rows < 1) return packed_product(x, packed, bias);
  if (rows > FEW_ROWS) return multiply_many(x, packed, bias);
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  const Tensor out = at::empty(sizes, x.options());
  const Tensor added = bias ? bias->contiguous() : Tensor();
  with_type_of(x, [&](auto kind) {
    using T = decltype(kind);
    TORCH_CHECK(HAS_KERNEL<T> && (width == 32 || width == 64), "there is no such kernel");
    if constexpr (HAS_KERNEL<T>) {
      const int64_t missing = -depth & (STEP<T> - 1);  // weights there are zeros
      const Tensor given = missing ? at::constant_pad_nd(x, {0, missing}) : x.contiguous();
      const auto multiply = width == 32 ? multiply_few<T, 32> : multiply_few<T, 64>;
      multiply(given, groups_at(packed, width, depth + missing), bias ? &added : nullptr, out);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, MkldnnCPU, m) {
  m.impl("linear", &linear);
}
