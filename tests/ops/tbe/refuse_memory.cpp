// Preloaded by a test: C++ gets no memory of as many bytes as are refused, or more.
#include <cstdlib>
#include <new>

static size_t refused = 0;

extern "C" void refuse(size_t num_bytes) { refused = num_bytes; }

void* operator new(size_t num_bytes) {
  void* memory = refused > 0 && num_bytes >= refused ? nullptr : std::malloc(num_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
