// Binds dropout's kernels to torch.ops.tempo.dropout.
#include "dropout/dropout.h"

#include "common/op.h"

namespace {

struct Cpu : CpuDevice {
  static void dropout(const Tensor& x, Tensor& y, double p, const Tensor& rng, int64_t site, int64_t batch) {
    const auto draw = dropout_draw(p, rng, site, x.numel(), batch);
    const int dtype = kernel_dtype(x.scalar_type());
    const void* source = x.const_data_ptr();
    void* target = y.mutable_data_ptr();
    parallel_over_elements(x.numel(), tempo::kColumnPadding, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(dropout)(dtype, source, target, draw, begin, end);
    });
  }
};

struct Cuda : CudaDevice {
  static void dropout(const Tensor& x, Tensor& y, double p, const Tensor& rng, int64_t site, int64_t batch) {
    const Launch launch(x);
    const Tensor row = dense(rng);
    const auto draw = device_dropout(p, row, site, x.numel(), batch);
    launch.check(tempo::cuda::dropout(kernel_dtype(x.scalar_type()), x.const_data_ptr(), y.mutable_data_ptr(), draw, x.numel(),
                                      launch.stream()),
                 "dropout");
  }
};

template <class Device>
bool takes_dropout(const StableIValue* stack) {
  return is_plain<Device>(Argument(stack[0]));
}

template <class Device>
Tensor dropout(Tensor x, double p, Tensor rng, int64_t site) {
  check_same_device(x, rng);
  if (p == 0.0) return torch::stable::clone(x);
  const Tensor input = dense(x);
  Tensor y = torch::stable::empty_like(input);
  Device::dropout(input, y, p, rng, site, x.size(0));
  return with_layout_of(x, y);
}

constexpr char kReference[] = "tempo::reference_dropout";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("dropout", &kernel_or_reference<kReference, takes_dropout<Device>, TORCH_BOX(&dropout<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
