// Scores requests with an exported package, from C++ without Python. predict.cpp is a complete program that
// uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace meshrec {

// IDs for a feature in a batch, sample by sample; sample b has lengths[b] IDs.
struct Feature {
  const std::int64_t* ids;
  std::int64_t num_ids;
  const std::int64_t* lengths;
};

// How to open a package.
struct Options {
  // How many calls to `predict` may run at once; others wait.
  std::size_t num_runners = 1;
  // Verify the checksums of the files used first, which reads all of them. Without this, a damaged file gives
  // wrong scores or ends the process.
  bool verify = true;
  // PEM file with the ed25519 public key that must have signed the package; empty: none. Needs a library
  // built with OpenSSL.
  std::string public_key = {};
  // Copy the weights into this process's memory. Otherwise they are mapped from the file: all predictors on a
  // machine share the pages, and nobody may write to the file.
  bool copy_weights = false;
};

// A package written by `meshrec export` or meshrec.export.export. Thread-safe.
//
// Errors are thrown as std::runtime_error, with the next step in the message. The constructor throws for a
// folder that is damaged or not a package, for a missing or wrong signature, and for a program made for
// another torch or instruction set (export the model on this machine). `predict` throws for lengths that do
// not add up, NaN, infinity, and IDs outside the table, naming feature and sample; and if the weight file was
// truncated. A SIGBUS handler, set when the first file is mapped, prevents truncation from ending the
// process.
class Predictor {
 public:
  explicit Predictor(const std::string& folder, std::size_t num_runners = 1);
  Predictor(const std::string& folder, const Options& options);
  ~Predictor();
  Predictor(Predictor&&) noexcept;
  Predictor& operator=(Predictor&&) noexcept;

  const std::vector<std::string>& features() const;
  std::int64_t num_dense() const;

  // Scores a batch. dense: [batch, num_dense]; features: in the order of features(). Returns scores [batch].
  std::vector<float> predict(const float* dense, std::int64_t batch,
                             const std::vector<Feature>& features) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace meshrec
