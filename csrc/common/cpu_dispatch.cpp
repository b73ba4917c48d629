// Finds out which instruction sets this CPU has.
#include "common/kernels.h"

#include <cstdlib>
#include <cstring>

namespace tempo {
namespace {

int choose() {
#if defined(__x86_64__) && !defined(TEMPO_PLAIN)
  const char* wanted = std::getenv("TEMPO_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const bool at_most_avx2 = !any && std::strcmp(wanted, "avx512") != 0;
  const bool at_most_baseline = at_most_avx2 && std::strcmp(wanted, "avx2") != 0;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !at_most_avx2) return 2;
  if (has_avx2 && !at_most_baseline) return 1;
#endif
  return 0;
}

}  // namespace

int cpu_instruction_set() {
  static const int chosen = choose();
  return chosen;
}

const char* cpu_instruction_set_name() {
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  return names[cpu_instruction_set()];
}

}  // namespace tempo

// For the start-up report, through ctypes.
extern "C" __attribute__((visibility("default"))) const char* tempo_cpu_isa() { return tempo::cpu_instruction_set_name(); }
