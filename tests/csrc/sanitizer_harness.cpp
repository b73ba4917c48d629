// Runs every CPU kernel on buffers of exactly the size it may touch; built with ASan and UBSan by test_sanitizers.py.
// Prints one line per instruction set: a checksum of all results, which also shows that every call was made.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention/softmax_dropout.h"
#include "dropout/dropout.h"
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"
#include "gelu/gelu.h"
#include "lamb/lamb.h"
#include "layer_norm/layer_norm.h"

namespace {

double checksum = 0.0;

void* aligned_to_64(int64_t num_bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, num_bytes) != 0) std::abort();
  return std::memset(p, 0, num_bytes);
}

// An array on the heap of exactly `count` elements: the sanitizer guards both ends.
template <class T>
struct Exact {
  std::unique_ptr<T[], void (*)(void*)> data;
  int64_t count;
  explicit Exact(int64_t n) : data(static_cast<T*>(aligned_to_64(n * (int64_t)sizeof(T))), std::free), count(n) {}
  T* get() { return data.get(); }
};

struct Values {  // numbers of one dtype, with some special ones
  int dtype;
  Exact<unsigned char> bytes;
  Values(int type, int64_t count, int seed) : dtype(type), bytes(count * (type == tempo::kFloat ? 4 : 2)) {
    for (int64_t i = 0; i < count; ++i) {
      float x = 4.0f * std::sin(0.7f * (float)(i * (seed + 3)) + (float)seed);
      if (i % 97 == 13) x = -0.0f;
      if (seed == 1 && i % 101 == 50) x = 1e30f;
      set(i, x);
    }
  }
  void set(int64_t i, float x) {
    if (dtype == tempo::kFloat) {
      reinterpret_cast<float*>(bytes.get())[i] = x;
    } else {
      uint32_t bits;
      __builtin_memcpy(&bits, &x, 4);
      reinterpret_cast<uint16_t*>(bytes.get())[i] = (uint16_t)(bits >> 16);
    }
  }
  void* get() { return bytes.get(); }
  void add_to_checksum() {
    for (int64_t i = 0; i < bytes.count; ++i) checksum += bytes.get()[i] * (double)(i % 7 + 1);
  }
};

tempo::DropoutDraw draw(double p) {
  return {0x123456789abcdefull, 7, (1ull << 34) + 3, (uint64_t)std::nearbyint(p * 4294967296.0), (float)(p < 1 ? 1 / (1 - p) : 0)};
}

void run_dropout(int dtype, int64_t n) {
  for (double p : {0.1, 1.0}) {
    Values x(dtype, n, 1), y(dtype, n, 0);
    int64_t middle = n / 2;
    TEMPO_CPU(dropout)(dtype, x.get(), y.get(), draw(p), 0, middle);
    TEMPO_CPU(dropout)(dtype, x.get(), y.get(), draw(p), middle, n);
    y.add_to_checksum();
  }
}

void run_gelu(int dtype, int64_t n, bool streaming) {
  for (bool tanh_form : {false, true})
    for (int side_bits : {1, 4}) {
      const tempo::GeluForm form{tanh_form, side_bits, streaming};
      Values x(dtype, n, 1), grad(dtype, n, 2), dx(dtype, n, 0);
      Exact<uint8_t> side((n * side_bits + 7) / 8);
      int64_t middle = n / 2 / tempo::kGeluTile * tempo::kGeluTile;
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, middle}, {middle, n}}) {
        TEMPO_CPU(gelu_forward)(dtype, x.get(), x.get(), side.get(), form, begin, end);
        TEMPO_CPU(gelu_backward)(dtype, grad.get(), x.get(), side.get(), dx.get(), form, begin, end);
      }
      x.add_to_checksum();
      dx.add_to_checksum();
    }
}

void run_gelu_recompute(int dtype, int64_t n) {
  for (bool tanh_form : {false, true}) {
    Values x(dtype, n, 1), grad(dtype, n, 2), dx(dtype, n, 0), y(dtype, n, 0);
    int64_t middle = n / 2 / tempo::kGeluTile * tempo::kGeluTile;
    for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, middle}, {middle, n}}) {
      TEMPO_CPU(gelu_recompute_backward)(dtype, grad.get(), x.get(), dx.get(), y.get(), tanh_form, begin, end);
      TEMPO_CPU(gelu_recompute_backward)(dtype, grad.get(), x.get(), grad.get(), x.get(), tanh_form, begin, end);
    }
    for (Values* result : {&dx, &y, &grad, &x}) result->add_to_checksum();
  }
}

struct NormArrays {
  static constexpr int64_t kRows = 3;
  const int64_t columns, num_exact, padded;
  Values y, exact, grad;
  Exact<float> gamma, inverse, beta, rstd, row, sums;
  Exact<int64_t> columns_kept;

  NormArrays(int dtype, int64_t num_columns)
      : columns(num_columns), num_exact(columns < 4 ? columns : 4),
        padded((columns + tempo::kColumnPadding - 1) / tempo::kColumnPadding * tempo::kColumnPadding), y(dtype, kRows * columns, 0),
        exact(dtype, kRows * num_exact, 0), grad(dtype, kRows * columns, 2), gamma(padded), inverse(padded), beta(padded),
        rstd(kRows), row(padded), sums(3 * padded), columns_kept(num_exact) {
    for (int64_t i = 0; i < columns; ++i) gamma.get()[i] = 0.5f + (float)(i % 5), inverse.get()[i] = 1.0f / gamma.get()[i];
    for (int64_t k = 0; k < num_exact; ++k) {
      columns_kept.get()[k] = columns - num_exact + k;
      inverse.get()[columns - num_exact + k] = 0.0f;
    }
  }
  tempo::LayerNormShape shape() { return {columns, num_exact, columns_kept.get()}; }
  tempo::LayerNormOutput output(bool streaming) {
    return {gamma.get(), beta.get(), 1e-12f, y.get(), rstd.get(), exact.get(), shape(), streaming};
  }
  tempo::LayerNormGradient gradient(bool streaming) {
    return {grad.get(), y.get(), rstd.get(), gamma.get(), beta.get(), inverse.get(), exact.get(), shape(), streaming};
  }
  float* sum(int which) { return sums.get() + which * padded; }
};

void run_layer_norm(int dtype, int64_t columns, bool streaming) {
  NormArrays a(dtype, columns);
  Values x(dtype, a.kRows * columns, 0);
  TEMPO_CPU(layer_norm_forward)(dtype, x.get(), a.output(streaming), 0, a.kRows);
  TEMPO_CPU(layer_norm_backward)(dtype, a.gradient(streaming), x.get(), a.sum(0), a.sum(1), a.row.get(), 0, a.kRows);
  a.y.add_to_checksum();
  x.add_to_checksum();
}

void run_dropout_add_layer_norm(int dtype, int64_t columns, bool streaming) {
  for (double p : {0.0, 0.1, 1.0}) {
    NormArrays a(dtype, columns);
    Values x(dtype, a.kRows * columns, 0), residual(dtype, a.kRows * columns, 3), dx(dtype, a.kRows * columns, 0);
    Exact<float> x_bias(a.padded);
    Exact<uint32_t> words(columns + tempo::kRowPadding);
    TEMPO_CPU(dropout_add_layer_norm_forward)(dtype, {x.get(), residual.get(), x_bias.get(), draw(p)}, a.output(streaming),
                                              a.row.get(), words.get(), 0, a.kRows);
    const tempo::DropoutAddGradient out{draw(p), p == 0.0 ? nullptr : dx.get(), residual.get(), a.sum(2), a.sum(0), a.sum(1)};
    TEMPO_CPU(dropout_add_layer_norm_backward)(dtype, a.gradient(streaming), out, a.row.get(), words.get(), 0, a.kRows);
    a.y.add_to_checksum();
    residual.add_to_checksum();
    dx.add_to_checksum();
  }
}

void run_softmax(int dtype, int64_t keys) {
  const int64_t batch = 2, heads = 2, queries = 3, count = batch * heads * queries * keys;
  Exact<uint8_t> bool_mask(batch * keys);
  for (int64_t i = 0; i < bool_mask.count; ++i) bool_mask.get()[i] = i % 3 != 0;
  Exact<float> added_mask(heads * queries * keys), row(keys + tempo::kRowPadding);
  Exact<uint32_t> words(keys + tempo::kRowPadding);
  for (int kind = 0; kind < 3; ++kind)
    for (double p : {0.0, 0.3, 1.0}) {
      tempo::SoftmaxShape shape{heads, queries, keys, 0.125f, kind == 0, nullptr, nullptr, -3.4e38f, {0, 0, 0, 0}};
      if (kind == 1) shape.bool_mask = bool_mask.get(), shape.mask_strides[0] = keys, shape.mask_strides[3] = 1;
      if (kind == 2) {
        shape.added_mask = added_mask.get();
        shape.mask_strides[1] = queries * keys, shape.mask_strides[2] = keys, shape.mask_strides[3] = 1;
      }
      Values scores(dtype, count, 0), dropped(dtype, count, 0), grad(dtype, count, 2);
      void* kept = p == 0.0 ? nullptr : dropped.get();
      TEMPO_CPU(softmax_dropout_forward)(dtype, scores.get(), kept, shape, draw(p), row.get(), words.get(), 0, 12);
      TEMPO_CPU(softmax_dropout_backward)(dtype, grad.get(), scores.get(), kept, shape, draw(p), words.get(), 0, 12);
      scores.add_to_checksum();
      grad.add_to_checksum();
    }
}

void run_lamb(int64_t n) {
  const tempo::LambFactors factors = tempo::lamb_factors({0.9, 0.999, 0.01f, 0.0f, 0.01f, 1.0f, true, true}, 3.0f, 5);
  for (bool with_copy : {false, true}) {
    Values w(tempo::kFloat, n, 1), g(tempo::kFloat, n, 2), m(tempo::kFloat, n, 3), v(tempo::kFloat, n, 0);
    Values copy(tempo::kBFloat16, n, 0);
    auto floats = [](Values& values) { return static_cast<float*>(values.get()); };
    for (int64_t i = 0; i < n; ++i) floats(v)[i] = 0.5f + (float)(i % 5), floats(w)[i] *= floats(w)[i] > 1e20f ? 1e-20f : 1.0f;
    const tempo::LambTensor tensor{floats(w), g.get(), floats(m), floats(v), with_copy ? copy.get() : nullptr, n};
    const int64_t middle = n / 2;
    for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, middle}, {middle, n}}) {
      const tempo::LambSums sums = TEMPO_CPU(lamb_moments)(tensor, factors, begin, end);
      checksum += sums.weight + sums.update;
      TEMPO_CPU(lamb_weights)(tensor, factors, 0.01f, begin, end);
      TEMPO_CPU(lamb_all)(tensor, factors, 0.01f, begin, end);
    }
    for (Values* values : {&w, &m, &v, &copy}) values->add_to_checksum();
  }
}

}  // namespace

int main() {
  for (int dtype : {tempo::kFloat, tempo::kBFloat16})
    for (int64_t size : {1, 2, 7, 15, 16, 17, 33, 127, 1023, 1024, 1025, 1500, 4097}) {
      run_dropout(dtype, size);
      for (bool streaming : {false, true}) run_gelu(dtype, size, streaming);
      run_gelu_recompute(dtype, size);
      for (bool streaming : {false, true}) {
        run_layer_norm(dtype, size, streaming);
        run_dropout_add_layer_norm(dtype, size, streaming);
      }
      run_softmax(dtype, size);
      if (dtype == tempo::kFloat) run_lamb(size);
    }
  std::printf("%s %.17g\n", tempo::cpu_instruction_set_name(), checksum);
}
