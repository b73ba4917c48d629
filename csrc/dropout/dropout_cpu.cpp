// Dropout without a kept mask; see tempo/dropout.py.
#include "common/philox.h"
#include "dropout/dropout.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

constexpr int kTile = 1024;

template <class T>
void dropout_range(const T* x, T* y, const DropoutDraw& draw, int64_t begin, int64_t end) {
  if (draw.threshold >> 32) {
    memset(y + begin, 0, sizeof(T) * (size_t)(end - begin));
    return;
  }
  uint32_t room[kTile + kExtraWords];
  const uint32_t threshold = (uint32_t)draw.threshold;
  for (int64_t start = begin; start < end; start += kTile) {
    int64_t count = end - start < kTile ? end - start : kTile;
    const uint32_t* words = draw_words(draw, draw.first_element + (uint64_t)start, count, room);
    in_vectors(count, [&](int64_t i, auto part) {
      store(y + start + i, drop(load(x + start + i, part), load_words(words + i, part), threshold, draw.scale), part);
    });
  }
}

}  // namespace

void dropout(int dtype, const void* x, void* y, const DropoutDraw& draw, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    dropout_range((const float*)x, (float*)y, draw, begin, end);
  else
    dropout_range((const bfloat16*)x, (bfloat16*)y, draw, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
