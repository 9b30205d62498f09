// Averages the terms from all ranks, element by element and in rank order. ops/dist/average_naive.py
// documents arguments and results.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "host/host_link.h"
#include "stable_abi.h"

namespace meshrec {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kBlock = 1 << 14;  // elements: their sum and a term stay in the L2 cache

// Sums are float (double for double values). Terms are only added, and the sum is scaled once. The compiler
// cannot contract this to fused operations, whose bits would depend on the instruction set.
template <typename Value, typename Sum>
class Averager {
 public:
  Averager(Value* mean, std::vector<const Value*> terms, int64_t num_ranks, int64_t link, int64_t exchange)
      : mean_(mean), terms_(std::move(terms)), num_ranks_(num_ranks), link_(link), exchange_(exchange) {}

  // Returns false if the memory of a rank could not be read.
  bool average(int64_t begin, int64_t end) const {
    std::vector<Sum> sum(std::min(kBlock, end - begin));
    // Without a link, the terms are in this process, and are read in place.
    std::vector<Value> copy(link_ != 0 ? sum.size() : 0);
    for (; begin < end; begin += kBlock) {
      const int64_t size = std::min(kBlock, end - begin);
      for (int64_t rank = 0; rank < num_ranks_; ++rank) {
        const Value* term = of_rank(rank, begin, size, copy.data());
        if (term == nullptr) return false;
        if (rank == 0) {
          for (int64_t i = 0; i < size; ++i) sum[i] = static_cast<Sum>(term[i]);
        } else {
          for (int64_t i = 0; i < size; ++i) sum[i] += static_cast<Sum>(term[i]);
        }
      }
      const Sum scale = Sum(1) / static_cast<Sum>(num_ranks_);
      for (int64_t i = 0; i < size; ++i) mean_[begin + i] = static_cast<Value>(sum[i] * scale);
    }
    return true;
  }

 private:
  const Value* of_rank(int64_t rank, int64_t begin, int64_t size, Value* copy) const {
    if (link_ == 0) return terms_[rank] + begin;
    const int64_t width = sizeof(Value);
    return static_cast<const Value*>(
        read_from_link(link_, exchange_, rank, begin * width, size * width, copy));
  }

  Value* const mean_;
  const std::vector<const Value*> terms_;
  const int64_t num_ranks_, link_, exchange_;
};

template <typename Value, typename Sum = float>
void average_typed(Tensor& mean, const std::vector<Tensor>& terms, int64_t num_ranks, int64_t link,
                   int64_t exchange) {
  std::vector<const Value*> starts;
  for (const Tensor& term : terms) starts.push_back(static_cast<const Value*>(term.const_data_ptr()));
  const Averager<Value, Sum> averager(static_cast<Value*>(mean.mutable_data_ptr()), starts, num_ranks, link,
                                      exchange);
  // A thread only sets the flag; the calling thread throws.
  std::atomic<bool> failed = false;
  parallel_for(mean.numel(), kBlock, [&](int64_t begin, int64_t end) {
    if (!averager.average(begin, end)) failed = true;
  });
  if (failed) throw std::runtime_error(kPeerLost);
}

void average_ranks(Tensor mean, std::vector<Tensor> terms, int64_t num_ranks, int64_t link,
                   int64_t exchange) {
  if (link == 0 && int64_t(terms.size()) != num_ranks)
    fail("got ", terms.size(), " terms for ", num_ranks, " ranks");
  if (!mean.is_contiguous()) fail("the mean must be contiguous");
  for (const Tensor& term : terms) {
    if (term.numel() != mean.numel() || term.scalar_type() != mean.scalar_type() || !term.is_contiguous())
      fail("terms must be contiguous, and have the type and the ", mean.numel(), " elements of the mean");
  }
  switch (mean.scalar_type()) {
    case ScalarType::Float:
      return average_typed<float>(mean, terms, num_ranks, link, exchange);
    case ScalarType::Double:
      return average_typed<double, double>(mean, terms, num_ranks, link, exchange);
    case ScalarType::Half:
      return average_typed<Half>(mean, terms, num_ranks, link, exchange);
    case ScalarType::BFloat16:
      return average_typed<BFloat16>(mean, terms, num_ranks, link, exchange);
    default:
      fail("means are of float64, float32, float16 or bfloat16 values, got another type");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("average_ranks", TORCH_BOX(&average_ranks)); }

}  // namespace meshrec
