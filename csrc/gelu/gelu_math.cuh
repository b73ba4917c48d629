// GELU and its derivative for one element, from the input and from the output; the method is described in tempo/gelu.py.
#pragma once
#include "gelu/gelu_pieces.cuh"

namespace tempo {
namespace cuda {

// What lies on the left of 0, for a = |x|: GELU(-a) = -a * q. `slope` is a times the density of the form: GELU'(-a) = q - slope.
struct Tail {
  float q, slope;
};

// Past this, GELU(-a) is 0 in every type, and infinity times 0 must not appear.
constexpr float kFarLeft = 40.0f;

template <bool kHigh>
struct ErfForm : ErfPieces {
  __device__ static Tail tail(float a) {
    const float gauss = fast_exp2(a * a * -0.72134752f);  // exp(-a^2 / 2)
    const float slope = a * gauss * 0.39894228f;
    if (!kHigh) return {a < kLowTailEnd ? fast_exp2(-fmaf(a, NormalTail::low(a), 1.0f)) : 0.0f, slope};
    const float t = fast_reciprocal(fmaf(kTailScale, a, 1.0f));
    return {gauss * t * NormalTail::high(t), slope};
  }
};

template <bool kHigh>
struct TanhForm : TanhPieces {
  __device__ static Tail tail(float a) {
    constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 sqrt(2 / pi), and that times 0.044715
    const float square = a * a;
    const float e = fast_exp2(a * fmaf(square, -1.44269504f * kCubic, -1.44269504f * kLinear));
    const float s = fast_reciprocal(1.0f + e), q = e * s;
    return {q, a * s * q * fmaf(square, 3.0f * kCubic, kLinear)};
  }
};

// GELU(x) before rounding to the element type.
template <class Form, bool kHigh>
__device__ inline float gelu_of(float x, const Tail& tail) {
  const float a = fminf(fabsf(x), kFarLeft);
  float y = x < 0.0f ? -a * tail.q : fmaf(-a, tail.q, x);
  if (kHigh) {
    // The error of the derivative at the minimum is the square root of the error of y there.
    const float d = (x - Form::kXMinHigh) - Form::kXMinLow;
    if (fabsf(d) <= kNearMinimum) y = Form::kYMinHigh + fmaf(d * d, Form::near_minimum(d), Form::kYMinLow);
  }
  return y;
}

template <class Form, bool kHigh>
__device__ inline float gelu_of(float x) {
  return gelu_of<Form, kHigh>(x, Form::tail(fminf(fabsf(x), kFarLeft)));
}

__device__ inline float gelu_derivative_of_input(float x, const Tail& tail) {
  if (x != x) return x;
  return x < 0.0f ? tail.q - tail.slope : (1.0f - tail.q) + tail.slope;
}

// y - y_min, at least 0: y_min as two floats makes the difference exact near it.
template <class Form>
__device__ inline float depth(float y) {
  return fmaxf((y - Form::kYMinHigh) - Form::kYMinLow, 0.0f);
}

// sqrt(log2(y_min / y)), at most `limit`, past which the derivative is below float's reach.
template <class Form>
__device__ inline float left_distance(float log2_y, float limit) {
  return fast_sqrt(fminf(fmaxf(Form::kLog2Depth - log2_y, 0.0f), limit * limit));
}

template <class Form>
__device__ inline float derivative_low(float y, float t, bool is_right) {
  if (is_right) {
    t = fminf(t, 3.0f);
    const float gauss = fast_exp2(-(Form::kLowBeta * y) * y);
    return fmaf(gauss, fmaf(Form::low_right(t), t, Form::kLowK), 1.0f);
  }
  const float q = left_distance<Form>(fast_log2(-y), 4.8f);
  return y < 0.0f ? Form::low_left(q) * q * y : 0.0f;
}

template <class Form>
__device__ inline float derivative_high(float y, float t, bool is_right) {
  if (is_right) {
    if (t <= 1.2f) return Form::high_right_near(t) * t;
    return fmaf(fast_exp2(-(Form::kHighBeta * y) * y), Form::high_right_far(fminf(t, 3.0f)), 1.0f);
  }
  if (t <= 0.28f) return -Form::high_left_near(t) * t;
  return y < 0.0f ? Form::high_left_far(left_distance<Form>(fast_log2(-y), 5.0f)) * y : 0.0f;
}

template <class Form, bool kHigh>
__device__ inline float gelu_derivative(float y, float t, bool is_right) {
  if (y != y) return y;
  return kHigh ? derivative_high<Form>(y, t, is_right) : derivative_low<Form>(y, t, is_right);
}

// ---- 4 bits: the place of the unrounded value inside its rounding cell, in eighths of the cell's width in t ----

// Exponents, as float has them: half the spacing of values with y's exponent is 2^-kShift of it, at least 2^(kSmallest - 127).
template <class T>
struct Spacing;
template <>
struct Spacing<__nv_bfloat16> {
  static constexpr int kShift = 8, kSmallest = 1;
};
template <>
struct Spacing<__half> {
  static constexpr int kShift = 11, kSmallest = 102;
};

struct Cell {
  float low, width;  // in t
};

template <class Form, class T>
__device__ inline Cell cell_of(float y) {
  const int exponent = (int)(__float_as_uint(y) >> 23 & 255);
  const int half_spacing = max(exponent - Spacing<T>::kShift, Spacing<T>::kSmallest);
  const float half = __uint_as_float((uint32_t)half_spacing << 23);
  const float low = fast_sqrt(depth<Form>(y - half));
  return {low, fast_sqrt(depth<Form>(y + half)) - low};
}

template <class Form, class T>
__device__ inline uint32_t place_in_cell(float exact, float y) {
  const Cell cell = cell_of<Form, T>(y);
  const float place = (fast_sqrt(depth<Form>(exact)) - cell.low) * fast_reciprocal(fmaxf(cell.width, 1e-30f)) * 8.0f;
  return (uint32_t)fminf(fmaxf(place, 0.0f), 7.0f);
}

// The y and t in the middle of the eighth that `place` names. Where y is huge or next to 0 the cell has no width that matters.
template <class Form, class T>
__device__ inline void refine(float& y, float& t, uint32_t place) {
  const Cell cell = cell_of<Form, T>(y);
  const float refined = fmaf(((float)place + 0.5f) * 0.125f, cell.width, cell.low);
  if (fabsf(y) < 8.0f && fabsf(y) > 0.001f) {
    t = refined;
    y = Form::kYMinHigh + fmaf(refined, refined, Form::kYMinLow);
  }
}

}  // namespace cuda
}  // namespace tempo
