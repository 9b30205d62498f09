// Scores an exported package, from C++ without Python. predict.cpp is a whole program that uses this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace meshrec {

// The ids of one feature for a batch, sample by sample; sample b has lengths[b] of them.
struct Feature {
  const std::int64_t* ids;
  std::int64_t num_ids;
  const std::int64_t* lengths;
};

// How a package is opened.
struct Options {
  // This many calls of `predict` run at once, the others wait.
  std::size_t num_runners = 1;
  // Compare the files that are used with their checksums first, which reads all of them. Without, a damaged
  // file gives wrong scores or ends the process.
  bool verify = true;
  // PEM file of the ed25519 public key that must have signed the package; empty: none. Needs a library that
  // was built with OpenSSL.
  std::string public_key = {};
  // Copy the weights into memory of this process. Otherwise they are mapped from the file: all predictors on
  // a machine share the pages, and nobody may write to the file.
  bool copy_weights = false;
};

// A package that `meshrec export` or meshrec.export.export wrote. Any number of threads may call it.
//
// Errors are thrown as std::runtime_error and say what to do. The constructor throws for a folder that is not
// a package or is damaged, a missing or wrong signature, and a program made for another torch or instruction
// set (export the model on this machine). `predict` throws for lengths that do not add up, NaN, infinity, and
// ids outside their table, with feature and sample; and if the file of the weights was cut short. A handler
// of SIGBUS, set when the first file is mapped, keeps that from ending the process.
class Predictor {
 public:
  explicit Predictor(const std::string& folder, std::size_t num_runners = 1);
  Predictor(const std::string& folder, const Options& options);
  ~Predictor();
  Predictor(Predictor&&) noexcept;
  Predictor& operator=(Predictor&&) noexcept;

  const std::vector<std::string>& features() const;
  std::int64_t num_dense() const;

  // Scores a batch. dense: [batch, num_dense]; features: in the order of features(). Returns [batch] scores.
  std::vector<float> predict(const float* dense, std::int64_t batch,
                             const std::vector<Feature>& features) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace meshrec
