// Which IDs go to which rank: the compiled plan as the dist operators read it. ops/dist/naive.py is the
// reference.
#pragma once

#include <algorithm>
#include <limits>

#include "stable_abi.h"

namespace meshrec {

// U uses (a feature read from a table), Q routes (the part of a use that a rank gets), K keys, N ids.
//
// cuts: the row cuts c_0 < ... < c_P for every use, starting at cut_begin[u]: from 0 to the row count, or for
// hashed keys from -2^63 to 2^63 - 1, which stands for no end. Two adjacent cuts bound an interval. Intervals
// are numbered across all uses; interval_begin[i] is the index at which the routes for interval i start.
struct Router {
  std::vector<Tensor> tensors;
  const int64_t* cut_begin;
  const int64_t* cuts;
  const int64_t* interval_begin;
  const int64_t* interval_routes;
  const int64_t* routes;  // rank, use, first row; by rank
  int64_t num_uses, num_routes;

  explicit Router(const std::vector<Tensor>& router) {
    if (router.size() != 5) fail("router must be 5 tensors, got ", router.size());
    for (const Tensor& tensor : router) {
      if (tensor.scalar_type() != ScalarType::Long || !tensor.is_cpu()) {
        fail("router must be int64 tensors on the CPU");
      }
      tensors.push_back(contiguous(tensor));
    }
    cut_begin = tensors[0].const_data_ptr<int64_t>();
    cuts = tensors[1].const_data_ptr<int64_t>();
    interval_begin = tensors[2].const_data_ptr<int64_t>();
    interval_routes = tensors[3].const_data_ptr<int64_t>();
    routes = tensors[4].const_data_ptr<int64_t>();
    num_uses = tensors[0].numel() - 1;
    num_routes = tensors[4].numel() / 3;
  }

  int64_t num_intervals(int64_t use) const { return cut_begin[use + 1] - cut_begin[use] - 1; }
  // A use has one cut more than intervals.
  int64_t first_interval(int64_t use) const { return cut_begin[use] - use; }
  int64_t num_rows(int64_t use) const { return cuts[cut_begin[use + 1] - 1]; }
  bool is_inside(int64_t use, int64_t row) const {
    const int64_t end = num_rows(use);
    // Without an end, the largest int64 is a row as well.
    return row >= cuts[cut_begin[use]] && (row < end || end == std::numeric_limits<int64_t>::max());
  }
  int64_t rank(int64_t route) const { return routes[3 * route]; }
  int64_t use(int64_t route) const { return routes[3 * route + 1]; }
  int64_t first_row(int64_t route) const { return routes[3 * route + 2]; }
};

// Finds the interval that contains a row: by a guess if the cuts are evenly spaced, otherwise by bisection.
struct IntervalFinder {
  const int64_t* cuts;
  int64_t num_intervals;
  double first, per_row;

  IntervalFinder(const Router& router, int64_t use)
      : cuts(router.cuts + router.cut_begin[use]),
        num_intervals(router.num_intervals(use)),
        first(static_cast<double>(cuts[0])),
        per_row(static_cast<double>(num_intervals) / (static_cast<double>(router.num_rows(use)) - first)) {}

  int64_t operator()(int64_t row) const {
    // The guess may be off by one after rounding in double, and is arbitrary for uneven cuts. It is used only
    // if the row is really in the interval.
    const int64_t guess = std::min<int64_t>(
        static_cast<int64_t>((static_cast<double>(row) - first) * per_row), num_intervals - 1);
    if (cuts[guess] <= row && row < cuts[guess + 1]) return guess;
    // Without the last cut: 2^63 - 1 is a key in the last interval.
    return std::upper_bound(cuts, cuts + num_intervals, row) - cuts - 1;
  }
};

// Bags and IDs for every key in a block.
struct Bags {
  Tensor offsets_tensor;
  std::vector<int64_t> first_bag;  // K + 1
  const int64_t* offsets;

  Bags(const Tensor& given_offsets, const std::optional<Tensor>& segments, int64_t num_keys, int64_t num_ids)
      : offsets_tensor(contiguous(torch::stable::to(given_offsets, ScalarType::Long))) {
    offsets = offsets_tensor.const_data_ptr<int64_t>();
    const int64_t num_bags = offsets_tensor.numel() - 1;
    first_bag.resize(num_keys + 1);
    if (segments) {
      if (segments->numel() != num_keys + 1) fail("segments must have ", num_keys + 1, " elements");
      const Tensor bounds = contiguous(*segments);
      std::copy_n(bounds.const_data_ptr<int64_t>(), num_keys + 1, first_bag.begin());
    } else {
      if (num_keys == 0 || num_bags % num_keys != 0) {
        fail(num_bags, " bags cannot be shared evenly among ", num_keys,
             " keys. Give segments when batch sizes differ between keys.");
      }
      for (int64_t key = 0; key <= num_keys; ++key) first_bag[key] = num_bags / num_keys * key;
    }
    // Below 0: the caller has no IDs to compare with, and routing has checked these offsets.
    if (num_ids < 0) return;
    if (offsets[0] != 0 || offsets[num_bags] != num_ids || !std::is_sorted(offsets, offsets + num_bags + 1)) {
      fail("offsets must rise from 0 to the number of ids, ", num_ids,
           ". Call validate() on the KeyedJaggedTensor to see which key and sample is wrong.");
    }
  }

  int64_t num_bags(int64_t key) const { return first_bag[key + 1] - first_bag[key]; }
  int64_t first_id(int64_t key) const { return offsets[first_bag[key]]; }
  int64_t num_ids(int64_t key) const { return offsets[first_bag[key + 1]] - first_id(key); }
};

}  // namespace meshrec
