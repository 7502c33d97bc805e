// The product of linear.h with weights that oneDNN has packed.

#include "linear.h"

namespace {

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

template <typename T, int64_t GROUP>
void multiply_rows(const Tensor& x, const void* packed, const Tensor* bias, const Tensor& out) {
  Linear<T, GROUP>{
      x.const_data_ptr<T>(), {static_cast<const T*>(packed)},
      bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(),
      x.numel() / x.size(-1), x.size(-1), out.size(-1)}
      .multiply();
}

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
      const auto multiply = width == 32 ? multiply_rows<T, 32> : multiply_rows<T, 64>;
      multiply(padded, packed_data(packed, width, depth + missing), bias ? &bias_row : nullptr, out);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(onequeue, MkldnnCPU, m) {
  m.impl("packed_linear", &packed_linear);
}
