// Binds dropout's CPU kernel to torch.ops.tempo.dropout.
#include "common/op.h"
#include "dropout/dropout.h"

namespace {

bool takes_dropout(const StableIValue* stack) { return is_plain(Argument(stack[0])); }

Tensor dropout(Tensor x, double p, Tensor rng, int64_t site) {
  if (p == 0.0) return torch::stable::clone(x);
  const Tensor input = dense(x);
  Tensor y = torch::stable::empty_like(input);
  const auto draw = dropout_draw(p, rng, site, x.numel(), x.size(0));
  const int dtype = kernel_dtype(x.scalar_type());
  const void* source = input.const_data_ptr();
  void* target = y.mutable_data_ptr();
  parallel_over_elements(x.numel(), tempo::kColumnPadding, [&](int64_t begin, int64_t end) {
    TEMPO_CPU(dropout)(dtype, source, target, draw, begin, end);
  });
  return with_layout_of(x, y);
}


constexpr char kReference[] = "tempo::reference_dropout";

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) {
  m.impl("dropout", &kernel_or_reference<kReference, takes_dropout, TORCH_BOX(&dropout)>);
}
