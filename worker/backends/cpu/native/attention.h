// Attention of all spans of a step. Threads take tiles one after another. Where there are fewer tiles
// than threads, tiles are split at multiples of TILE_KEYS and their sums merged at the end, as in
// Dao et al., "Flash-Decoding", 2023.

#pragma once

#include "attention_tile.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <memory>

namespace {

// Merges the sums of `count` parts of the same tokens and head into their output.
template <typename T>
void merge(const Attention<T>& attention, const Part* parts, int64_t count) {
  const int64_t size = rounded_up(attention.values.size, LANES);
  const int64_t rows = (parts->end - parts->begin) * attention.group;
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = parts->sums + row * (2 + size);
    for (int64_t n = 1; n < count; ++n) {
      const float* more = parts[n].sums + row * (2 + size);
      if (more[1] != 0) add_sums(sums, more[0], more[1], more + 2, size);
    }
    store_output(attention, *parts, row, sums);
  }
}

// The parts of a layer's attention, roughly the longest first.
template <typename T>
std::vector<Part> parts_of(const Attention<T>& attention) {
  std::vector<Part> parts;
  const int64_t tokens = std::max<int64_t>(1, TILE_ROWS / attention.group);
  for (const Span& span : attention.spans)
    for (int64_t end = span.width; end > 0; end -= tokens)
      for (int64_t head = 0; head < attention.key_heads; ++head) {
        const int64_t begin = std::max<int64_t>(0, end - tokens);
        const int64_t first = attention.mask.first(span.start + begin) / KEY_STEP * KEY_STEP;
        const int64_t last = attention.mask.last(span.start + end - 1, span.length());
        parts.push_back({&span, head, begin, end, first, last});
      }
  return parts;
}

// Splits parts at multiples of TILE_KEYS. Parts of the same tokens stay adjacent.
std::vector<Part> split(const std::vector<Part>& whole) {
  std::vector<Part> parts;
  for (Part part : whole)
    for (const int64_t last = part.last; part.first < last; part.first = part.last) {
      part.last = std::min(last, (part.first / TILE_KEYS + 1) * TILE_KEYS);
      parts.push_back(part);
    }
  return parts;
}

template <typename T>
void attend(const Attention<T>& attention, const std::vector<Part>& parts) {
  const int64_t count = parts.size(), threads = std::min<int64_t>(count, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t n; (n = next++) < count;)
      Tile<T>(attention, parts[n], n + threads < count ? &parts[n + threads] : nullptr).attend();
  });
}

template <typename T>
void attend(const Attention<T>& attention) {
  const std::vector<Part> whole = parts_of(attention);
  const int64_t threads = at::get_num_threads(), count = whole.size();
  if (!count) return;
  if (count * 2 > threads) return attend(attention, whole);
  std::vector<Part> parts = split(whole);
  const int64_t stride = 2 + rounded_up(attention.values.size, LANES);
  int64_t size = 0;
  for (const Part& part : parts) size += (part.end - part.begin) * attention.group * stride;
  const std::unique_ptr<float[]> sums(new float[size]);
  float* free = sums.get();
  for (Part& part : parts) {
    part.sums = free;
    free += (part.end - part.begin) * attention.group * stride;
  }
  attend(attention, parts);
  for (size_t n = 0, end; n < parts.size(); n = end) {
    const Part& part = parts[n];
    for (end = n + 1; end < parts.size(); ++end)
      if (parts[end].span != part.span || parts[end].head != part.head ||
          parts[end].begin != part.begin)
        break;
    merge(attention, &part, end - n);
  }
}

}  // namespace
