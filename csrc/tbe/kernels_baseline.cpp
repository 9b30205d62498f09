// What every machine of the architecture runs (SSE2, NEON), and the choice among the instruction sets.
#define MESHREC_NAME "baseline"
#define MESHREC_KERNELS kernels_baseline
#include <cstdlib>

#include "tbe/kernels.inl"

namespace meshrec {

static const Kernels* choose() {
  const Kernels* sets[3] = {kernels_baseline(), nullptr, nullptr};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    sets[1] = kernels_avx2();
  if (sets[1] != nullptr && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    sets[2] = kernels_avx512();
#endif
  const char* wanted = std::getenv("MESHREC_ISA");
  const Kernels* best = sets[0];
  for (const Kernels* set : sets) {
    if (set == nullptr) continue;
    best = set;
    if (wanted != nullptr && std::strcmp(wanted, set->name) == 0) break;
  }
  return best;
}

bool prefetch_to_l1() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

}  // namespace meshrec
