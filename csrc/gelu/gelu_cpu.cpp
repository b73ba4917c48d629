// GELU that keeps its output and 1 or 4 bits per element; the method is described in tempo/gelu.py and fit_tables.py.
#include "gelu/gelu.h"

#include "gelu/gelu_bfloat16.h"
#include "gelu/gelu_tables.h"
#include "gelu/gelu_tail.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

constexpr int kTile = 16, kVectorsPerTile = kTile / kLanes;

template <int N>
TEMPO_INLINE vfloat polynomial(const float (&c)[N][8], vint piece, vfloat x) {
  vfloat result = lookup(c[N - 1], piece);
  for (int k = N - 2; k >= 0; --k) result = result * x + lookup(c[k], piece);
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

// The low nibbles of eight bytes, next to each other.
TEMPO_INLINE uint64_t squeeze(const uint8_t* bytes) {
  uint64_t x;
  memcpy(&x, bytes, sizeof x);
  x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0xffffffffull;
}

template <bool kTanh, int kSideBits, bool kWhole>
TEMPO_INLINE void forward_tile(const float* x, float* y, uint8_t* side, const GeluTables& tables, int count) {
  uint32_t side_mask = 0;
  uint8_t fields[kTile];
  for (int v = 0; v < kVectorsPerTile; ++v) {
    vfloat input = load(x + v * kLanes, Whole{});
    store(y + v * kLanes, forward<kTanh>(input, tables), Whole{});
    vint is_right = ~(input < tables.x_min);
    if (kSideBits == 1) {
      side_mask |= bits_of(is_right) << (v * kLanes);
    } else {
      vbyte bytes = __builtin_convertvector(is_right & 8, vbyte);  // float has no use for the other three
      memcpy(fields + v * kLanes, &bytes, sizeof bytes);
    }
  }
  uint64_t packed = kSideBits == 1 ? side_mask : squeeze(fields) | squeeze(fields + 8) << 32;
  if (kWhole) {
    memcpy(side, &packed, kSideBits * kTile / 8);
  } else {  // bits past the last element are 0
    packed &= ~0ull >> (64 - kSideBits * count);
    memcpy(side, &packed, (size_t)(kSideBits * count + 7) / 8);
  }
}

template <bool kTanh, int kSideBits>
void forward_range(const float* x, float* y, uint8_t* side, int64_t begin, int64_t end) {
  const GeluTables& tables = kTanh ? kTanhTables : kErfTables;
  int64_t i = begin;
  for (; i + kTile <= end; i += kTile)
    forward_tile<kTanh, kSideBits, true>(x + i, y + i, side + i * kSideBits / 8, tables, kTile);
  if (i < end) {
    int count = (int)(end - i);
    float padded[kTile] = {}, result[kTile];
    memcpy(padded, x + i, sizeof(float) * (size_t)count);
    forward_tile<kTanh, kSideBits, false>(padded, result, side + i * kSideBits / 8, tables, count);
    memcpy(y + i, result, sizeof(float) * (size_t)count);
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
template <int kSideBits, bool kStream>
TEMPO_INLINE void backward_tile(const float* grad, const float* y, uint64_t packed, float* dx, const GeluTables& tables) {
  for (int v = 0; v < kVectorsPerTile; ++v) {
    vfloat output = load(y + v * kLanes, Whole{});
    vfloat t = square_root(depth(output, tables));
    vint is_right = kSideBits == 1 ? mask_of((uint32_t)(packed >> (v * kLanes))) : (nibbles_of(packed, v) & 8) != 0;
    vfloat result = load(grad + v * kLanes, Whole{}) * derivative(output, t, is_right, tables);
    if (kStream)
      stream(dx + v * kLanes, result);
    else
      store(dx + v * kLanes, result, Whole{});
  }
}

template <bool kTanh, int kSideBits, bool kStream>
void backward_range(const float* grad, const float* y, const uint8_t* side, float* dx, int64_t begin, int64_t end) {
  const GeluTables& tables = kTanh ? kTanhTables : kErfTables;
  constexpr int kTileBytes = kSideBits * kTile / 8;
  int64_t i = begin;
  for (; i + kTile <= end; i += kTile)
    backward_tile<kSideBits, kStream>(grad + i, y + i, load_side(side + i * kSideBits / 8, kTileBytes), dx + i, tables);
  if (kStream) finish_streaming();
  if (i < end) {
    int count = (int)(end - i);
    float padded_grad[kTile] = {}, padded_y[kTile] = {}, result[kTile];
    memcpy(padded_grad, grad + i, sizeof(float) * (size_t)count);
    memcpy(padded_y, y + i, sizeof(float) * (size_t)count);
    uint64_t packed = load_side(side + i * kSideBits / 8, (kSideBits * count + 7) / 8);
    backward_tile<kSideBits, false>(padded_grad, padded_y, packed, result, tables);
    memcpy(dx + i, result, sizeof(float) * (size_t)count);
  }
}

// dx over grad, y over x, or elsewhere.
template <bool kTanh>
void recompute_range(const float* grad, const float* x, float* dx, float* y, int64_t begin, int64_t end) {
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

// The overloads for float are here, those for bfloat16 in gelu_bfloat16.h.
template <class T>
void forward_of(const T* x, T* y, uint8_t* side, const GeluForm& form, int64_t begin, int64_t end) {
  typedef void (*Range)(const T*, T*, uint8_t*, int64_t, int64_t);
  const Range ranges[2][2] = {{&forward_range<false, 1>, &forward_range<false, 4>},
                              {&forward_range<true, 1>, &forward_range<true, 4>}};
  ranges[form.tanh_form][form.side_bits == 4](x, y, side, begin, end);
}

template <class T>
void backward_of(const T* grad, const T* y, const uint8_t* side, T* dx, const GeluForm& form, int64_t begin, int64_t end) {
  typedef void (*Range)(const T*, const T*, const uint8_t*, T*, int64_t, int64_t);
  const Range ranges[2][2][2] = {
      {{&backward_range<false, 1, false>, &backward_range<false, 1, true>},
       {&backward_range<false, 4, false>, &backward_range<false, 4, true>}},
      {{&backward_range<true, 1, false>, &backward_range<true, 1, true>},
       {&backward_range<true, 4, false>, &backward_range<true, 4, true>}},
  };
  const bool streams = form.streaming && (uintptr_t)(dx + begin) % sizeof(vfloat) == 0;
  ranges[form.tanh_form][form.side_bits == 4][streams](grad, y, side, dx, begin, end);
}

template <class T>
void recompute_of(const T* grad, const T* x, T* dx, T* y, bool tanh_form, int64_t begin, int64_t end) {
  typedef void (*Range)(const T*, const T*, T*, T*, int64_t, int64_t);
  const Range ranges[2] = {&recompute_range<false>, &recompute_range<true>};
  ranges[tanh_form](grad, x, dx, y, begin, end);
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
  if (dtype == kFloat)
    recompute_of((const float*)grad, (const float*)x, (float*)dx, (float*)y, tanh_form, begin, end);
  else
    recompute_of((const bfloat16*)grad, (const bfloat16*)x, (bfloat16*)dx, (bfloat16*)y, tanh_form, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
