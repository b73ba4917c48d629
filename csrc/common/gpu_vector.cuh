// Eight neighbouring elements of float, half or bfloat16, moved in 16-byte accesses, and computed with as floats.
#pragma once
#include "common/gpu.h"

namespace tempo {
namespace cuda {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) { return v; }
template <>
__device__ inline __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// As loaded, not yet unpacked: a row that is fetched ahead takes no more registers than it has bytes.
template <class T>
struct Packed {
  uint4 words[sizeof(T) * kVector / 16];
};

template <class T>
__device__ inline Packed<T> load_packed(const T* p) {
  Packed<T> v;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) * kVector / 16); ++i) v.words[i] = reinterpret_cast<const uint4*>(p)[i];
  return v;
}

template <class T>
__device__ inline void store_packed(T* p, const Packed<T>& v) {
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) * kVector / 16); ++i) reinterpret_cast<uint4*>(p)[i] = v.words[i];
}

__device__ inline float2 pair_of(uint32_t bits, const __half*) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &bits, sizeof bits);
  return __half22float2(pair);
}
__device__ inline float2 pair_of(uint32_t bits, const __nv_bfloat16*) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ inline uint32_t bits_of(float a, float b, const __half*) {
  const __half2 pair = __floats2half2_rn(a, b);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
__device__ inline uint32_t bits_of(float a, float b, const __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

__device__ inline void unpack_word(uint4 w, float* v, const float*) {
  v[0] = __uint_as_float(w.x), v[1] = __uint_as_float(w.y), v[2] = __uint_as_float(w.z), v[3] = __uint_as_float(w.w);
}
template <class T>
__device__ inline void unpack_word(uint4 w, float* v, const T* tag) {
  const float2 a = pair_of(w.x, tag), b = pair_of(w.y, tag), c = pair_of(w.z, tag), d = pair_of(w.w, tag);
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
}
__device__ inline uint4 pack_word(const float* v, const float*) {
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
template <class T>
__device__ inline uint4 pack_word(const float* v, const T* tag) {
  return make_uint4(bits_of(v[0], v[1], tag), bits_of(v[2], v[3], tag), bits_of(v[4], v[5], tag), bits_of(v[6], v[7], tag));
}

template <class T>
__device__ inline void unpack(const Packed<T>& packed, float (&v)[kVector]) {
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) * kVector / 16); ++i)
    unpack_word(packed.words[i], v + i * 16 / (int)sizeof(T), static_cast<const T*>(nullptr));
}

template <class T>
__device__ inline Packed<T> pack(const float (&v)[kVector]) {
  Packed<T> packed;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) * kVector / 16); ++i)
    packed.words[i] = pack_word(v + i * 16 / (int)sizeof(T), static_cast<const T*>(nullptr));
  return packed;
}

template <class T>
__device__ inline void load8(const T* p, float (&v)[kVector]) {
  unpack(load_packed(p), v);
}

template <class T>
__device__ inline void store8(T* p, const float (&v)[kVector]) {
  store_packed(p, pack<T>(v));
}

// The first `count` of eight where fewer are left, or where `aligned` is false; the others read as 0.
template <class T>
__device__ inline void load8(const T* p, int64_t count, bool aligned, float (&v)[kVector]) {
  if (aligned && count >= kVector) {
    load8(p, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) v[i] = i < count ? to_float(p[i]) : 0.0f;
}

template <class T>
__device__ inline void store8(T* p, int64_t count, bool aligned, const float (&v)[kVector]) {
  if (aligned && count >= kVector) {
    store8(p, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (i < count) p[i] = from_float<T>(v[i]);
}

__device__ inline float load1(const Parameter& p, int64_t i) {
  if (p.dtype == kFloat) return static_cast<const float*>(p.data)[i];
  if (p.dtype == kHalf) return to_float(static_cast<const __half*>(p.data)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(p.data)[i]);
}

__device__ inline void load8(const Parameter& p, int64_t i, float (&v)[kVector]) {
  if (p.dtype == kFloat)
    load8(static_cast<const float*>(p.data) + i, v);
  else if (p.dtype == kHalf)
    load8(static_cast<const __half*>(p.data) + i, v);
  else
    load8(static_cast<const __nv_bfloat16*>(p.data) + i, v);
}

__device__ inline void store1(const ParameterGradient& p, int64_t i, float v) {
  if (p.dtype == kFloat)
    static_cast<float*>(p.data)[i] = v;
  else if (p.dtype == kHalf)
    static_cast<__half*>(p.data)[i] = from_float<__half>(v);
  else
    static_cast<__nv_bfloat16*>(p.data)[i] = from_float<__nv_bfloat16>(v);
}

}  // namespace cuda
}  // namespace tempo
