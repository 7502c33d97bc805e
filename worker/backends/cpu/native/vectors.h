// Vectors of 16 numbers, and the functions of them that attention needs. They are the compilers' own
// vector types (GCC, Clang), compiled to the registers that the CPU has.

#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// Words of a register: products keep their sums in such vectors, since compilers divide larger ones badly.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef uint32_t Line __attribute__((vector_size(4 * WIDTH)));
typedef float Sums __attribute__((vector_size(4 * WIDTH)));

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float LOG2_E = 1.44269504f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The 16-bit type of a cache, and the type that products take a T as.
using Half = c10::BFloat16;
#if defined(__AVX512BF16__)
template <typename T>
using Operand = T;
#else
template <typename T>
using Operand = float;
#endif
template <typename T>
constexpr int64_t PER_WORD = 4 / sizeof(T);
// Depths of products are multiples of this.
template <typename T>
constexpr int64_t STEP = LANES * PER_WORD<T>;

inline int64_t rounded_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

template <typename V>
inline V load(const void* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <typename V>
inline void store(void* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// Loads `count` numbers, padded with zeros.
template <typename V, typename T>
inline V load_part(const T* from, int64_t count) {
  if (count >= int64_t(sizeof(V) / sizeof(T))) return load<V>(from);
  V vector{};
  if (count > 0) std::memcpy(&vector, from, count * sizeof(T));
  return vector;
}

inline Floats floats(Words bits) { return load<Floats>(&bits); }
inline Words words(Halves halves) { return __builtin_convertvector(halves, Words); }

inline Floats load_floats(const float* from, int64_t count) {
  return load_part<Floats>(from, count);
}
inline Floats load_floats(const Half* from, int64_t count) {
  return floats(words(load_part<Halves>(from, count)) << 16);
}

inline void store_floats(float* to, Floats x) { store(to, x); }
inline void store_floats(Half* to, Floats x) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)x));
#else
  for (int64_t lane = 0; lane < LANES; ++lane) to[lane] = x[lane];
#endif
}

// Stores the first `count` numbers.
template <typename T>
inline void store_floats(T* to, Floats x, int64_t count) {
  if (count >= LANES) return store_floats(to, x);
  T converted[LANES];
  store_floats(converted, x);
  if (count > 0) std::copy_n(converted, count, to);
}

template <int S, int... J>
inline Floats rotated(Floats x, std::integer_sequence<int, J...>) {
  return __builtin_shufflevector(x, x, ((J + S) % LANES)...);
}

// Reduces all lanes by `join`: each with the lane S away, for S = 8, 4, 2, 1.
template <int S = LANES / 2, typename Join>
inline float reduced(Floats x, const Join& join) {
  const Floats joined = join(x, rotated<S>(x, std::make_integer_sequence<int, LANES>()));
  if constexpr (S == 1)
    return joined[0];
  else
    return reduced<S / 2>(joined, join);
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline float maximum(Floats x) {
  return reduced(x, [](Floats a, Floats b) { return maximum(a, b); });
}
inline float sum(Floats x) {
  return reduced(x, [](Floats a, Floats b) { return a + b; });
}

// 2 to the power of x, for x up to 0, within a relative error of 2e-7: an integer power of 2 times
// the Taylor polynomial of 2^r for the rest r.
inline Floats power_of_2(Floats x) {
  const Ints whole = __builtin_convertvector(x - 0.5f, Ints);
  const Floats r = x - __builtin_convertvector(whole, Floats);
  Floats p = r * 1.5403530e-4f + 1.3333558e-3f;  // ln(2)^n / n!
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  const Floats power = p * floats(((Words)whole + 127u) << 23);
  return x < -126.0f ? Floats{} : power;
}

// cap · tanh(x / cap)
inline Floats capped(Floats x, float cap) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats t = power_of_2(size * (-2.0f * LOG2_E / cap));
  const Floats y = cap * (1.0f - t) / (1.0f + t);
  return x < 0.0f ? -y : y;
}

}  // namespace
