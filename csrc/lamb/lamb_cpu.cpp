// The LAMB step on vectors; see tempo/lamb.py.
#include "common/simd.h"
#include "lamb/lamb.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

typedef double vdouble __attribute__((vector_size(4 * kLanes)));

TEMPO_INLINE vdouble low_half(vfloat x) {
#if defined(__AVX512F__)
  return (vdouble)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
#elif defined(__AVX2__)
  return (vdouble)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
#elif defined(TEMPO_SSE2)
  return (vdouble)_mm_cvtps_pd((__m128)x);
#else
  vdouble r;
  for (int i = 0; i < kWideLanes; ++i) r[i] = x[i];
  return r;
#endif
}

TEMPO_INLINE vdouble high_half(vfloat x) {
#if defined(__AVX512F__)
  return (vdouble)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#elif defined(__AVX2__)
  return (vdouble)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#elif defined(TEMPO_SSE2)
  return (vdouble)_mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x));
#else
  vdouble r;
  for (int i = 0; i < kWideLanes; ++i) r[i] = x[kWideLanes + i];
  return r;
#endif
}

// A sum of squares in double: neither range nor rounding of float matters then, and memory is slower all the same.
struct SquareSum {
  vdouble low = {}, high = {};
  TEMPO_INLINE void add(vfloat x) {
    vdouble a = low_half(x), b = high_half(x);
    low += a * a;
    high += b * b;
  }
  TEMPO_INLINE double total() const {
    vdouble both = low + high;
    double sum = 0.0;
    for (int i = 0; i < kWideLanes; ++i) sum += both[i];
    return sum;
  }
};

// u of a vector whose w is given; its new m and v are stored first where kNew.
template <bool kNew, class Part>
TEMPO_INLINE vfloat update(const LambTensor& tensor, const LambFactors& f, int64_t i, vfloat w, Part part) {
  vfloat m = load(tensor.exp_avg + i, part), v = load(tensor.exp_avg_sq + i, part);
  if (kNew) {
    vfloat g = load((const float*)tensor.grad + i, part) * f.gradient;
    m += (g - m) * f.avg_rate;
    v = v * f.sq_decay + g * g * f.sq_rate;
    store(tensor.exp_avg + i, m, part);
    store(tensor.exp_avg_sq + i, v, part);
  }
  return m * f.avg_scale / (square_root(v * f.sq_scale) + f.eps) + w * f.weight_decay;
}

template <bool kNew>
void write_weights(const LambTensor& tensor, const LambFactors& factors, float rate, int64_t begin, int64_t end) {
  const LambTensor t = tensor;  // a copy, which no store can change
  const LambFactors f = factors;
  in_vectors(end - begin, [&](int64_t offset, auto part) {
    const int64_t i = begin + offset;
    vfloat w = load(t.param + i, part);
    w -= update<kNew>(t, f, i, w, part) * rate;
    store(t.param + i, w, part);
    if (t.copy != nullptr) store((bfloat16*)t.copy + i, w, part);
  });
}

}  // namespace

LambSums lamb_moments(const LambTensor& tensor, const LambFactors& factors, int64_t begin, int64_t end) {
  const LambTensor t = tensor;
  const LambFactors f = factors;
  SquareSum weight, change;
  in_vectors(end - begin, [&](int64_t offset, auto part) {
    const int64_t i = begin + offset;
    vfloat w = load(t.param + i, part);
    weight.add(w);
    // With eps 0, lanes beyond the end would be 0 / 0.
    change.add(only(update<true>(t, f, i, w, part), part));
  });
  return {weight.total(), change.total()};
}

void lamb_weights(const LambTensor& tensor, const LambFactors& factors, float rate, int64_t begin, int64_t end) {
  write_weights<false>(tensor, factors, rate, begin, end);
}

void lamb_all(const LambTensor& tensor, const LambFactors& factors, float rate, int64_t begin, int64_t end) {
  write_weights<true>(tensor, factors, rate, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
