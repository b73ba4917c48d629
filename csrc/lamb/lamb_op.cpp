// Binds the LAMB step's kernels to torch.ops.tempo.lamb_step_.
#include "lamb/lamb.h"

#include "common/op.h"

namespace {

using tempo::LambFactors;
using tempo::LambSettings;
using tempo::LambTensor;
using Tensors = std::vector<Tensor>;

// Tensors of fewer elements than this together go through both passes before the next ones, while their m, v and w (6 MiB) are in
// the caches.
constexpr int64_t kCachedElements = 1 << 19;

// Some tensors, cut into chunks of kLambChunk elements and numbered through.
class Chunks {
 public:
  Chunks(const LambTensor* tensors, int64_t count) : tensors_(tensors), first_(1, 0) {
    for (int64_t i = 0; i < count; ++i)
      first_.push_back(first_.back() + (tensors[i].numel + tempo::kLambChunk - 1) / tempo::kLambChunk);
  }
  int64_t count() const { return first_.back(); }
  int64_t first_of(int64_t tensor) const { return first_[tensor]; }

  // Calls f(tensor's number, first element, end, chunk's number), on all threads; each has the same chunks every time.
  template <class F>
  void in_parallel(bool backwards, const F& f) const {
    constexpr int64_t kGrain = kElementsPerThread / tempo::kLambChunk;
    torch::stable::parallel_for(0, count(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t chunk = backwards ? end - 1 - (k - begin) : k;
        const int64_t tensor = std::upper_bound(first_.begin(), first_.end(), chunk) - first_.begin() - 1;
        const int64_t start = (chunk - first_[tensor]) * tempo::kLambChunk;
        f(tensor, start, std::min(start + tempo::kLambChunk, tensors_[tensor].numel), chunk);
      }
    });
  }

 private:
  const LambTensor* tensors_;
  std::vector<int64_t> first_;
};

void step_with_trust_ratios(const LambTensor* tensors, int64_t count, const LambFactors& factors, float lr) {
  const Chunks chunks(tensors, count);
  std::vector<tempo::LambSums> sums(chunks.count());
  chunks.in_parallel(false, [&](int64_t i, int64_t begin, int64_t end, int64_t chunk) {
    sums[chunk] = TEMPO_CPU(lamb_moments)(tensors[i], factors, begin, end);
  });
  std::vector<float> rates(count);
  for (int64_t i = 0; i < count; ++i) {
    double weight = 0.0, update = 0.0;
    for (int64_t chunk = chunks.first_of(i); chunk < chunks.first_of(i + 1); ++chunk)
      weight += sums[chunk].weight, update += sums[chunk].update;
    rates[i] = tempo::lamb_rate(lr, std::sqrt(weight), std::sqrt(update));
  }
  // Backwards: what a thread has touched last is still in its cache.
  chunks.in_parallel(true, [&](int64_t i, int64_t begin, int64_t end, int64_t) {
    TEMPO_CPU(lamb_weights)(tensors[i], factors, rates[i], begin, end);
  });
}

struct Cpu : CpuDevice {
  static bool serves_gradient(ScalarType type) { return type == ScalarType::Float; }
  static bool serves_copy(ScalarType type) { return type == ScalarType::BFloat16; }

  static void lamb_step(const std::vector<LambTensor>& tensors, int, int, const LambSettings& settings, const Tensor& grad_norm,
                        const Tensor* found_inf, Tensor& step) {
    const float norm = *static_cast<const float*>(grad_norm.const_data_ptr());
    if (!tempo::lamb_applies(norm, found_inf ? static_cast<const float*>(found_inf->const_data_ptr()) : nullptr)) return;
    const int64_t count = ++*static_cast<int64_t*>(step.mutable_data_ptr());
    const LambFactors factors = tempo::lamb_factors(settings, norm, count);
    const int64_t num_tensors = static_cast<int64_t>(tensors.size());
    if (!settings.use_trust_ratio) {
      Chunks(tensors.data(), num_tensors).in_parallel(false, [&](int64_t i, int64_t begin, int64_t end, int64_t) {
        TEMPO_CPU(lamb_all)(tensors[i], factors, settings.lr, begin, end);
      });
      return;
    }
    for (int64_t begin = 0, end = 0; begin < num_tensors; begin = end) {
      int64_t elements = tensors[end++].numel;
      while (end < num_tensors && elements + tensors[end].numel <= kCachedElements) elements += tensors[end++].numel;
      step_with_trust_ratios(tensors.data() + begin, end - begin, factors, settings.lr);
    }
  }
};

struct Cuda : CudaDevice {
  static bool serves_gradient(ScalarType type) { return serves(type); }
  static bool serves_copy(ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Half; }

  static void lamb_step(const std::vector<LambTensor>& tensors, int grad_dtype, int copy_dtype, const LambSettings& settings,
                        const Tensor& grad_norm, const Tensor* found_inf, Tensor& step) {
    const int64_t count = static_cast<int64_t>(tensors.size());
    const int64_t bytes = tempo::cuda::lamb_workspace_bytes(tensors.data(), count, settings.use_trust_ratio);
    const Launch launch(step);
    Tensor workspace = torch::stable::new_empty(step, {bytes}, std::make_optional(ScalarType::Byte));
    launch.check(tempo::cuda::lamb_step(grad_dtype, copy_dtype, tensors.data(), count, settings,
                                        static_cast<const float*>(grad_norm.const_data_ptr()),
                                        found_inf ? static_cast<const float*>(found_inf->const_data_ptr()) : nullptr,
                                        static_cast<int64_t*>(step.mutable_data_ptr()), workspace.mutable_data_ptr(),
                                        launch.stream()),
                 "lamb_step_");
  }
};

// ---- what the kernels take ----

bool is_on_device_of(const Tensor& t, const Tensor& other) {
  return t.device().type() == other.device().type() && t.get_device_index() == other.get_device_index();
}

bool is_scalar(const Tensor& t, ScalarType type, const Tensor& on_device_of) {
  return t.scalar_type() == type && t.numel() == 1 && is_on_device_of(t, on_device_of);
}

// Contiguous tensors of one dtype that fit the parameters.
bool all_fit(const Tensors& tensors, const Tensors& params, ScalarType type, bool contiguous = true) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (t.scalar_type() != type || t.numel() != params[i].numel() || !is_on_device_of(t, params[i])) return false;
    if (contiguous && !t.is_contiguous()) return false;
  }
  return true;
}

template <class Device>
bool takes(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
           const Tensors& copies, const Tensor& step, const Tensor& grad_norm, const std::optional<Tensor>& found_inf) {
  const size_t count = params.size();
  if (grads.size() != count || exp_avgs.size() != count || exp_avg_sqs.size() != count) return false;
  if (!copies.empty() && copies.size() != count) return false;
  if (!is_scalar(step, ScalarType::Long, step) || !is_scalar(grad_norm, ScalarType::Float, step)) return false;
  if (found_inf.has_value() && !is_scalar(*found_inf, ScalarType::Float, step)) return false;
  if (count == 0) return true;
  const ScalarType grad_type = grads[0].scalar_type();
  if (!Device::serves_gradient(grad_type) || !is_on_device_of(params[0], step)) return false;
  if (!copies.empty() && !(Device::serves_copy(copies[0].scalar_type()) && all_fit(copies, params, copies[0].scalar_type())))
    return false;
  for (const Tensor& p : params)
    if (!is_on_device_of(p, step)) return false;
  return all_fit(params, params, ScalarType::Float) && all_fit(exp_avgs, params, ScalarType::Float) &&
         all_fit(exp_avg_sqs, params, ScalarType::Float) && all_fit(grads, params, grad_type, false);
}

// ---- the op ----

void call_reference(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                    const Tensors& copies, const Tensor& step, const Tensor& grad_norm, const std::optional<Tensor>& found_inf,
                    double lr, double beta1, double beta2, double eps, double weight_decay, double max_grad_norm,
                    bool use_trust_ratio, bool bias_correction) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(params),         from(grads),         from(exp_avgs),        from(exp_avg_sqs),
                          from(copies),         from(step),          from(grad_norm),       from(found_inf),
                          from(lr),             from(beta1),         from(beta2),           from(eps),
                          from(weight_decay),   from(max_grad_norm), from(use_trust_ratio), from(bias_correction)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("tempo::reference_lamb_step_", "", stack, TORCH_ABI_VERSION));
}

template <class Device>
void lamb_step(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor step,
               Tensor grad_norm, std::optional<Tensor> found_inf, double lr, double beta1, double beta2, double eps,
               double weight_decay, double max_grad_norm, bool use_trust_ratio, bool bias_correction) {
  if (!takes<Device>(params, grads, exp_avgs, exp_avg_sqs, copies, step, grad_norm, found_inf)) {
    call_reference(params, grads, exp_avgs, exp_avg_sqs, copies, step, grad_norm, found_inf, lr, beta1, beta2, eps, weight_decay,
                   max_grad_norm, use_trust_ratio, bias_correction);
    return;
  }
  Tensors dense_grads;
  std::vector<LambTensor> tensors;
  for (size_t i = 0; i < params.size(); ++i) {
    dense_grads.push_back(dense(grads[i]));
    if (params[i].numel() == 0) continue;
    tensors.push_back({static_cast<float*>(params[i].mutable_data_ptr()),
                       dense_grads[i].const_data_ptr(),
                       static_cast<float*>(exp_avgs[i].mutable_data_ptr()),
                       static_cast<float*>(exp_avg_sqs[i].mutable_data_ptr()),
                       copies.empty() ? nullptr : copies[i].mutable_data_ptr(),
                       params[i].numel()});
  }
  const LambSettings settings{beta1,
                              beta2,
                              static_cast<float>(lr),
                              static_cast<float>(eps),
                              static_cast<float>(weight_decay),
                              static_cast<float>(max_grad_norm),
                              use_trust_ratio,
                              bias_correction};
  Device::lamb_step(tensors, grads.empty() ? tempo::kFloat : kernel_dtype(grads[0].scalar_type()),
                    copies.empty() ? tempo::kFloat : kernel_dtype(copies[0].scalar_type()), settings, grad_norm,
                    found_inf.has_value() ? &*found_inf : nullptr, step);
}

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("lamb_step_", TORCH_BOX(&lamb_step<Device>));
}

}  // namespace

TEMPO_REGISTER(register_ops)
