// Ranks of target scores, and a running top k, over blocks of scores. ops/scores/naive.py documents
// arguments and results.
#include <cmath>

#include "isa/kernels.h"
#include "stable_abi.h"

namespace meshrec {
namespace {

constexpr int64_t kRows = 16;  // rows per task

Tensor check_scores(const Tensor& scores, const char* name) {
  if (scores.dim() != 2 || scores.scalar_type() != ScalarType::Float) {
    fail(name, ": scores must be a float32 matrix");
  }
  // Columns are numbered by 32 bits.
  if (scores.size(1) > INT32_MAX / 2) fail(name, ": scores have ", scores.size(1), " columns, too many");
  return as_contiguous(scores);
}

template <typename Work>
void for_rows(int64_t num_rows, const Work& work) {
  parallel_tasks((num_rows + kRows - 1) / kRows,
                 [&](int64_t task) { work(task * kRows, std::min(num_rows, (task + 1) * kRows)); });
}

std::tuple<Tensor, Tensor, Tensor> rank_scores(Tensor scores, Tensor targets) {
  const Tensor matrix = check_scores(scores, "rank_scores");
  const int64_t num_rows = matrix.size(0);
  if (targets.scalar_type() != ScalarType::Float || targets.dim() != 1 || targets.size(0) != num_rows) {
    fail("rank_scores: targets must be float32 [", num_rows, "], a value per row of the scores");
  }
  const Tensor values = as_contiguous(targets);
  Tensor above = torch::stable::new_empty(values, {num_rows});
  Tensor equal = torch::stable::new_empty(values, {num_rows});
  Tensor log_sums = torch::stable::new_empty(values, {num_rows});
  RankArgs args{};
  args.scores = static_cast<const float*>(matrix.const_data_ptr());
  args.targets = static_cast<const float*>(values.const_data_ptr());
  args.columns = matrix.size(1);
  args.above = static_cast<float*>(above.mutable_data_ptr());
  args.equal = static_cast<float*>(equal.mutable_data_ptr());
  args.log_sums = static_cast<float*>(log_sums.mutable_data_ptr());
  for_rows(num_rows, [&](int64_t first, int64_t last) {
    RankArgs rows = args;
    rows.first = first, rows.last = last;
    kernels().rank(rows);
  });
  return {above, equal, log_sums};
}

// Integers that sort like (score descending, position ascending), with NaN before all other scores and equal
// zeros.
uint64_t sort_key(float score, uint64_t position) {
  uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.f);
  bits = std::isnan(score) ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(~bits) << 32 | position;
}

// Candidates for the K best of a row: the best so far, at positions 0 to K - 1, and columns, from K on.
class RowMerger {
 public:
  RowMerger(int64_t k) : k_(k), columns_(std::max<int64_t>(k, kRoom)), scores_(k), ids_(k) {}

  // Updates the K best scores and IDs, best first, with a row of scores for the columns' IDs.
  void merge(const float* row, int64_t num_columns, const int64_t* column_ids, float* best,
             int64_t* best_ids) {
    LargerArgs args{};
    args.row = row, args.end = num_columns;
    args.columns = columns_.data(), args.room = int64_t(columns_.size());
    args.threshold = best[k_ - 1];
    keys_.clear();
    // If the K-th is NaN, all are, and nothing is larger.
    while (args.begin < num_columns && !std::isnan(args.threshold)) {
      args.count = 0;
      args.begin = kernels().find_larger(args);
      if (args.count == 0) continue;
      if (keys_.empty()) {
        for (int64_t i = 0; i < k_; ++i) keys_.push_back(sort_key(best[i], i));
      }
      for (int64_t i = 0; i < args.count; ++i) {
        keys_.push_back(sort_key(row[columns_[i]], k_ + columns_[i]));
      }
      std::nth_element(keys_.begin(), keys_.begin() + (k_ - 1), keys_.end());
      keys_.resize(k_);
      const uint64_t last = keys_[k_ - 1] & UINT32_MAX;
      args.threshold = int64_t(last) < k_ ? best[last] : row[int64_t(last) - k_];
    }
    if (keys_.empty()) return;
    std::sort(keys_.begin(), keys_.end());
    scores_.assign(best, best + k_);
    ids_.assign(best_ids, best_ids + k_);
    for (int64_t i = 0; i < k_; ++i) {
      const int64_t position = keys_[i] & UINT32_MAX;
      best[i] = position < k_ ? scores_[position] : row[position - k_];
      best_ids[i] = position < k_ ? ids_[position] : column_ids[position - k_];
    }
  }

 private:
  static constexpr int64_t kRoom = 512;
  int64_t k_;
  std::vector<int32_t> columns_;
  std::vector<uint64_t> keys_;
  std::vector<float> scores_;
  std::vector<int64_t> ids_;
};

void merge_top_k(Tensor scores, Tensor ids, Tensor best_scores, Tensor best_ids) {
  const Tensor matrix = check_scores(scores, "merge_top_k");
  const int64_t num_rows = matrix.size(0), num_columns = matrix.size(1);
  if (ids.scalar_type() != ScalarType::Long || ids.dim() != 1 || ids.size(0) != num_columns) {
    fail("merge_top_k: ids must be int64 [", num_columns, "], an ID per column of the scores");
  }
  const bool fits = best_scores.scalar_type() == ScalarType::Float && best_scores.dim() == 2 &&
                    best_ids.scalar_type() == ScalarType::Long && best_ids.dim() == 2 &&
                    best_scores.size(0) == num_rows && best_ids.size(0) == num_rows &&
                    best_scores.size(1) == best_ids.size(1) && best_scores.is_contiguous() &&
                    best_ids.is_contiguous() && best_ids.size(1) <= INT32_MAX / 2;
  if (!fits)
    fail("merge_top_k: best_scores and best_ids must be contiguous, float32 and int64 [", num_rows, ", K]");
  const int64_t k = best_scores.size(1);
  if (k == 0) return;
  const Tensor column_ids = as_contiguous(ids);
  const auto* from = static_cast<const float*>(matrix.const_data_ptr());
  const auto* id = static_cast<const int64_t*>(column_ids.const_data_ptr());
  auto* best = static_cast<float*>(best_scores.mutable_data_ptr());
  auto* best_id = static_cast<int64_t*>(best_ids.mutable_data_ptr());
  for_rows(num_rows, [&](int64_t first, int64_t last) {
    RowMerger merger(k);
    for (int64_t b = first; b < last; ++b) {
      merger.merge(from + b * num_columns, num_columns, id, best + b * k, best_id + b * k);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("rank_scores", TORCH_BOX(&rank_scores));
  m.impl("merge_top_k", TORCH_BOX(&merge_top_k));
}

}  // namespace meshrec
