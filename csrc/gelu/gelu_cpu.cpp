// GELU that keeps its output and 1 or 4 bits per element; the method is described in tempo/gelu.py and fit_tables.py.
#include "common/simd.h"
#include "gelu/gelu.h"
#include "gelu/gelu_tables.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

constexpr int kVectorsPerTile = (int)kGeluTile / kLanes;

template <int N>
TEMPO_INLINE vfloat polynomial(const float (&c)[N], vfloat x) {
  vfloat result = splat(c[N - 1]);
  for (int k = N - 2; k >= 0; --k) result = result * x + c[k];
  return result;
}

template <int N>
TEMPO_INLINE vfloat polynomial(const float (&c)[N][8], vint piece, vfloat x) {
  vfloat result = lookup(c[N - 1], piece);
  for (int k = N - 2; k >= 0; --k) result = result * x + lookup(c[k], piece);
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

template <bool kTanh, bool kSlope>
TEMPO_INLINE Left left_of(vfloat a, const GeluTables& tables) {
  vint piece = truncate(a * (1.0f / kForwardWidth)) & 7;
  vfloat u = a - lookup(tables.forward_center, piece);
  Left result = {};
  vfloat h = polynomial(tables.forward_c, piece, u) * u + lookup(tables.forward_constant_low, piece);
  result.h = lookup(tables.forward_constant, piece) + h;
  if (kSlope) result.slope = polynomial(tables.derivative_c, piece, u);
  vint in_tail = ~(a < 8.0f * kForwardWidth);  // NaN too
  if (__builtin_expect(bits_of(in_tail) != 0, 0)) {
    Left tail = left_tail<kTanh, kSlope>(a);
    result.h = in_tail ? tail.h : result.h;
    if (kSlope) result.slope = in_tail ? tail.slope : result.slope;
  }
  return result;
}

template <bool kTanh>
TEMPO_INLINE vfloat forward(vfloat x, const GeluTables& tables) {
  vfloat h = left_of<kTanh, false>(absolute(x), tables).h;
  vint negative = (vint)x < 0;
  return negative ? -h : x - h;
}

// y - y_min, at least 0: y_min as two floats makes the difference exact near it.
TEMPO_INLINE vfloat depth(vfloat y, const GeluTables& tables) {
  vfloat d = (y - tables.y_min_high) - tables.y_min_low;
  return max_of(d, vfloat{});
}

// The ends, in t, of the interval of values that round to the bfloat16 value y.
TEMPO_INLINE void cell_in_t(vfloat y, const GeluTables& tables, vfloat& low, vfloat& width) {
  vint exponent = ((vint)y >> 23) & 255;
  vint half_spacing = exponent > 8 ? exponent - 8 : splat(1);  // bfloat16 has 8 significant bits
  vfloat half = (vfloat)(half_spacing << 23);
  low = square_root(depth(y - half, tables));
  width = square_root(depth(y + half, tables)) - low;
}

// Which eighth of the cell, in t, holds the unrounded value: 0 .. 7.
TEMPO_INLINE vint place_in_cell(vfloat exact, vfloat y, const GeluTables& tables) {
  vfloat low, width;
  cell_in_t(y, tables, low, width);
  vfloat t = square_root(depth(exact, tables));
  vfloat place = (t - low) / max_of(width, splat(1e-30f)) * 8.0f;
  place = max_of(place, vfloat{});
  return truncate(min_of(place, splat(7.0f)));
}

// The low nibbles of eight bytes, next to each other.
TEMPO_INLINE uint64_t squeeze(const uint8_t* bytes) {
  uint64_t x;
  memcpy(&x, bytes, sizeof x);
  x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0xffffffffull;
}

template <class T, bool kTanh, int kSideBits, bool kWhole>
TEMPO_INLINE void forward_tile(const T* x, T* y, uint8_t* side, const GeluTables& tables, int count) {
  constexpr bool kPlaces = kSideBits == 4 && sizeof(T) == 2;
  uint32_t side_mask = 0;
  uint8_t fields[kGeluTile];
  for (int v = 0; v < kVectorsPerTile; ++v) {
    vfloat input = load(x + v * kLanes, Whole{});
    vfloat exact = forward<kTanh>(input, tables);
    store(y + v * kLanes, exact, Whole{});
    vint is_right = ~(input < tables.x_min);
    if (kSideBits == 1) {
      side_mask |= bits_of(is_right) << (v * kLanes);
    } else {
      vint field = is_right & 8;
      if (kPlaces) field |= place_in_cell(exact, as_stored(exact, x), tables);
      vbyte bytes = __builtin_convertvector(field, vbyte);
      memcpy(fields + v * kLanes, &bytes, sizeof bytes);
    }
  }
  uint64_t packed = kSideBits == 1 ? side_mask : squeeze(fields) | squeeze(fields + 8) << 32;
  if (kWhole) {
    memcpy(side, &packed, kSideBits * kGeluTile / 8);
  } else {  // bits past the last element are 0
    packed &= ~0ull >> (64 - kSideBits * count);
    memcpy(side, &packed, (size_t)(kSideBits * count + 7) / 8);
  }
}

template <class T, bool kTanh, int kSideBits>
void forward_range(const T* x, T* y, uint8_t* side, int64_t begin, int64_t end) {
  const GeluTables& tables = kTanh ? kTanhTables : kErfTables;
  int64_t i = begin;
  for (; i + kGeluTile <= end; i += kGeluTile)
    forward_tile<T, kTanh, kSideBits, true>(x + i, y + i, side + i * kSideBits / 8, tables, (int)kGeluTile);
  if (i < end) {
    int count = (int)(end - i);
    T padded[kGeluTile] = {}, result[kGeluTile];
    memcpy(padded, x + i, sizeof(T) * (size_t)count);
    forward_tile<T, kTanh, kSideBits, false>(padded, result, side + i * kSideBits / 8, tables, count);
    memcpy(y + i, result, sizeof(T) * (size_t)count);
  }
}

// log2(x) for normal positive x.
TEMPO_INLINE vfloat log2_of(vfloat x) {
  vint bits = (vint)x - 0x3f3504f3;  // sqrt(1/2)
  vfloat exponent = to_float(bits >> 23);
  vfloat f = (vfloat)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  return polynomial(kLog2, f) * f + exponent;
}

// GELU' from y, its t, and which side of the minimum x lay on.
TEMPO_INLINE vfloat derivative(vfloat y, vfloat t, vint is_right, const GeluTables& tables) {
  vint right_piece = truncate(min_of(t, splat(kRightEnd)) * (1.0f / kRightWidth));
  right_piece = right_piece > 4 ? splat(4) : right_piece;
  vint is_far = ~is_right & (t > kLeftSplit);
  // Computed for all: in most vectors some lane is far on the left, and whether one is cannot be predicted. Past kLeftLimit in
  // q the derivative is below float's reach; the bound also keeps zeros out of the logarithm.
  vfloat magnitude = max_of(-y, splat(5.2e-9f));
  vfloat q = square_root(max_of(tables.log2_depth - log2_of(magnitude), vfloat{}));
  vint piece = is_right ? right_piece : is_far ? splat(6) : splat(5);
  vfloat variable = is_far ? q : t, factor = is_far ? min_of(y, vfloat{}) : t;
  vfloat u = min_of(variable, splat(kLeftLimit)) - lookup(tables.backward_center, piece);
  vfloat result = polynomial(tables.backward_c, piece, u) * factor;
  result = (is_right & (t >= kRightEnd)) ? splat(1.0f) : result;
  return y == y ? result : y;
}

TEMPO_INLINE uint64_t load_side(const uint8_t* side, int bytes) {
  uint64_t packed = 0;
  memcpy(&packed, side, (size_t)bytes);
  return packed;
}

TEMPO_INLINE vint nibbles_of(uint64_t packed, int vector) {
  vint fields;
#if defined(__AVX512F__)
  (void)vector;
  vint low = splat((int32_t)(uint32_t)packed), high = splat((int32_t)(uint32_t)(packed >> 32));
  vint lanes = lane_numbers();
  fields = (lanes < 8 ? low : high) >> ((lanes & 7) * 4);
#else
  fields = splat((int32_t)(uint32_t)(packed >> (vector * kLanes * 4))) >> (lane_numbers() * 4);
#endif
  return fields & 15;
}

// kStream: dx lies where `stream` can store.
template <class T, int kSideBits, bool kStream>
TEMPO_INLINE void backward_tile(const T* grad, const T* y, uint64_t packed, T* dx, const GeluTables& tables) {
  for (int v = 0; v < kVectorsPerTile; ++v) {
    vfloat output = load(y + v * kLanes, Whole{});
    vfloat t = square_root(depth(output, tables));
    vint is_right;
    if (kSideBits == 1) {
      is_right = mask_of((uint32_t)(packed >> (v * kLanes)));
    } else {
      vint field = nibbles_of(packed, v);
      is_right = (field & 8) != 0;
      if (sizeof(T) == 2) {
        vfloat low, width;
        cell_in_t(output, tables, low, width);
        vfloat refined = low + (to_float(field & 7) + 0.5f) * 0.125f * width;
        // Where y is huge or next to 0 the cell has no width that matters.
        vint near = (absolute(output) < 8.0f) & (absolute(output) > 0.001f);
        t = near ? refined : t;
        output = near ? tables.y_min_high + (refined * refined + tables.y_min_low) : output;
      }
    }
    vfloat result = load(grad + v * kLanes, Whole{}) * derivative(output, t, is_right, tables);
    if (kStream)
      stream(dx + v * kLanes, result);
    else
      store(dx + v * kLanes, result, Whole{});
  }
}

template <class T, int kSideBits, bool kStream>
void backward_range(const T* grad, const T* y, const uint8_t* side, T* dx, const GeluForm& form, int64_t begin, int64_t end) {
  const GeluTables& tables = form.tanh_form ? kTanhTables : kErfTables;
  constexpr int kTileBytes = kSideBits * (int)kGeluTile / 8;
  int64_t i = begin;
  for (; i + kGeluTile <= end; i += kGeluTile)
    backward_tile<T, kSideBits, kStream>(grad + i, y + i, load_side(side + i * kSideBits / 8, kTileBytes), dx + i, tables);
  if (kStream) finish_streaming();
  if (i < end) {
    int count = (int)(end - i);
    T padded_grad[kGeluTile] = {}, padded_y[kGeluTile] = {}, result[kGeluTile];
    memcpy(padded_grad, grad + i, sizeof(T) * (size_t)count);
    memcpy(padded_y, y + i, sizeof(T) * (size_t)count);
    uint64_t packed = load_side(side + i * kSideBits / 8, (kSideBits * count + 7) / 8);
    backward_tile<T, kSideBits, false>(padded_grad, padded_y, packed, result, tables);
    memcpy(dx + i, result, sizeof(T) * (size_t)count);
  }
}

// dx over grad, y over x, or elsewhere.
template <class T, bool kTanh>
void recompute_range(const T* grad, const T* x, T* dx, T* y, int64_t begin, int64_t end) {
  const GeluTables& tables = kTanh ? kTanhTables : kErfTables;
  in_vectors(end - begin, [&](int64_t i, auto part) {
    vfloat input = load(x + begin + i, part), g = load(grad + begin + i, part);
    Left left = left_of<kTanh, true>(absolute(input), tables);
    vint negative = (vint)input < 0;
    vfloat derivative = negative ? left.slope : 1.0f - left.slope;
    derivative = input == input ? derivative : input;
    store(dx + begin + i, g * derivative, part);
    store(y + begin + i, negative ? -left.h : input - left.h, part);
  });
}

template <class T>
void forward_of(const T* x, T* y, uint8_t* side, const GeluForm& form, int64_t begin, int64_t end) {
  if (form.tanh_form) {
    if (form.side_bits == 1)
      forward_range<T, true, 1>(x, y, side, begin, end);
    else
      forward_range<T, true, 4>(x, y, side, begin, end);
  } else {
    if (form.side_bits == 1)
      forward_range<T, false, 1>(x, y, side, begin, end);
    else
      forward_range<T, false, 4>(x, y, side, begin, end);
  }
}

template <class T>
void backward_of(const T* grad, const T* y, const uint8_t* side, T* dx, const GeluForm& form, int64_t begin, int64_t end) {
  const bool streams = form.streaming && (uintptr_t)dx % (sizeof(T) * kLanes) == 0;
  if (form.side_bits == 1) {
    auto* range = streams ? &backward_range<T, 1, true> : &backward_range<T, 1, false>;
    range(grad, y, side, dx, form, begin, end);
  } else {
    auto* range = streams ? &backward_range<T, 4, true> : &backward_range<T, 4, false>;
    range(grad, y, side, dx, form, begin, end);
  }
}

}  // namespace

void gelu_forward(int dtype, const void* x, void* y, uint8_t* side, const GeluForm& form, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    forward_of((const float*)x, (float*)y, side, form, begin, end);
  else
    forward_of((const bfloat16*)x, (bfloat16*)y, side, form, begin, end);
}

void gelu_backward(int dtype, const void* grad, const void* y, const uint8_t* side, void* dx, const GeluForm& form,
                   int64_t begin, int64_t end) {
  if (dtype == kFloat)
    backward_of((const float*)grad, (const float*)y, side, (float*)dx, form, begin, end);
  else
    backward_of((const bfloat16*)grad, (const bfloat16*)y, side, (bfloat16*)dx, form, begin, end);
}

void gelu_recompute_backward(int dtype, const void* grad, const void* x, void* dx, void* y, bool tanh_form, int64_t begin,
                             int64_t end) {
  if (dtype == kFloat) {
    auto* range = tanh_form ? &recompute_range<float, true> : &recompute_range<float, false>;
    range((const float*)grad, (const float*)x, (float*)dx, (float*)y, begin, end);
  } else {
    auto* range = tanh_form ? &recompute_range<bfloat16, true> : &recompute_range<bfloat16, false>;
    range((const bfloat16*)grad, (const bfloat16*)x, (bfloat16*)dx, (bfloat16*)y, begin, end);
  }
}

}  // namespace TEMPO_ISA
}  // namespace tempo
