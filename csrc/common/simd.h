// Vectors for the CPU kernels: GCC's vector extensions, and intrinsics for the few operations that those lack.
//
// A kernel file is compiled once per instruction set, with TEMPO_ISA naming the namespace. Everything here is in an anonymous
// namespace, and kernel files include no C++ standard header: a function that two objects share would be merged by the linker,
// and the surviving copy might use instructions that this CPU lacks.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

// TEMPO_PLAIN asks for the path of other processors, for tests.
#if defined(__x86_64__) && !defined(TEMPO_PLAIN)
#include <immintrin.h>
#define TEMPO_SSE2
#endif

namespace tempo {
namespace TEMPO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kWideLanes = kLanes / 2;

typedef float vfloat __attribute__((vector_size(4 * kLanes)));
typedef int32_t vint __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vuint __attribute__((vector_size(4 * kLanes)));
typedef uint64_t vwide __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vhalf __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vbyte __attribute__((vector_size(kLanes)));

struct bfloat16 {
  uint16_t bits;
};

#define TEMPO_INLINE inline __attribute__((always_inline))

// Keeps the sign of a zero, which adding 0 would not.
TEMPO_INLINE vfloat splat(float x) { return x - vfloat{}; }
TEMPO_INLINE vint splat(int32_t x) { return x - vint{}; }
TEMPO_INLINE vuint splat(uint32_t x) { return x - vuint{}; }

TEMPO_INLINE vint lane_numbers() {
  vint v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// b where either is NaN: a > b ? a : b, which gcc does not make one instruction of.
TEMPO_INLINE vfloat max_of(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(TEMPO_SSE2)
  return (vfloat)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

TEMPO_INLINE vfloat min_of(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(TEMPO_SSE2)
  return (vfloat)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}

TEMPO_INLINE vfloat absolute(vfloat a) { return (vfloat)((vint)a & 0x7fffffff); }

TEMPO_INLINE vfloat square_root(vfloat x) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vfloat)_mm256_sqrt_ps((__m256)x);
#elif defined(TEMPO_SSE2)
  return (vfloat)_mm_sqrt_ps((__m128)x);
#else
  vfloat r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_sqrtf(x[i]);
  return r;
#endif
}

// Towards zero; any number where x is NaN or does not fit.
TEMPO_INLINE vint truncate(vfloat x) {
#if defined(__AVX512F__)
  return (vint)_mm512_cvttps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vint)_mm256_cvttps_epi32((__m256)x);
#elif defined(TEMPO_SSE2)
  return (vint)_mm_cvttps_epi32((__m128)x);
#else
  vint r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fabsf(x[i]) < 2e9f ? (int32_t)x[i] : 0;
  return r;
#endif
}

TEMPO_INLINE vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }

// table[index], 0 <= index < 8.
TEMPO_INLINE vfloat lookup(const float* table, vint index) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_permutexvar_ps((__m512i)index, _mm512_castps256_ps512(_mm256_loadu_ps(table)));
#elif defined(__AVX2__)
  return (vfloat)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
#else
  vfloat r;
  for (int i = 0; i < kLanes; ++i) r[i] = table[index[i]];
  return r;
#endif
}

// Bit i = lane i of a comparison's result.
TEMPO_INLINE uint32_t bits_of(vint mask) {
#if defined(__AVX512F__)
  return (uint32_t)_mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(TEMPO_SSE2)
  return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

// The reverse of bits_of.
TEMPO_INLINE vint mask_of(uint32_t bits) {
  vint each;
  for (int i = 0; i < kLanes; ++i) each[i] = 1 << i;
  return (splat((int32_t)bits) & each) != 0;
}

// The product of the low 32 bits of every 64-bit lane with `factor`.
TEMPO_INLINE vwide multiply_low(vwide a, uint32_t factor) {
#if defined(__AVX512F__)
  return (vwide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64((long long)factor));
#elif defined(__AVX2__)
  return (vwide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((long long)factor));
#elif defined(TEMPO_SSE2)
  return (vwide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x((long long)factor));
#else
  return (a & 0xffffffffu) * (uint64_t)factor;
#endif
}

// ---- loads and stores: whole vectors, or the first `count` lanes (the others read as 0) ----

struct Whole {};
struct First {
  int count;
};

TEMPO_INLINE int count_of(Whole) { return kLanes; }
TEMPO_INLINE int count_of(First part) { return part.count; }

TEMPO_INLINE vfloat widen(vhalf bits) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
  return (vfloat)(__builtin_convertvector(bits, vuint) << 16);
#endif
}

// Round to nearest even; a NaN stays one.
TEMPO_INLINE vhalf narrow(vfloat x) {
  vuint bits = (vuint)x;
  vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vuint result = x == x ? rounded : splat(0x7fc0u);
#if defined(__AVX512F__)
  return (vhalf)_mm512_cvtepi32_epi16((__m512i)result);
#elif defined(__AVX2__)
  // The packing keeps the two 128-bit halves apart.
  __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
  return (vhalf)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(result, vhalf);
#endif
}

TEMPO_INLINE vfloat load(const float* p, Whole) {
  vfloat v;
  memcpy(&v, p, sizeof v);
  return v;
}
TEMPO_INLINE vfloat load(const float* p, First part) {
  vfloat v = {};
  memcpy(&v, p, sizeof(float) * (size_t)part.count);
  return v;
}
TEMPO_INLINE vfloat load(const bfloat16* p, Whole) {
  vhalf v;
  memcpy(&v, p, sizeof v);
  return widen(v);
}
TEMPO_INLINE vfloat load(const bfloat16* p, First part) {
  vhalf v = {};
  memcpy(&v, p, sizeof(bfloat16) * (size_t)part.count);
  return widen(v);
}
TEMPO_INLINE void store(float* p, vfloat v, Whole) { memcpy(p, &v, sizeof v); }
TEMPO_INLINE void store(float* p, vfloat v, First part) { memcpy(p, &v, sizeof(float) * (size_t)part.count); }
TEMPO_INLINE void store(bfloat16* p, vfloat v, Whole) {
  vhalf bits = narrow(v);
  memcpy(p, &bits, sizeof bits);
}
TEMPO_INLINE void store(bfloat16* p, vfloat v, First part) {
  vhalf bits = narrow(v);
  memcpy(p, &bits, sizeof(bfloat16) * (size_t)part.count);
}

// Stores past the caches, to an address that is a multiple of the vector's size: what is stored is not read from memory first.
// finish_streaming() must follow before another thread may read it.
TEMPO_INLINE void stream(float* p, vfloat v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(TEMPO_SSE2)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v, Whole{});
#endif
}
TEMPO_INLINE void stream(bfloat16* p, vfloat v) {
#if defined(__AVX512F__)
  _mm256_stream_si256((__m256i*)p, (__m256i)narrow(v));
#elif defined(__AVX2__)
  _mm_stream_si128((__m128i*)p, (__m128i)narrow(v));
#elif defined(TEMPO_SSE2)
  long long bits;
  vhalf halves = narrow(v);
  memcpy(&bits, &halves, sizeof bits);
  _mm_stream_si64((long long*)p, bits);
#else
  store(p, v, Whole{});
#endif
}
TEMPO_INLINE void finish_streaming() {
#if defined(TEMPO_SSE2)
  _mm_sfence();
#endif
}

// 0 in the lanes beyond `part`.
TEMPO_INLINE vfloat only(vfloat v, Whole) { return v; }
TEMPO_INLINE vfloat only(vfloat v, First part) { return lane_numbers() < part.count ? v : vfloat{}; }

TEMPO_INLINE float get(const float* p) { return *p; }
TEMPO_INLINE float get(const bfloat16* p) {
  uint32_t bits = (uint32_t)p->bits << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
TEMPO_INLINE void put(float* p, float x) { *p = x; }
TEMPO_INLINE void put(bfloat16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  p->bits = x == x ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : (uint16_t)0x7fc0;
}

// What the value becomes when stored in the element type, as a float.
TEMPO_INLINE vfloat as_stored(vfloat v, const float*) { return v; }
TEMPO_INLINE vfloat as_stored(vfloat v, const bfloat16*) { return widen(narrow(v)); }

// Calls f(start, Whole or First) over 0 .. count in vectors.
template <class F>
TEMPO_INLINE void in_vectors(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, Whole{});
  if (i < count) f(i, First{(int)(count - i)});
}

TEMPO_INLINE float sum_of(vfloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Of lanes that are not NaN.
TEMPO_INLINE float largest_of(vfloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
  return result;
#endif
}

// exp(x) to about 1 unit in the last place; 0 below -87.3 (no denormals), infinite above 88.7, NaN for NaN.
TEMPO_INLINE vfloat exponential(vfloat x) {
  vfloat clamped = min_of(splat(88.72f), max_of(splat(-87.33f), x));
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  vfloat shifted = clamped * 1.44269504f + 12582912.0f;
  vfloat n = shifted - 12582912.0f;
  vfloat r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  vfloat p = splat(1.98756915e-4f);
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345205e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666657e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two steps, as n = 128 has no float.
  vint whole = (vint)shifted - 0x4b400000;
  vint half = whole >> 1;
  vfloat result = p * (vfloat)((half + 127) << 23) * (vfloat)((whole - half + 127) << 23);
  result = x < -87.33f ? vfloat{} : result;
  result = x > 88.72f ? splat(__builtin_inff()) : result;
  return x == x ? result : x;
}

}  // namespace
}  // namespace TEMPO_ISA
}  // namespace tempo
