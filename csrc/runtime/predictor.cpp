#include "predictor.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace meshrec {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

// A memory-mapped file; unmapped by the destructor.
class Mapped {
 public:
  explicit Mapped(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY);
    if (file < 0) fail(path + " cannot be opened. Export the model again.");
    struct stat status{};
    ::fstat(file, &status);
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) {
      memory_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    }
    ::close(file);
    if (memory_ == MAP_FAILED) fail(path + " cannot be mapped into memory.");
  }
  ~Mapped() {
    if (size_ > 0) ::munmap(memory_, size_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  char* at(std::size_t offset, std::size_t bytes) const {
    if (offset + bytes > size_) fail("weights.bin is too short. Export the model again.");
    return static_cast<char*>(memory_) + offset;
  }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

struct Layout {
  std::string torch, isa;
  std::int64_t num_dense = 0;
  std::vector<std::string> features;
  struct Weight {
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::size_t offset;
  };
  std::vector<Weight> weights;
};

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {{"float32", at::kFloat},
                                                              {"float16", at::kHalf},
                                                              {"bfloat16", at::kBFloat16},
                                                              {"uint8", at::kByte},
                                                              {"int64", at::kLong}};
  const auto found = known.find(name);
  if (found == known.end()) fail("layout.txt speaks of the dtype " + name + ", which this version lacks.");
  return found->second;
}

Layout read_layout(const std::string& folder) {
  std::ifstream file(folder + "/layout.txt");
  std::string line;
  if (!std::getline(file, line) || line != "meshrec-package 2") {
    fail(folder + " is no package of this version. Export the model again.");
  }
  Layout layout;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "torch") {
      words >> layout.torch;
    } else if (kind == "isa") {
      words >> layout.isa;
    } else if (kind == "dense") {
      words >> layout.num_dense;
    } else if (kind == "feature") {
      layout.features.push_back(line.substr(kind.size() + 1));
    } else if (kind == "weight") {
      std::string dtype;
      std::size_t num_dims = 0;
      Layout::Weight weight{};
      words >> dtype >> num_dims;
      weight.dtype = dtype_of(dtype);
      weight.shape.resize(num_dims);
      for (auto& dim : weight.shape) words >> dim;
      words >> weight.offset;
      layout.weights.push_back(std::move(weight));
    } else {
      fail("layout.txt has a line of an unknown kind: " + line);
    }
    if (!words && kind != "feature") fail("layout.txt has a damaged line: " + line);
  }
  return layout;
}

// The real path of a folder. A link that is turned to another package while this one loads must not mix the
// two.
std::string resolved(const std::string& folder) {
  std::error_code error;
  const auto found = std::filesystem::canonical(folder, error);
  return error ? folder : found.string();
}

// The device and inode of the folder that has this name now.
std::pair<dev_t, ino_t> identity(const std::string& folder) {
  struct stat found{};
  if (::stat(folder.c_str(), &found) != 0) return {0, 0};
  return {found.st_dev, found.st_ino};
}

void check_machine(const Layout& layout, const std::string& folder) {
  std::string isa = at::get_cpu_capability();
  if (layout.torch != TORCH_VERSION) {
    fail(folder + " holds a program for torch " + layout.torch +
         ", and this is " TORCH_VERSION
         ". Export the model with this torch, or compile the package anew: meshrec export " +
         folder + " --out NEW");
  }
  if (layout.isa != isa) {
    fail(folder + " holds a program for " + layout.isa + ", and this machine has " + isa +
         ". Export the model on it, or compile the package anew: meshrec export " + folder + " --out NEW");
  }
}

}  // namespace

struct Predictor::State {
  explicit State(const std::string& folder, std::size_t num_runners)
      : layout(read_layout(folder)), file(folder + "/weights.bin") {
    check_machine(layout, folder);
    if (!std::ifstream(folder + "/program.pt2")) {
      fail(folder + " holds no compiled program. Export the model where a C++ compiler is found.");
    }
    for (const auto& weight : layout.weights) {
      std::size_t bytes = c10::elementSize(weight.dtype);
      for (const auto dim : weight.shape) bytes *= static_cast<std::size_t>(dim);
      weights.push_back(at::from_blob(file.at(weight.offset, bytes), weight.shape, weight.dtype));
    }
    loader =
        std::make_unique<torch::inductor::AOTIModelPackageLoader>(folder + "/program.pt2", "model",
                                                                  /*run_single_threaded=*/false, num_runners);
  }

  Layout layout;
  Mapped file;
  std::vector<at::Tensor> weights;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;
};

Predictor::Predictor(const std::string& folder, std::size_t num_runners) {
  const std::string place = resolved(folder);
  const auto before = identity(place);
  state_ = std::make_unique<State>(place, num_runners);
  if (identity(place) != before) fail(place + " became another package while it was read. Load it again.");
}
Predictor::~Predictor() = default;
Predictor::Predictor(Predictor&&) noexcept = default;
Predictor& Predictor::operator=(Predictor&&) noexcept = default;

const std::vector<std::string>& Predictor::features() const { return state_->layout.features; }
std::int64_t Predictor::num_dense() const { return state_->layout.num_dense; }

std::vector<float> Predictor::predict(const float* dense, std::int64_t batch,
                                      const std::vector<Feature>& given) const {
  const auto& names = features();
  if (given.size() != names.size()) {
    fail("the package has " + std::to_string(names.size()) + " features; " + std::to_string(given.size()) +
         " were given.");
  }
  for (std::int64_t i = 0; i < batch * num_dense(); ++i) {
    if (!std::isfinite(dense[i])) {
      fail("dense is NaN or infinite in sample " + std::to_string(i / num_dense()) + ".");
    }
  }
  const c10::InferenceMode guard;
  std::vector<at::Tensor> inputs = state_->weights;
  const auto tensor = [](const void* data, std::vector<std::int64_t> shape, at::ScalarType dtype) {
    return at::from_blob(const_cast<void*>(data), shape, dtype);
  };
  inputs.push_back(tensor(dense, {batch, num_dense()}, at::kFloat));
  for (const auto& feature : given) inputs.push_back(tensor(feature.ids, {feature.num_ids}, at::kLong));
  for (std::size_t f = 0; f < given.size(); ++f) {
    std::int64_t sum = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      if (given[f].lengths[b] < 0) fail("feature '" + names[f] + "': a length is below 0.");
      sum += given[f].lengths[b];
    }
    if (sum != given[f].num_ids) {
      fail("feature '" + names[f] + "': the lengths sum to " + std::to_string(sum) + ", but there are " +
           std::to_string(given[f].num_ids) + " ids.");
    }
    inputs.push_back(tensor(given[f].lengths, {batch}, at::kLong));
  }
  at::Tensor scores = state_->loader->run(inputs).at(0).contiguous();
  const float* data = scores.const_data_ptr<float>();
  return {data, data + scores.numel()};
}

}  // namespace meshrec
