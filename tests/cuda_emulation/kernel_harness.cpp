// Runs every CUDA kernel, emulated, on buffers of exactly the size it may touch; built with ASan and UBSan, or with TSan, by
// test_emulation.py. Prints a checksum of all results: it must not depend on the order in which threads run (CUEMU_ORDER).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "attention/softmax_dropout.h"
#include "common/gpu.h"
#include "dropout/dropout.h"
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"
#include "gelu/gelu.h"
#include "lamb/lamb.h"
#include "layer_norm/layer_norm.h"

namespace {

double checksum = 0.0;
int failures = 0;

void check(int error, const char* what) {
  if (error == 0) return;
  std::printf("%s: error %d, %s\n", what, error, cuemu_error());
  ++failures;
}

int bytes_of(int dtype) { return dtype == tempo::kFloat ? 4 : 2; }

// A heap block of exactly the size that is used, 16-byte aligned, or `offset` bytes behind such an address.
struct Buffer {
  unsigned char* base;
  int64_t num_bytes;
  int64_t offset;
  explicit Buffer(int64_t bytes, int64_t shift = 0) : num_bytes(bytes), offset(shift) {
    base = static_cast<unsigned char*>(std::malloc((size_t)(bytes + shift ? bytes + shift : 1)));
    std::memset(base, 0, (size_t)(bytes + shift));
  }
  ~Buffer() { std::free(base); }
  Buffer(const Buffer&) = delete;
  void* get() const { return base + offset; }
  float* floats() const { return reinterpret_cast<float*>(base + offset); }
  uint8_t* bytes() const { return base + offset; }
  void add_to_checksum() const {
    for (int64_t i = 0; i < num_bytes; ++i) checksum += base[offset + i] * (double)(i % 7 + 1);
  }
};

struct Values : Buffer {
  Values(int dtype, int64_t count, int seed, bool aligned = true)
      : Buffer(count * bytes_of(dtype), aligned ? 0 : bytes_of(dtype)) {
    for (int64_t i = 0; i < count; ++i) {
      float x = seed == 0 ? 0.0f : 3.0f * std::sin(0.7f * (float)(i * (seed + 3)) + (float)seed);
      if (seed == 1 && i % 97 == 13) x = -0.0f;
      if (seed == 1 && i % 101 == 50) x = 300.0f;
      set(dtype, i, x);
    }
  }
  void set(int dtype, int64_t i, float x) {
    if (dtype == tempo::kFloat) {
      static_cast<float*>(get())[i] = x;
    } else if (dtype == tempo::kHalf) {
      static_cast<__half*>(get())[i] = __float2half_rn(x);
    } else {
      static_cast<__nv_bfloat16*>(get())[i] = __float2bfloat16_rn(x);
    }
  }
};

// One for each of the values of p: nothing dropped, some, everything.
struct Draw {
  int64_t rng[2] = {0x123456789abcdef, 5};
  tempo::DeviceDropout get(double p, int64_t elements_per_sample) const {
    return {rng, 7, (uint64_t)elements_per_sample, (uint64_t)std::nearbyint(p * 4294967296.0), (float)(p < 1 ? 1 / (1 - p) : 0)};
  }
};

void run_dropout(int dtype, int64_t n, bool aligned) {
  const Draw draw;
  for (double p : {0.3, 1.0}) {
    Values x(dtype, n, 1, aligned), y(dtype, n, 0, aligned);
    check(tempo::cuda::dropout(dtype, x.get(), y.get(), draw.get(p, n), n, nullptr), "dropout");
    y.add_to_checksum();
  }
}

void run_gelu(int dtype, int64_t n, bool aligned) {
  for (bool tanh_form : {false, true}) {
    for (int side_bits : {1, 4}) {
      const tempo::GeluForm form{tanh_form, side_bits};
      Values x(dtype, n, 1, aligned), grad(dtype, n, 2, aligned);
      Buffer side((n * side_bits + 7) / 8);
      check(tempo::cuda::gelu_forward(dtype, x.get(), x.get(), side.bytes(), form, n, nullptr), "gelu_forward");
      check(tempo::cuda::gelu_backward(dtype, grad.get(), x.get(), side.bytes(), grad.get(), form, n, nullptr), "gelu_backward");
      x.add_to_checksum();
      grad.add_to_checksum();
      side.add_to_checksum();
    }
    Values x(dtype, n, 1, aligned), grad(dtype, n, 2, aligned);
    check(tempo::cuda::gelu_recompute_backward(dtype, grad.get(), x.get(), grad.get(), x.get(), tanh_form, n, nullptr), "recompute");
    x.add_to_checksum();
    grad.add_to_checksum();
  }
}

// The LayerNorm alone, and with bias, dropout and residual before it for each p.
void run_layer_norm(int dtype, int64_t columns, bool aligned) {
  const int64_t rows = 5, count = rows * columns, num_exact = columns < 4 ? columns : 4;
  const Draw draw;
  for (int parameter_dtype : {(int)tempo::kFloat, dtype}) {
    Values x(dtype, count, 2, aligned), residual(dtype, count, 6, aligned), grad(dtype, count, 3, aligned);
    Values gamma(parameter_dtype, columns, 4), beta(parameter_dtype, columns, 5), x_bias(parameter_dtype, columns, 7);
    std::vector<int64_t> kept(num_exact);
    for (int64_t k = 0; k < num_exact; ++k) kept[k] = k * (columns / num_exact), gamma.set(parameter_dtype, kept[k], 0.0f);
    const tempo::LayerNormShape shape{columns, num_exact, kept.data()};
    const tempo::Parameter g{gamma.get(), parameter_dtype}, b{beta.get(), parameter_dtype}, xb{x_bias.get(), parameter_dtype};
    const int64_t num_partials = tempo::cuda::layer_norm_num_partials(rows, columns);
    Buffer chosen(num_exact * 8);
    check(tempo::cuda::layer_norm_exact_columns(g, b, 1e-30f, static_cast<int64_t*>(chosen.get()), num_exact, columns, nullptr),
          "layer_norm_exact_columns");
    chosen.add_to_checksum();
    for (double p : {-1.0, 0.0, 0.3, 1.0}) {  // -1: the LayerNorm alone
      Values y(dtype, count, 0, aligned), dx(dtype, count, 0, aligned), dresidual(dtype, count, 0, aligned);
      Values exact(dtype, rows * num_exact, 0), dgamma(parameter_dtype, columns, 0), dbeta(parameter_dtype, columns, 0);
      Values dx_bias(parameter_dtype, columns, 0);
      Buffer rstd(rows * 4), partial(num_partials * (p < 0 ? 2 : 3) * columns * 4);
      const tempo::ParameterGradient dg{dgamma.get(), parameter_dtype}, db{dbeta.get(), parameter_dtype};
      if (p < 0) {
        check(tempo::cuda::layer_norm_forward(dtype, x.get(), g, b, 1e-12f, y.get(), rstd.floats(), exact.get(), shape, rows, nullptr),
              "layer_norm_forward");
        check(tempo::cuda::layer_norm_backward(dtype, grad.get(), y.get(), rstd.floats(), g, b, exact.get(), dx.get(), dg, db,
                                               partial.floats(), num_partials, shape, rows, nullptr),
              "layer_norm_backward");
      } else {
        const auto drawn = draw.get(p, columns);
        check(tempo::cuda::dropout_add_layer_norm_forward(dtype, x.get(), xb, residual.get(), g, b, drawn, 1e-12f, y.get(),
                                                          rstd.floats(), exact.get(), shape, rows, nullptr),
              "dropout_add_layer_norm_forward");
        check(tempo::cuda::dropout_add_layer_norm_backward(dtype, grad.get(), y.get(), rstd.floats(), g, b, exact.get(), drawn,
                                                           p == 0.0 ? nullptr : dx.get(), dresidual.get(),
                                                           {dx_bias.get(), parameter_dtype}, dg, db, partial.floats(), num_partials,
                                                           shape, rows, nullptr),
              "dropout_add_layer_norm_backward");
      }
      for (const Values* values : {&y, &dx, &dresidual, &exact, &dgamma, &dbeta, &dx_bias}) values->add_to_checksum();
      rstd.add_to_checksum();
    }
  }
}

void run_softmax(int dtype, int64_t keys, bool aligned) {
  const int64_t batch = 2, heads = 2, queries = 3, rows = batch * heads * queries, count = rows * keys;
  const Draw draw;
  std::vector<uint8_t> bool_mask(batch * keys);
  for (size_t i = 0; i < bool_mask.size(); ++i) bool_mask[i] = i % 3 != 0;
  std::vector<float> added_mask(heads * queries * keys, 0.5f);
  for (int kind = 0; kind < 3; ++kind)
    for (double p : {0.0, 0.3, 1.0}) {
      tempo::SoftmaxShape shape{heads, queries, keys, 0.125f, kind == 0, nullptr, nullptr, -3.4e38f, {0, 0, 0, 0}};
      if (kind == 1) shape.bool_mask = bool_mask.data(), shape.mask_strides[0] = keys, shape.mask_strides[3] = 1;
      if (kind == 2) {
        shape.added_mask = added_mask.data();
        shape.mask_strides[1] = queries * keys, shape.mask_strides[2] = keys, shape.mask_strides[3] = 1;
      }
      Values scores(dtype, count, 2, aligned), dropped(dtype, count, 0, aligned), grad(dtype, count, 3, aligned);
      void* kept = p == 0.0 ? nullptr : dropped.get();
      const auto drawn = draw.get(p, count / batch);
      check(tempo::cuda::softmax_dropout_forward(dtype, scores.get(), kept, shape, drawn, rows, nullptr), "softmax forward");
      check(tempo::cuda::softmax_dropout_backward(dtype, grad.get(), scores.get(), kept, shape, drawn, rows, nullptr), "softmax backward");
      scores.add_to_checksum();
      dropped.add_to_checksum();
      grad.add_to_checksum();
    }
}

// More tensors than one launch takes, of `size` elements and fewer; then an overflow, which changes nothing.
void run_lamb(int dtype, int64_t size, bool aligned) {
  constexpr int kCount = 70;
  const int copy_dtype = dtype == tempo::kFloat ? (int)tempo::kBFloat16 : dtype;
  for (bool ratio : {true, false}) {
    std::vector<std::unique_ptr<Values>> arrays;
    std::vector<tempo::LambTensor> tensors;
    auto make = [&](int type, int64_t n, int seed) {
      arrays.push_back(std::make_unique<Values>(type, n, seed, aligned));
      return arrays.back()->get();
    };
    for (int i = 0; i < kCount; ++i) {
      const int64_t n = i == 1 ? size : size % (i + 9) + 1;
      tempo::LambTensor t{};
      t.param = static_cast<float*>(make(tempo::kFloat, n, i + 2));
      t.grad = make(dtype, n, i + 3);
      t.exp_avg = static_cast<float*>(make(tempo::kFloat, n, i + 4));
      t.exp_avg_sq = static_cast<float*>(make(tempo::kFloat, n, 0));
      t.copy = i % 2 ? make(copy_dtype, n, 0) : nullptr;
      t.numel = n;
      tensors.push_back(t);
    }
    const tempo::LambSettings settings{0.9, 0.999, 0.01f, 0.0f, 0.01f, 1.0f, ratio, true};
    Buffer workspace(tempo::cuda::lamb_workspace_bytes(tensors.data(), kCount, ratio)), step(8), norm(4), found_inf(4);
    for (float value : {3.0f, INFINITY}) {
      *norm.floats() = value;
      check(tempo::cuda::lamb_step(dtype, copy_dtype, tensors.data(), kCount, settings, norm.floats(), found_inf.floats(),
                                   static_cast<int64_t*>(step.get()), workspace.get(), nullptr),
            "lamb_step");
      for (const auto& values : arrays) values->add_to_checksum();
      step.add_to_checksum();
    }
  }
}

}  // namespace

int main() {
  for (int dtype : {tempo::kFloat, tempo::kBFloat16, tempo::kHalf})
    for (int64_t size : {1, 7, 8, 33, 128, 200, 264, 1024, 1032, 1500, 4104})
      for (bool aligned : {true, false}) {
        run_dropout(dtype, size, aligned);
        run_gelu(dtype, size, aligned);
        run_layer_norm(dtype, size, aligned);
        run_softmax(dtype, size, aligned);
        run_lamb(dtype, size, aligned);
      }
  std::printf("%.17g\n", checksum);
  return failures != 0;
}
