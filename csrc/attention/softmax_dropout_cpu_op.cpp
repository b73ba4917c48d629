// Binds attention's CPU kernels to torch.ops.tempo.softmax_dropout_*.
#include "attention/softmax_dropout_op.h"

namespace {

Tensor softmax_dropout_forward(Tensor scores, std::optional<Tensor> mask, double scale, double p, Tensor rng, int64_t site,
                               bool causal) {
  auto shape = softmax_shape(scores, scale, causal);
  const Tensor kept_mask = mask.has_value() ? set_mask(shape, *mask, scores) : scores;
  const auto draw = dropout_draw(p, rng, site, scores.numel(), scores.size(0));
  Tensor dropped = p == 0.0 ? empty_tensor(scores) : torch::stable::empty_like(scores);
  const int dtype = kernel_dtype(scores.scalar_type());
  void* scores_data = scores.mutable_data_ptr();
  void* dropped_data = p == 0.0 ? nullptr : dropped.mutable_data_ptr();
  parallel_over_rows(scores.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
    std::vector<float> row(shape.keys + tempo::kRowPadding);
    std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
    TEMPO_CPU(softmax_dropout_forward)(dtype, scores_data, dropped_data, shape, draw, row.data(), words.data(), begin, end);
  });
  count_as_written(scores);
  return dropped;
}

Tensor softmax_dropout_backward(Tensor grad_dropped, Tensor probabilities, double scale, double p, Tensor rng, int64_t site) {
  const auto shape = softmax_shape(probabilities, scale, false);
  const auto draw = dropout_draw(p, rng, site, probabilities.numel(), probabilities.size(0));
  Tensor dropped = p == 0.0 ? empty_tensor(probabilities) : torch::stable::empty_like(probabilities);
  const int dtype = kernel_dtype(probabilities.scalar_type());
  void* grad_data = grad_dropped.mutable_data_ptr();
  const void* probability_data = probabilities.const_data_ptr();
  void* dropped_data = p == 0.0 ? nullptr : dropped.mutable_data_ptr();
  parallel_over_rows(probabilities.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
    TEMPO_CPU(softmax_dropout_backward)(dtype, grad_data, probability_data, dropped_data, shape, draw, words.data(), begin, end);
  });
  count_as_written(grad_dropped);
  return dropped;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) {
  m.impl("softmax_dropout_forward", &kernel_or_reference<kForward, takes_softmax_forward, TORCH_BOX(&softmax_dropout_forward)>);
  m.impl("softmax_dropout_backward",
         &kernel_or_reference<kBackward, takes_softmax_backward, TORCH_BOX(&softmax_dropout_backward)>);
}
