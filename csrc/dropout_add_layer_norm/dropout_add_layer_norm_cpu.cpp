// LayerNorm(residual + dropout(x + x_bias)); see tempo/dropout_add_layer_norm.py.
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"

#include "common/philox.h"
#include "layer_norm/layer_norm_rows.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

// f(drops, streams), each a Flag.
template <class F>
TEMPO_INLINE void with_flags(bool drops, bool streams, F f) {
  if (drops)
    streams ? f(Flag<true>{}, Flag<true>{}) : f(Flag<true>{}, Flag<false>{});
  else
    streams ? f(Flag<false>{}, Flag<true>{}) : f(Flag<false>{}, Flag<false>{});
}

// The words of the elements of a row, and below which of them one is dropped.
struct RowDraw {
  const uint32_t* words;
  uint32_t threshold;
  float scale;

  RowDraw(const DropoutDraw& draw, int64_t row, int64_t num_columns, uint32_t* room)
      : words(room), threshold((uint32_t)draw.threshold), scale(draw.scale) {
    if (draw.threshold >> 32) {  // everything is dropped: no word lies above such a threshold
      memset(room, 0, sizeof(uint32_t) * (size_t)num_columns);
      threshold = 1;
    } else {
      words = draw_words(draw, draw.first_element + (uint64_t)(row * num_columns), num_columns, room);
    }
  }
  template <class Part>
  TEMPO_INLINE vfloat operator()(vfloat v, int64_t i, Part part) const {
    return drop(v, load_words(words + i, part), threshold, scale);
  }
};

struct KeepAll {
  KeepAll(const DropoutDraw&, int64_t, int64_t, uint32_t*) {}
  template <class Part>
  TEMPO_INLINE vfloat operator()(vfloat v, int64_t, Part) const { return v; }
};

template <bool kDrops>
struct Chosen {
  using type = RowDraw;
};
template <>
struct Chosen<false> {
  using type = KeepAll;
};

template <bool kDrops, bool kStream, class T>
void forward_range(const DropoutAddInput& in, const LayerNormOutput& out, float* sum, uint32_t* room, int64_t begin, int64_t end) {
  const int64_t columns = out.shape.num_columns;
  const float* x_bias = in.x_bias;
  for (int64_t r = begin; r < end; ++r) {
    const T *x = (const T*)in.x + r * columns, *residual = (const T*)in.residual + r * columns;
    const typename Chosen<kDrops>::type dropped(in.draw, r, columns, room);
    in_vectors(columns, [&](int64_t i, auto part) {
      const vfloat v = dropped(load(x + i, part) + load(x_bias + i, Whole{}), i, part);
      store(sum + i, v + load(residual + i, part), Whole{});
    });
    normalise_row<kStream>(sum, out, r, (T*)out.y + r * columns, [&](int64_t i) {
      __builtin_prefetch(x + columns + i);
      __builtin_prefetch(residual + columns + i);
    });
  }
  if (kStream) finish_streaming();
}

template <bool kDrops, bool kStream, class T>
void backward_range(const LayerNormGradient& in, const DropoutAddGradient& out, float* x_hat, uint32_t* room, int64_t begin,
                    int64_t end) {
  const int64_t columns = in.shape.num_columns;
  float* dx_bias = out.dx_bias;
  for (int64_t r = begin; r < end; ++r) {
    const typename Chosen<kDrops>::type dropped(out.draw, r, columns, room);
    T *dx = (T*)out.dx + (kDrops ? r * columns : 0), *dresidual = (T*)out.dresidual + r * columns;
    backward_row<T>(in, r, x_hat, out.dgamma, out.dbeta, [&](int64_t i, vfloat gradient, auto part) {
      store_or_stream<kStream>(dresidual + i, gradient, part);
      const vfloat kept = dropped(gradient, i, part);
      store(dx_bias + i, load(dx_bias + i, Whole{}) + kept, Whole{});
      if (kDrops) store_or_stream<kStream>(dx + i, kept, part);
    });
  }
  if (kStream) finish_streaming();
}

template <class T>
void forward(const DropoutAddInput& in, const LayerNormOutput& out, float* sum, uint32_t* room, int64_t begin, int64_t end) {
  const bool streams = out.streaming && can_stream((const T*)out.y, out.shape.num_columns);
  with_flags(in.draw.threshold != 0, streams, [&](auto drops, auto streamed) {
    forward_range<decltype(drops)::value, decltype(streamed)::value, T>(in, out, sum, room, begin, end);
  });
}

template <class T>
void backward(const LayerNormGradient& in, const DropoutAddGradient& out, float* x_hat, uint32_t* room, int64_t begin, int64_t end) {
  const int64_t columns = in.shape.num_columns;
  const bool drops = out.draw.threshold != 0;
  const bool streams = in.streaming && can_stream((const T*)out.dresidual, columns) && (!drops || can_stream((const T*)out.dx, columns));
  with_flags(drops, streams, [&](auto dropping, auto streamed) {
    backward_range<decltype(dropping)::value, decltype(streamed)::value, T>(in, out, x_hat, room, begin, end);
  });
}

}  // namespace

void dropout_add_layer_norm_forward(int dtype, const DropoutAddInput& in, const LayerNormOutput& out, float* row, uint32_t* words,
                                    int64_t begin, int64_t end) {
  if (dtype == kFloat)
    forward<float>(in, out, row, words, begin, end);
  else
    forward<bfloat16>(in, out, row, words, begin, end);
}

void dropout_add_layer_norm_backward(int dtype, const LayerNormGradient& in, const DropoutAddGradient& out, float* x_hat,
                                     uint32_t* words, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    backward<float>(in, out, x_hat, words, begin, end);
  else
    backward<bfloat16>(in, out, x_hat, words, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
