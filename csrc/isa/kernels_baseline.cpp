// Kernels that every machine with this architecture supports (SSE2, NEON).
#define MESHREC_NAME "baseline"
#define MESHREC_KERNELS kernels_baseline
#include "isa/kernels.inl"
