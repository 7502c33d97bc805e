// The segments of a step's packed row: which states of recurrent layers each reads and writes.

#pragma once

#include "tensors.h"

namespace {

constexpr int64_t NO_SLOT = -1;  // the state before the first token, zeros

struct Segment {
  int64_t offset, tokens;  // rows of the packed row
  int64_t source, target;  // slots of states
};

// Segments [S, 4] that cover disjoint parts of `rows` rows, grouped into chains: the segments of a
// sequence, each of which reads the state that the one before it writes.
class Segments {
 public:
  Segments(const Tensor& table, int64_t rows, int64_t slots) {
    TORCH_CHECK(
        table.dim() == 2 && table.size(1) == 4 && table.is_contiguous() &&
            table.scalar_type() == at::kLong,
        "segments ", table.sizes());
    first = reinterpret_cast<const Segment*>(table.const_data_ptr<int64_t>());
    int64_t row = 0, covered = 0;
    for (int64_t n = 0; n < table.size(0); ++n) {
      const Segment& s = first[n];
      TORCH_CHECK(
          s.offset >= row && s.tokens > 0 && s.offset + s.tokens <= rows, "tokens ", s.offset, " to ",
          s.offset + s.tokens, " of ", rows);
      TORCH_CHECK(
          NO_SLOT <= s.source && s.source < slots && 0 <= s.target && s.target < slots, "slots ",
          s.source, " and ", s.target, " of ", slots);
      row = s.offset + s.tokens;
      covered += s.tokens;
      if (!n || s.source == NO_SLOT || s.source != first[n - 1].target) begins.push_back(n);
    }
    chains = begins.size();
    covers = covered == rows;
    begins.push_back(table.size(0));
  }

  // Calls f(segment) for the segments of a chain, in order.
  template <typename F>
  void each(int64_t chain, const F& f) const {
    for (int64_t n = begins[chain]; n < begins[chain + 1]; ++n) f(first[n]);
  }

  // Calls f(segment) for all segments, in order.
  template <typename F>
  void each(const F& f) const {
    for (int64_t n = 0; n < begins.back(); ++n) f(first[n]);
  }

  // Returns a tensor for results: rows of no segment are zeros.
  Tensor results(at::IntArrayRef sizes, const at::TensorOptions& options) const {
    return covers ? at::empty(sizes, options) : at::zeros(sizes, options);
  }

  int64_t chains;

 private:
  const Segment* first;
  bool covers;  // all rows
  std::vector<int64_t> begins;
};

}  // namespace
