// GELU in bfloat16 on the CPU; fit_bfloat16.py describes the pieces.
//
// A step reads two vectors of elements as one vector of 32-bit words: the odd elements are the high halves of the words, the even
// ones the low halves. Neither needs a conversion, and two side fields of 4 bits are the two halves of a byte.
#pragma once
#include "common/simd.h"
#include "gelu/gelu_bfloat16_tables.h"
#include "gelu/gelu_tail.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

constexpr int kStep = 2 * kLanes;
typedef uint16_t vwords __attribute__((vector_size(4 * kLanes)));

struct Pair {
  vfloat even, odd;
};

TEMPO_INLINE vuint load_words(const bfloat16* p) {
  vuint words;
  memcpy(&words, p, sizeof words);
  return words;
}

TEMPO_INLINE Pair split(vuint words) { return {(vfloat)(words << 16), (vfloat)(words & 0xffff0000u)}; }

// Rounds halves away from zero, as what is rounded is not exact. A NaN stays one: it came from a bfloat16 or an invalid
// operation, and the 16 bits that are cut off are 0.
TEMPO_INLINE vuint rounded(vfloat x) { return (vuint)x + 0x8000u; }
TEMPO_INLINE vuint join(Pair x) { return (rounded(x.even) >> 16) | (rounded(x.odd) & 0xffff0000u); }
TEMPO_INLINE vfloat as_bfloat16(vfloat x) { return (vfloat)(rounded(x) & 0xffff0000u); }

TEMPO_INLINE void store_words(bfloat16* p, vuint words) { memcpy(p, &words, sizeof words); }
TEMPO_INLINE void stream_words(bfloat16* p, vuint words) { stream((float*)p, (vfloat)words); }

// ---- 16-bit words compared as unsigned numbers ----

// Bit i = (word i > limit).
TEMPO_INLINE uint32_t bits_above(vwords words, uint16_t limit) {
#if defined(__AVX512F__)
  return _mm512_cmpgt_epu16_mask((__m512i)words, _mm512_set1_epi16((short)limit));
#else
  vwords above = (vwords)(words > limit);
#if defined(__AVX2__)
  // The packing keeps the two 128-bit halves apart.
  uint32_t bits = (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16((__m256i)above, _mm256_setzero_si256()));
  return (bits | bits >> 8) & 0xffff;
#elif defined(TEMPO_SSE2)
  return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16((__m128i)above, _mm_setzero_si128()));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kStep; ++i) bits |= (uint32_t)(above[i] & 1) << i;
  return bits;
#endif
#endif
}

// Word i is all ones where bit i is set.
TEMPO_INLINE vuint words_of(uint32_t bits) {
#if defined(__AVX512F__)
  return (vuint)_mm512_movm_epi16(bits);
#else
  vwords each;
  for (int i = 0; i < kStep; ++i) each[i] = (uint16_t)(1 << i);
  return (vuint)(((vwords{} + (uint16_t)bits) & each) == each);
#endif
}

constexpr float kLastValue = 3.75f, kLastInPieces = 3.7499998f;  // 3.75 itself would round to 4
constexpr uint16_t kTailWord = 0xc070;  // the bits of -3.75; what is above it lies further left, or is NaN
constexpr uint16_t kInfinityWord = 0xff80;

// Bit i = not (x < x_min). Negative numbers rise with their magnitude; above minus infinity lie NaNs.
template <bool kTanh>
TEMPO_INLINE uint32_t right_bits(vuint words) {
  constexpr uint16_t first = (kTanh ? kTanhLowTables : kErfLowTables).first_left_word;
  return bits_above((vwords)words - first, (uint16_t)(kInfinityWord - first));
}

// ---- pieces about multiples of 1/2 ----

struct Piece {
  vint index;  // in the low three bits
  vfloat u;
};

TEMPO_INLINE Piece piece_of(vfloat v) {
  vfloat shifted = v + 6291456.0f;  // 1.5 * 2^22 rounds to halves
  return {(vint)shifted, v - (shifted - 6291456.0f)};
}

TEMPO_INLINE vfloat lookup_low(const float* table, vint index) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_permutexvar_ps((__m512i)index, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
#else
  return lookup(table, index & 7);
#endif
}

template <int N>
TEMPO_INLINE vfloat polynomial(const float (&c)[N][8], Piece piece) {
  vfloat result = lookup_low(c[N - 1], piece.index);
  for (int k = N - 2; k >= 0; --k) result = result * piece.u + lookup_low(c[k], piece.index);
  return result;
}

// To about 6e-5 of it; 0 for negative numbers, NaN for NaN.
TEMPO_INLINE vfloat low_root(vfloat x) {
#if defined(__AVX512F__)
  vfloat bounded = max_of(splat(1e-30f), x);
  return bounded * (vfloat)_mm512_rsqrt14_ps((__m512)bounded);
#else
  return square_root(max_of(vfloat{}, x));
#endif
}

// ---- the place of the unrounded value in the cell of values that round to y ----

TEMPO_INLINE vfloat cell_of(vfloat y, const GeluLowTables& tables) {
  return min_of(splat(7.0f), y * 1024.0f - tables.lowest_cell * 1024.0f);
}
TEMPO_INLINE vint cell_index(vfloat cell) { return (vint)(cell + 12582912.0f); }

// Which eighth, 0 .. 7.
TEMPO_INLINE vint place_in_cell(vfloat exact, const GeluLowTables& tables) {
  vfloat y = as_bfloat16(exact), cell = cell_of(y, tables);
  vint index = cell_index(cell);
  vfloat t = low_root(exact - tables.y_min);
  vfloat near = (t - lookup_low(tables.cell_low, index)) * lookup_low(tables.cell_eighths, index);
  vfloat eighths_per_unit = (vfloat)((264u << 23) - ((vuint)y & 0x7f800000u));  // 8 / spacing; garbage where y is next to 0
  vfloat place = cell < 6.5f ? near : (exact - y) * eighths_per_unit + 4.0f;
  return truncate(min_of(splat(7.0f), max_of(place, vfloat{})));
}

// The value at the middle of the eighth.
TEMPO_INLINE vfloat refined(vfloat y, vint place, const GeluLowTables& tables) {
  vfloat part = to_float(place) * 0.125f - 0.4375f;  // of the cell, from its middle
  vfloat spacing = min_of(splat(1e30f), (vfloat)((vint)y & 0x7f800000) * 0x1p-7f);
  vint index = cell_index(cell_of(y, tables));
  vfloat bend = lookup_low(tables.cell_square, index) * (0.5f + part) - lookup_low(tables.cell_missing, index);
  return y + (part * spacing - (0.5f - part) * bend);
}

// ---- forward ----

template <bool kTanh>
TEMPO_INLINE vfloat low_gelu(vfloat x) {
  vfloat a = min_of(splat(kLastInPieces), absolute(x));
  return max_of(vfloat{}, x) - a * polynomial((kTanh ? kTanhLowTables : kErfLowTables).forward_c, piece_of(a));
}

template <bool kTanh>
TEMPO_INLINE vfloat with_tail(vfloat x, vfloat y) {
  return x < -kLastValue ? -left_tail<kTanh, false>(-x).h : y;
}

template <bool kTanh>
TEMPO_INLINE vint field_of(vfloat x, vfloat exact) {
  const GeluLowTables& tables = kTanh ? kTanhLowTables : kErfLowTables;
  return (~(x < tables.x_min) & 8) | place_in_cell(exact, tables);
}

// Without kTail: nothing is done, and false returned, where an element lies beyond the pieces.
template <bool kTanh, int kSideBits, bool kTail>
TEMPO_INLINE bool forward_step(const bfloat16* x, bfloat16* y, uint8_t* side) {
  vuint words = load_words(x);
  if (!kTail && __builtin_expect(bits_above((vwords)words, kTailWord) != 0, 0)) return false;
  Pair input = split(words), exact = {low_gelu<kTanh>(input.even), low_gelu<kTanh>(input.odd)};
  if (kTail) exact = {with_tail<kTanh>(input.even, exact.even), with_tail<kTanh>(input.odd, exact.odd)};
  store_words(y, join(exact));
  if (kSideBits == 1) {
    uint32_t bits = right_bits<kTanh>(words);
    memcpy(side, &bits, kStep / 8);
  } else {
    vint fields = field_of<kTanh>(input.even, exact.even) | field_of<kTanh>(input.odd, exact.odd) << 4;
    vbyte bytes = __builtin_convertvector(fields, vbyte);
    memcpy(side, &bytes, sizeof bytes);
  }
  return true;
}

template <bool kTanh, int kSideBits>
__attribute__((noinline)) void forward_step_with_tail(const bfloat16* x, bfloat16* y, uint8_t* side) {
  forward_step<kTanh, kSideBits, true>(x, y, side);
}

template <bool kTanh, int kSideBits>
void forward_range(const bfloat16* x, bfloat16* y, uint8_t* side, int64_t begin, int64_t end) {
  int64_t i = begin;
  while (i + kStep <= end) {
    // A loop without a call in it keeps the tables in registers.
    while (i + kStep <= end && forward_step<kTanh, kSideBits, false>(x + i, y + i, side + i * kSideBits / 8)) i += kStep;
    if (i + kStep > end) break;
    forward_step_with_tail<kTanh, kSideBits>(x + i, y + i, side + i * kSideBits / 8);
    i += kStep;
  }
  if (i < end) {
    size_t count = (size_t)(end - i), num_bits = count * kSideBits;
    bfloat16 values[kStep] = {};
    uint8_t fields[kStep * kSideBits / 8];
    memcpy(values, x + i, sizeof(bfloat16) * count);
    forward_step_with_tail<kTanh, kSideBits>(values, values, fields);
    memcpy(y + i, values, sizeof(bfloat16) * count);
    if (num_bits % 8 != 0) fields[num_bits / 8] &= (uint8_t)((1 << num_bits % 8) - 1);  // bits past the last element are 0
    memcpy(side + i * kSideBits / 8, fields, (num_bits + 7) / 8);
  }
}

// ---- backward ----

// log2(y_min / y); y_min <= y, infinite or very large where y is 0.
TEMPO_INLINE vfloat left_depth(vfloat y, const GeluLowTables& tables) {
  vfloat ratio = y * tables.inverse_y_min;
#if defined(__AVX512F__)
  vfloat whole = -1.0f - (vfloat)_mm512_getexp_ps((__m512)ratio);
  vfloat f = (vfloat)_mm512_getmant_ps((__m512)ratio, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero) - 2.0f;
#else
  vint bits = (vint)ratio & 0x7fffffff;
  vfloat whole = 126.0f - to_float(bits >> 23);
  vfloat f = (vfloat)((bits & 0x007fffff) | 0x3f800000) - 2.0f;
#endif
  return whole - polynomial(kLowLog2, f) * f;
}

template <bool kTanh>
TEMPO_INLINE vfloat low_derivative(vfloat y, vint is_right) {
  const GeluLowTables& tables = kTanh ? kTanhLowTables : kErfLowTables;
  vfloat right = min_of(splat(kLowRightEnd * kLowRightEnd), y - tables.y_min);
  vfloat left = min_of(splat(kLowLeftEnd * kLowLeftEnd), left_depth(y, tables));
  vfloat root = low_root(is_right ? right : left);
  vfloat v = is_right ? root : root * kLowLeftScale + kLowLeftStart;
  return polynomial(tables.backward_c, piece_of(v)) * (is_right ? root : root * y);
}

template <bool kTanh, int kSideBits>
TEMPO_INLINE vuint backward_step(const bfloat16* grad, const bfloat16* y, const uint8_t* side) {
  Pair g = split(load_words(grad)), output = split(load_words(y));
  vint even_is_right, odd_is_right;
  if (kSideBits == 1) {
    uint32_t bits = 0;
    memcpy(&bits, side, kStep / 8);
    vuint words = words_of(bits);
    even_is_right = (vint)(words << 16) < 0;
    odd_is_right = (vint)words < 0;
  } else {
    const GeluLowTables& tables = kTanh ? kTanhLowTables : kErfLowTables;
    vbyte bytes;
    memcpy(&bytes, side, sizeof bytes);
    vint fields = __builtin_convertvector(bytes, vint);
    even_is_right = (fields << 28) < 0;
    odd_is_right = (fields << 24) < 0;
    output.even = refined(output.even, fields & 7, tables);
    output.odd = refined(output.odd, (fields >> 4) & 7, tables);
  }
  return join({g.even * low_derivative<kTanh>(output.even, even_is_right),
               g.odd * low_derivative<kTanh>(output.odd, odd_is_right)});
}

// kStream: dx lies where `stream_words` can store.
template <bool kTanh, int kSideBits, bool kStream>
void backward_range(const bfloat16* grad, const bfloat16* y, const uint8_t* side, bfloat16* dx, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    vuint words = backward_step<kTanh, kSideBits>(grad + i, y + i, side + i * kSideBits / 8);
    if (kStream)
      stream_words(dx + i, words);
    else
      store_words(dx + i, words);
  }
  if (kStream) finish_streaming();
  if (i < end) {
    size_t count = (size_t)(end - i);
    bfloat16 padded_grad[kStep] = {}, padded_y[kStep] = {};
    uint8_t fields[kStep * kSideBits / 8] = {};
    memcpy(padded_grad, grad + i, sizeof(bfloat16) * count);
    memcpy(padded_y, y + i, sizeof(bfloat16) * count);
    memcpy(fields, side + i * kSideBits / 8, (count * kSideBits + 7) / 8);
    vuint words = backward_step<kTanh, kSideBits>(padded_grad, padded_y, fields);
    memcpy(dx + i, &words, sizeof(bfloat16) * count);
  }
}

// ---- backward from the input ----

template <bool kTanh>
TEMPO_INLINE vfloat low_derivative_at(vfloat x) {
  vfloat a = min_of(splat(kLastInPieces), absolute(x));
  vfloat slope = polynomial((kTanh ? kTanhLowTables : kErfLowTables).slope_c, piece_of(a));
  return (vint)x < 0 ? slope : 1.0f - slope;
}

template <bool kTanh, bool kTail>
TEMPO_INLINE bool recompute_step(const bfloat16* grad, const bfloat16* x, bfloat16* dx, bfloat16* y) {
  vuint words = load_words(x);
  if (!kTail && __builtin_expect(bits_above((vwords)words, kTailWord) != 0, 0)) return false;
  Pair input = split(words), g = split(load_words(grad));
  Pair exact = {low_gelu<kTanh>(input.even), low_gelu<kTanh>(input.odd)};
  Pair slope = {low_derivative_at<kTanh>(input.even), low_derivative_at<kTanh>(input.odd)};
  if (kTail) {
    Left even = left_tail<kTanh, true>(-input.even), odd = left_tail<kTanh, true>(-input.odd);
    vint even_in_tail = input.even < -kLastValue, odd_in_tail = input.odd < -kLastValue;
    exact = {even_in_tail ? -even.h : exact.even, odd_in_tail ? -odd.h : exact.odd};
    slope = {even_in_tail ? even.slope : slope.even, odd_in_tail ? odd.slope : slope.odd};
  }
  store_words(dx, join({g.even * slope.even, g.odd * slope.odd}));
  store_words(y, join(exact));
  return true;
}

template <bool kTanh>
__attribute__((noinline)) void recompute_step_with_tail(const bfloat16* grad, const bfloat16* x, bfloat16* dx, bfloat16* y) {
  recompute_step<kTanh, true>(grad, x, dx, y);
}

// dx over grad, y over x, or elsewhere.
template <bool kTanh>
void recompute_range(const bfloat16* grad, const bfloat16* x, bfloat16* dx, bfloat16* y, int64_t begin, int64_t end) {
  int64_t i = begin;
  while (i + kStep <= end) {
    while (i + kStep <= end && recompute_step<kTanh, false>(grad + i, x + i, dx + i, y + i)) i += kStep;
    if (i + kStep > end) break;
    recompute_step_with_tail<kTanh>(grad + i, x + i, dx + i, y + i);
    i += kStep;
  }
  if (i < end) {
    size_t count = (size_t)(end - i);
    bfloat16 padded_grad[kStep] = {}, padded_x[kStep] = {};
    memcpy(padded_grad, grad + i, sizeof(bfloat16) * count);
    memcpy(padded_x, x + i, sizeof(bfloat16) * count);
    recompute_step_with_tail<kTanh>(padded_grad, padded_x, padded_grad, padded_x);
    memcpy(dx + i, padded_grad, sizeof(bfloat16) * count);
    memcpy(y + i, padded_x, sizeof(bfloat16) * count);
  }
}

}  // namespace
}  // namespace TEMPO_ISA
}  // namespace tempo
