// Built with this instruction set's flags (setup.py); empty elsewhere.
#if defined(__AVX512F__)
#define MESHREC_NAME "avx512"
#define MESHREC_KERNELS kernels_avx512
#include "tbe/kernels.inl"
#else
#include "tbe/kernels.h"
namespace meshrec {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace meshrec
#endif
