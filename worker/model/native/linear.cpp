// Linear layers with few rows, as decoding has them: the weights are read once, from where oneDNN has
// packed them for its own products: in groups of 32 or 64 columns, line after line, a line having two
// rows of a bfloat16 matrix. How wide they are, whoever calls this finds by comparing products.

namespace {

constexpr int64_t FEW_ROWS = 32;  // what one reading serves
constexpr int64_t AHEAD_BYTES = 8192;

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
  if (rows < 1 || rows > FEW_ROWS) return packed_product(x, packed, bias);
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
