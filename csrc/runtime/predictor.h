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

// A package that `meshrec export` or meshrec.export.export wrote. Its weights are memory-mapped: all
// predictors on a machine share the pages. Any number of threads may call it; `num_runners` calls run at
// once, the others wait.
//
// Errors are thrown as std::runtime_error and say what to do: a folder that is not a package, a program made
// for another torch or instruction set (export the model on this machine); in `predict`, lengths that do not
// add up, NaN, infinity, and ids outside their table, with feature and sample.
class Predictor {
 public:
  explicit Predictor(const std::string& folder, std::size_t num_runners = 1);
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
