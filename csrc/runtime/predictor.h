// Scores of an exported package, from C++ without Python. See predict.cpp for a whole program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace meshrec {

// The ids of a feature for a batch: those of the first sample first; lengths[b] of them are of sample b.
struct Feature {
  const std::int64_t* ids;
  std::int64_t num_ids;
  const std::int64_t* lengths;
};

// A package that `meshrec export` or meshrec.export.export wrote. Its weights are mapped: all predictors of a
// machine share their pages. Safe to call from any number of threads; `num_runners` calls run at once, others
// wait for one.
//
// What cannot be is thrown as std::runtime_error with words: a folder that is no package, a program made for
// another torch or instruction set (export the model on this machine), and in `predict` lengths that do not
// sum, NaN, and ids outside their table, by feature and sample.
class Predictor {
 public:
  explicit Predictor(const std::string& folder, std::size_t num_runners = 1);
  ~Predictor();
  Predictor(Predictor&&) noexcept;
  Predictor& operator=(Predictor&&) noexcept;

  const std::vector<std::string>& features() const;
  std::int64_t num_dense() const;

  // dense: [batch, num_dense]; features: in the order of features(). Gives [batch] scores.
  std::vector<float> predict(const float* dense, std::int64_t batch,
                             const std::vector<Feature>& features) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace meshrec
