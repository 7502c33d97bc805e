// What the operations need of torch: tensors, threads, the registration of operations.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "vectors.h"

namespace {

using at::Tensor;

// Calls run(T()) with the type of x's numbers.
template <typename Run>
void dispatch(const Tensor& x, const Run& run) {
  if (x.scalar_type() == at::kFloat) return run(float());
  TORCH_CHECK(
      x.scalar_type() == at::kBFloat16, "float32 or bfloat16 is expected, not ", x.scalar_type());
  run(Half());
}

}  // namespace
