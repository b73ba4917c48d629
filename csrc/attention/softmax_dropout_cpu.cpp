// Softmax and dropout of attention in one pass each way; see tempo/attention.py.
#include "attention/softmax_dropout.h"
#include "common/philox.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

// A masked score: float's lowest number, so that a row with nothing left is finite and uniform.
constexpr float kLowest = -3.402823466e+38f;

static_assert(kExtraWords + kLanes <= kRowPadding, "a row of words needs room for whole Philox blocks");

TEMPO_INLINE vint load_bytes(const uint8_t* p, Whole) {
  vbyte v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vint);
}
TEMPO_INLINE vint load_bytes(const uint8_t* p, First part) {
  vbyte v = {};
  memcpy(&v, p, (size_t)part.count);
  return __builtin_convertvector(v, vint);
}

TEMPO_INLINE int64_t mask_offset(const SoftmaxShape& shape, int64_t row) {
  const int64_t query = row % shape.queries, head = row / shape.queries % shape.heads, batch = row / shape.queries / shape.heads;
  return batch * shape.mask_strides[0] + head * shape.mask_strides[1] + query * shape.mask_strides[2];
}

// Applies the mask to scaled scores; lanes past the row's end may hold anything.
template <class Part>
TEMPO_INLINE vfloat masked(vfloat v, const SoftmaxShape& shape, int64_t offset, int64_t i, Part part) {
  const bool one = shape.mask_strides[3] == 0;  // one value for all keys
  if (shape.bool_mask) {
    vint attend = one ? splat((int32_t)shape.bool_mask[offset]) : load_bytes(shape.bool_mask + offset + i, part);
    return attend != 0 ? v : splat(kLowest);
  }
  if (shape.added_mask) {
    vfloat added = one ? splat(shape.added_mask[offset]) : load(shape.added_mask + offset + i, part);
    return added <= shape.hiding ? splat(kLowest) : v + added;
  }
  return v;
}

TEMPO_INLINE void fill(float* row, float value, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) row[i] = value;
}

// Scaled and masked scores into `row`, with kLowest behind them up to a whole vector; returns the largest.
template <class T>
TEMPO_INLINE float load_scores(const T* scores, const SoftmaxShape& shape, int64_t r, float* row) {
  const int64_t offset = mask_offset(shape, r);
  int64_t visible = shape.keys;
  if (shape.causal) {
    visible = r % shape.queries + shape.keys - shape.queries + 1;
    visible = visible < 0 ? 0 : visible > shape.keys ? shape.keys : visible;
  }
  vfloat largest = splat(kLowest);
  in_vectors(visible, [&](int64_t i, auto part) {
    vfloat v = masked(load(scores + i, part) * shape.scale, shape, offset, i, part);
    memcpy(row + i, &v, sizeof v);
    if (count_of(part) == kLanes) largest = max_of(v, largest);
  });
  const int64_t whole = visible / kLanes * kLanes;
  float result = largest_of(largest);
  for (int64_t i = whole; i < visible; ++i) result = row[i] > result ? row[i] : result;
  fill(row, kLowest, visible, (shape.keys + kLanes - 1) / kLanes * kLanes);
  return result;
}

template <class T>
void forward_range(T* scores, T* dropped, const SoftmaxShape& shape, const DropoutDraw& draw, float* row, uint32_t* words,
                   int64_t begin, int64_t end) {
  const int64_t keys = shape.keys;
  const bool drop_all = draw.threshold >> 32;
  for (int64_t r = begin; r < end; ++r) {
    T* out = scores + r * keys;
    const float largest = load_scores(out, shape, r, row);
    vfloat sum = {};
    in_vectors(keys, [&](int64_t i, auto part) {
      vfloat e = exponential(load(row + i, Whole{}) - largest);
      memcpy(row + i, &e, sizeof e);
      sum += load(row + i, part);
    });
    const float inverse = 1.0f / sum_of(sum);
    if (dropped == nullptr || drop_all) {
      in_vectors(keys, [&](int64_t i, auto part) { store(out + i, load(row + i, Whole{}) * inverse, part); });
      if (dropped != nullptr) memset(dropped + r * keys, 0, sizeof(T) * (size_t)keys);
      continue;
    }
    const uint32_t* drawn = draw_words(draw, draw.first_element + (uint64_t)(r * keys), keys, words);
    in_vectors(keys, [&](int64_t i, auto part) {
      vfloat p = as_stored(load(row + i, Whole{}) * inverse, out);
      store(out + i, p, part);
      store(dropped + r * keys + i, drop(p, load_words(drawn + i, part), (uint32_t)draw.threshold, draw.scale), part);
    });
  }
}

template <class T, bool kDrop>
TEMPO_INLINE void backward_row(T* grad, const T* probabilities, T* dropped, const uint32_t* drawn, const SoftmaxShape& shape,
                               const DropoutDraw& draw) {
  const uint32_t threshold = (uint32_t)draw.threshold;
  vfloat products = {};
  in_vectors(shape.keys, [&](int64_t i, auto part) {
    vfloat g = load(grad + i, part);
    if (kDrop) g = drop(g, load_words(drawn + i, part), threshold, draw.scale);
    products += g * load(probabilities + i, part);
  });
  const float dot = sum_of(products);
  in_vectors(shape.keys, [&](int64_t i, auto part) {
    vfloat g = load(grad + i, part), p = load(probabilities + i, part);
    if (kDrop) {
      vuint bits = load_words(drawn + i, part);
      g = drop(g, bits, threshold, draw.scale);
      store(dropped + i, drop(p, bits, threshold, draw.scale), part);
    }
    store(grad + i, (g - dot) * p * shape.scale, part);
  });
}

template <class T>
void backward_range(T* grad, const T* probabilities, T* dropped, const SoftmaxShape& shape, const DropoutDraw& draw,
                    uint32_t* words, int64_t begin, int64_t end) {
  const int64_t keys = shape.keys;
  for (int64_t r = begin; r < end; ++r) {
    if (draw.threshold >> 32) {  // nothing is kept: all gradients are 0
      memset(grad + r * keys, 0, sizeof(T) * (size_t)keys);
      memset(dropped + r * keys, 0, sizeof(T) * (size_t)keys);
    } else if (dropped != nullptr) {
      const uint32_t* drawn = draw_words(draw, draw.first_element + (uint64_t)(r * keys), keys, words);
      backward_row<T, true>(grad + r * keys, probabilities + r * keys, dropped + r * keys, drawn, shape, draw);
    } else {
      backward_row<T, false>(grad + r * keys, probabilities + r * keys, dropped, nullptr, shape, draw);
    }
  }
}

}  // namespace

void softmax_dropout_forward(int dtype, void* scores, void* dropped, const SoftmaxShape& shape, const DropoutDraw& draw,
                             float* row, uint32_t* words, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    forward_range((float*)scores, (float*)dropped, shape, draw, row, words, begin, end);
  else
    forward_range((bfloat16*)scores, (bfloat16*)dropped, shape, draw, row, words, begin, end);
}

void softmax_dropout_backward(int dtype, void* grad, const void* probabilities, void* dropped, const SoftmaxShape& shape,
                              const DropoutDraw& draw, uint32_t* words, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    backward_range((float*)grad, (const float*)probabilities, (float*)dropped, shape, draw, words, begin, end);
  else
    backward_range((bfloat16*)grad, (const bfloat16*)probabilities, (bfloat16*)dropped, shape, draw, words, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
