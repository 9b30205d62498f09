// Built with the flags for this instruction set (setup.py); empty on other architectures.
#if defined(__AVX512F__)
#define MESHREC_NAME "avx512"
#define MESHREC_KERNELS kernels_avx512
#include "isa/kernels.inl"
#else
#include "isa/kernels.h"
namespace meshrec {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace meshrec
#endif
