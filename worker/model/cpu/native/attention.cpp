// Attention of all spans of a step, in tiles that threads take one after another. Where there are
// fewer tiles than threads, each is split along its keys and put together at the end.

#include <ATen/Parallel.h>

#include <atomic>

namespace {

// What was kept of the parts of some tokens and a head becomes their output.
template <typename T>
void put_together(const Attention<T>& of, const Part* parts, int64_t count) {
  const int64_t each = 2 + rounded_up(of.values.size, LANES);
  const int64_t rows = (parts->end - parts->begin) * of.group;
  std::vector<float> summed(of.values.size);
  for (int64_t row = 0; row < rows; ++row) {
    float peak = -INFINITE, total = 0;
    for (int64_t n = 0; n < count; ++n) peak = std::max(peak, parts[n].sums[row * each]);
    std::fill(summed.begin(), summed.end(), 0.0f);
    for (int64_t n = 0; n < count; ++n) {
      const float* sums = parts[n].sums + row * each;
      const float weight = std::exp2(sums[0] - peak);
      total += weight * sums[1];
      for (int64_t d = 0; d < of.values.size; ++d) summed[d] += weight * sums[2 + d];
    }
    T* to = of.out.at(
        parts->span->row + parts->begin + row / of.group, parts->head * of.group + row % of.group);
    for (int64_t d = 0; d < of.values.size; ++d) to[d] = summed[d] / total;
  }
}

// The work of a step's layer, the longest first, as far as that is known.
template <typename T>
std::vector<Part> parts_of(const Attention<T>& of) {
  std::vector<Part> made;
  const int64_t tokens = std::max<int64_t>(1, TILE_ROWS / of.group);
  for (const Span& span : of.spans)
    for (int64_t end = span.width; end > 0; end -= tokens)
      for (int64_t head = 0; head < of.key_heads; ++head) {
        const int64_t begin = std::max<int64_t>(0, end - tokens);
        const int64_t first = of.look.first(span.start + begin) / BLOCK * BLOCK;
        const int64_t last = of.look.last(span.start + end - 1, span.length());
        made.push_back({&span, head, begin, end, first, last});
      }
  return made;
}

// As many parts as there are threads, where keys suffice: all of some tokens one after another.
std::vector<Part> split(const std::vector<Part>& whole, int64_t threads) {
  std::vector<Part> made;
  const int64_t wanted = threads / int64_t(whole.size());
  for (Part part : whole) {
    const int64_t last = part.last;
    const int64_t count = std::clamp<int64_t>((last - part.first) / LEAST_KEYS, 1, wanted);
    const int64_t each = rounded_up((last - part.first + count - 1) / count, BLOCK);
    for (; part.first < last; part.first += each) {
      part.last = std::min(last, part.first + each);
      made.push_back(part);
    }
  }
  return made;
}

template <typename Run>
void in_parallel(int64_t count, const Run& run) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t n; (n = next++) < count;) run(n);
  });
}

template <typename T>
void attend(const Attention<T>& of) {
  const std::vector<Part> whole = parts_of(of);
  const int64_t threads = at::get_num_threads(), count = whole.size();
  if (!count) return;
  if (count * 2 > threads) {
    in_parallel(count, [&](int64_t n) { Tile<T>(of, whole[n]).attend(); });
    return;
  }
  std::vector<Part> parts = split(whole, threads);
  const int64_t each = 2 + rounded_up(of.values.size, LANES);
  int64_t room = 0;
  for (const Part& part : parts) room += (part.end - part.begin) * of.group * each;
  std::vector<float> sums(room);
  float* free = sums.data();
  for (Part& part : parts) {
    part.sums = free;
    free += (part.end - part.begin) * of.group * each;
  }
  in_parallel(parts.size(), [&](int64_t n) { Tile<T>(of, parts[n]).attend(); });
  for (size_t n = 0, end; n < parts.size(); n = end) {
    const Part& part = parts[n];
    for (end = n + 1; end < parts.size(); ++end)
      if (parts[end].span != part.span || parts[end].head != part.head ||
          parts[end].begin != part.begin)
        break;
    put_together(of, &part, end - n);
  }
}

}  // namespace
