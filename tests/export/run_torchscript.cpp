// run_torchscript LIBRARY MODEL INPUTS OUTPUT: a program without Python that runs a TorchScript file.
// INPUTS holds a tuple of tensors, as torch.save writes it; the result goes to OUTPUT, for torch.load.
#include <dlfcn.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int, char** argv) {
  // The operators register themselves as the library is loaded.
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << '\n';
    return 1;
  }
  auto model = torch::jit::load(argv[2]);
  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const auto inputs = torch::jit::pickle_load(bytes).toTupleRef().elements().vec();
  const auto result = torch::jit::pickle_save(model.forward(inputs));
  std::ofstream(argv[4], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
}
