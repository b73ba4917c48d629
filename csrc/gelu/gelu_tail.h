// What GELU's CPU kernels of all dtypes share: polynomials, and the far left, where GELU is an exponential.
#pragma once
#include "common/simd.h"
#include "gelu/gelu_tables.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

template <int N>
TEMPO_INLINE vfloat polynomial(const float (&c)[N], vfloat x) {
  vfloat result = splat(c[N - 1]);
  for (int k = N - 2; k >= 0; --k) result = result * x + c[k];
  return result;
}

// What lies on the left of 0: h(a) = -GELU(-a), and its derivative, which is GELU'(-a).
struct Left {
  vfloat h, slope;
};

// For a >= 3.
template <bool kTanh, bool kSlope>
__attribute__((noinline)) Left left_tail(vfloat a) {
  Left result = {};
  if (kTanh) {
    vfloat b = min_of(a, splat(20.0f));  // GELU(-20) is 0, and infinity times 0 must not appear
    vfloat e = exponential(b * (-1.5957691216f) - b * b * b * 0.0713548163f);
    vfloat s = 1.0f / (1.0f + e);
    result.h = a == a ? b * e * s : a;
    if (kSlope) result.slope = e * s * (1.0f - b * s * (1.5957691216f + b * b * (3.0f * 0.0713548163f)));
    return result;
  }
  vfloat b = min_of(a, splat(40.0f)), square = b * b, gauss = exponential(square * -0.5f);
  result.h = a == a ? gauss * polynomial(kErfTail, 1.0f / square) : a;
  if (kSlope) result.slope = result.h / b - b * gauss * 0.39894228f;
  return result;
}

}  // namespace
}  // namespace TEMPO_ISA
}  // namespace tempo
