// Selects the instruction set, once per process.
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "isa/kernels.h"

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
  // Sets are in ascending order. An unknown or unsupported MESHREC_ISA leaves the best one.
  const Kernels* best = sets[0];
  for (const Kernels* set : sets) {
    if (set == nullptr) continue;
    best = set;
    if (wanted != nullptr && std::strcmp(wanted, set->name) == 0) break;
  }
  return best;
}

static bool comes_sooner_to_l1() {
  if (const char* wanted = std::getenv("MESHREC_PREFETCH")) return std::strcmp(wanted, "l1") == 0;
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__builtin_cpu_is("amd") || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  const unsigned family = ((eax >> 8) & 0xf) + ((eax >> 20) & 0xff);
  return family >= 0x1a;  // Zen 5
#else
  return false;
#endif
}

bool prefetch_to_l1() {
  static const bool chosen = comes_sooner_to_l1();
  return chosen;
}

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

}  // namespace meshrec
