// The kernels that every machine of the architecture runs (SSE2, NEON).
#define MESHREC_NAME "baseline"
#define MESHREC_KERNELS kernels_baseline
#include "isa/kernels.inl"
