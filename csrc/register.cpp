// Registers the schemas for all operators; no other file does. Implementations are registered next to their
// code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(meshrec, m) {
#define SCHEMA(...) m.def(__VA_ARGS__);
#include "schemas.inc"
#undef SCHEMA
}
