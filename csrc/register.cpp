// The one place where op schemas are registered. Implementations register themselves beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(meshrec, m) {
#define SCHEMA(...) m.def(__VA_ARGS__);
#include "schemas.inc"
#undef SCHEMA
}
