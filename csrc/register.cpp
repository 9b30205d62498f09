// Registers all op schemas; no other file does. Each implementation is registered next to its code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(meshrec, m) {
#define SCHEMA(...) m.def(__VA_ARGS__);
#include "schemas.inc"
#undef SCHEMA
}
