#include "predictor.h"

#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "verify.h"

// From libmeshrec.so: a mapping that survives truncation of the file (csrc/host/mapping.h).
extern "C" void* meshrec_map(int file, std::size_t bytes, int* guard);
extern "C" std::uint64_t meshrec_lost_pages(int guard);
extern "C" void meshrec_unmap(void* address, std::size_t bytes, int guard);
extern "C" void meshrec_expect_misses(int guard);

namespace meshrec {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

// Returns the memory limit for this process in bytes: physical memory, or the limit of the control group.
std::size_t memory_limit() {
  std::size_t found =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::size_t limit = 0;
    if (std::ifstream(path) >> limit) found = std::min(found, limit);  // "max" is not a number
  }
  return found;
}

// Weights in memory: the mapped file, or a copy of it. Released by the destructor.
class Memory {
 public:
  Memory(const std::string& path, bool copy)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status{};
    if (file_ < 0 || ::fstat(file_, &status) != 0) {
      release();
      fail(path + " cannot be opened. Export the model again.");
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0 && copy) {
      memory_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory_ == MAP_FAILED) memory_ = nullptr;
      if (memory_ != nullptr && !read_all()) {
        release();
        fail(path + " cannot be read. Export the model again.");
      }
    } else if (size_ > 0) {
      is_mapped_ = true;
      memory_ = meshrec_map(file_, size_, &guard_);
      if (memory_ != nullptr && size_ > memory_limit()) meshrec_expect_misses(guard_);
    }
    if (size_ > 0 && memory_ == nullptr) {
      release();
      fail(path + " does not fit into memory. Free memory, or use a larger machine.");
    }
  }
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* at(std::size_t offset, std::size_t bytes) const {
    // Written so that a forged offset cannot make a sum overflow.
    if (offset > size_ || bytes > size_ - offset) fail(path_ + " is too short. Export the model again.");
    return static_cast<char*>(memory_) + offset;
  }

  // Throws if the file was truncated after it was mapped: results computed from it are wrong.
  void check() const {
    struct stat status{};
    if (!is_mapped_) return;
    if (::fstat(file_, &status) == 0 && static_cast<std::size_t>(status.st_size) >= size_ &&
        meshrec_lost_pages(guard_) == 0) {
      return;
    }
    fail(path_ +
         " was cut short while it was in use. Copy the package again, and load it; never write into a "
         "package that is in use.");
  }

 private:
  bool read_all() const {
    for (std::size_t done = 0; done < size_;) {
      const ssize_t count =
          ::pread(file_, static_cast<char*>(memory_) + done, size_ - done, static_cast<off_t>(done));
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
    }
    return true;
  }
  void release() {
    if (memory_ != nullptr && is_mapped_) meshrec_unmap(memory_, size_, guard_);
    if (memory_ != nullptr && !is_mapped_) ::munmap(memory_, size_);
    if (file_ >= 0) ::close(file_);
    memory_ = nullptr;
    file_ = -1;
  }

  std::string path_;
  int file_;  // kept open, because another file may get the path
  void* memory_ = nullptr;
  std::size_t size_ = 0;
  bool is_mapped_ = false;
  int guard_ = -1;
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
      // The name follows in the line. It is not needed, because the program takes weights by position.
      words >> weight.offset;
      layout.weights.push_back(std::move(weight));
    } else {
      fail("layout.txt has a line of an unknown kind: " + line);
    }
    if (!words && kind != "feature") fail("layout.txt has a damaged line: " + line);
  }
  return layout;
}

// Returns the real path of a folder: if a symbolic link is switched to another package during loading, the
// two must not mix.
std::string resolved(const std::string& folder) {
  std::error_code error;
  const auto found = std::filesystem::canonical(folder, error);
  return error ? folder : found.string();
}

// Returns device and inode of the folder that has this name now.
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

namespace {

// Checks the files in a package against the signature or checksums, according to the options, before any file
// is used.
Layout checked_layout(const std::string& folder, const Options& options) {
  if (!std::ifstream(folder + "/layout.txt")) {
    fail(folder + " is no package of this version. Export the model again.");
  }
  if (!std::ifstream(folder + "/program.pt2")) {
    fail(folder + " holds no compiled program. Export the model where a C++ compiler is found.");
  }
  const std::vector<std::string> used = {"layout.txt", "weights.bin", "program.pt2"};
  if (!options.public_key.empty()) {
    verify_signature(folder, used, options.public_key);
  } else if (options.verify) {
    verify_checksums(folder, used);
  }
  return read_layout(folder);
}

// Returns the folders that this process has loaded package programs from; empty without /proc.
std::set<std::string> extracted() {
  static const std::regex form(" (/.*/aotinductor_[A-Za-z0-9]+)/program/data/aotinductor/model/");
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::smatch match;
    if (std::regex_search(line, match, form)) found.insert(match[1]);
  }
  return found;
}

// Loads a compiled program. torch extracts the library into a temporary folder, which would remain if the
// process got SIGKILL. So the folder is removed as soon as the library is loaded.
std::unique_ptr<torch::inductor::AOTIModelPackageLoader> load(const std::string& path,
                                                              std::size_t num_runners) {
  static std::mutex loading;
  const std::lock_guard lock(loading);
  // The lock keeps the two listings apart from another load: every new folder is from this one.
  const auto before = extracted();
  auto loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
      path, "model", /*run_single_threaded=*/false, num_runners);
  for (const auto& folder : extracted()) {
    std::error_code ignored;
    if (!before.contains(folder)) std::filesystem::remove_all(folder, ignored);
  }
  return loader;
}

}  // namespace

struct Predictor::State {
  State(const std::string& folder, const Options& options)
      : layout(checked_layout(folder, options)), file(folder + "/weights.bin", options.copy_weights) {
    check_machine(layout, folder);
    for (const auto& weight : layout.weights) {
      std::size_t bytes = c10::elementSize(weight.dtype);
      for (const auto dim : weight.shape) bytes *= static_cast<std::size_t>(dim);
      weights.push_back(at::from_blob(file.at(weight.offset, bytes), weight.shape, weight.dtype));
    }
    loader = load(folder + "/program.pt2", options.num_runners);
  }

  // Destroyed in reverse order: the loader and the tensors must go before the memory that they read.
  Layout layout;
  Memory file;
  std::vector<at::Tensor> weights;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;
};

Predictor::Predictor(const std::string& folder, std::size_t num_runners)
    : Predictor(folder, Options{.num_runners = num_runners}) {}

Predictor::Predictor(const std::string& folder, const Options& options) {
  const std::string place = resolved(folder);
  const auto before = identity(place);
  state_ = std::make_unique<State>(place, options);
  // The files were opened by name, so the folder must still be the same.
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
    // from_blob takes no const memory. The program does not write to these inputs.
    return at::from_blob(const_cast<void*>(data), shape, dtype);
  };
  // In the order in which the program takes them: weights, dense values, IDs, lengths.
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
  // After the run: pages may be lost while the program reads them.
  state_->file.check();
  const float* data = scores.const_data_ptr<float>();
  return {data, data + scores.numel()};
}

}  // namespace meshrec
