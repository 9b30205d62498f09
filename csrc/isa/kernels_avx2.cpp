// Built with the flags for this instruction set (setup.py); empty on other architectures.
#if defined(__AVX2__)
#define MESHREC_NAME "avx2"
#define MESHREC_KERNELS kernels_avx2
#include "isa/kernels.inl"
#else
#include "isa/kernels.h"
namespace meshrec {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace meshrec
#endif
