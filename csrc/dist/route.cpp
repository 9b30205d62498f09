// Sends every ID to the ranks that own the row, as a packed message per rank, and unpacks such messages.
//
// A message consists of int32 words: [bags per route, if they differ][lengths, route by route][ids][weights].
// ops/dist/naive.py documents arguments and results.
#include <cmath>
#include <cstring>

#include "dist/router.h"
#include "host/memory.h"

namespace meshrec {
namespace {

constexpr int64_t kHeaderFields = 4;  // status, words, ids, bags per route (-1: they differ between uses)

Tensor empty_cpu(int64_t size, ScalarType type) { return empty_buffer({size}, type); }

// Unsigned: the distance between hashed keys reaches 2^64 - 1, and wraps around.
int64_t minus(int64_t key, int64_t first) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) - static_cast<uint64_t>(first));
}

// Where the parts of a route start in the payload.
struct Slot {
  int32_t* lengths;
  int32_t* ids;
  float* weights;
};

struct Routing {
  const Router& router;
  const Bags& bags;
  const std::vector<int64_t>& keys;
  const float* weights;
  bool wide, check_ids;
  const Tensor& names;
  std::vector<int64_t> counts = std::vector<int64_t>(router.num_routes, 0);
  std::vector<int64_t> num_bad = std::vector<int64_t>(router.num_uses, 0);
  std::vector<Slot> slots = std::vector<Slot>(router.num_routes);
  int64_t words_per_id = wide ? 2 : 1;

  std::string name(int64_t use, int64_t part) const {
    const char* text = reinterpret_cast<const char*>(names.const_data_ptr<uint8_t>());
    const std::string all(text, names.numel());
    size_t begin = 0;
    for (int64_t line = 0; line < use; ++line) begin = all.find('\n', begin) + 1;
    const std::string line = all.substr(begin, all.find('\n', begin) - begin);
    return part == 0 ? line.substr(0, line.find('\t')) : line.substr(line.find('\t') + 1);
  }

  int64_t sample(int64_t key, int64_t position) const {
    const int64_t* begin = bags.offsets + bags.first_bag[key];
    return std::upper_bound(begin, bags.offsets + bags.first_bag[key + 1] + 1, position) - begin - 1;
  }

  template <typename Id>
  [[noreturn]] void fail_for(int64_t use, int64_t position, Id id) const {
    // An ID is checked before its weight, so the weight is wrong only if the ID is inside.
    const bool inside = router.is_inside(use, id);
    const int64_t row = sample(keys[use], position);
    if (inside) {
      fail("table '", name(use, 0), "': the weight of id ", id, " of feature '", name(use, 1), "' (sample ",
           row, ") is nan. Weights must be numbers; check the input.");
    }
    fail("table '", name(use, 0), "': id ", id, " of feature '", name(use, 1), "' (sample ", row,
         ") is outside [0, ", router.num_rows(use), "). Raise num_embeddings, or hash the ids.");
  }

  // Counts and checks the IDs of a use, for each of its routes.
  template <typename Id>
  void count(int64_t use, const Id* values) {
    const int64_t key = keys[use], begin = bags.first_id(key), end = begin + bags.num_ids(key);
    const int64_t num_intervals = router.num_intervals(use);
    const IntervalFinder interval_of(router, use);
    std::vector<int64_t> per_interval(num_intervals, 0);
    int64_t bad = 0;
    for (int64_t i = begin; i < end; ++i) {
      int64_t row = values[i];
      if (!router.is_inside(use, row)) {
        if (check_ids) fail_for(use, i, values[i]);
        row = 0;
        ++bad;
      }
      // A use with a single interval needs no search: all IDs go to the same routes.
      if (num_intervals > 1) ++per_interval[interval_of(row)];
    }
    if (weights != nullptr && check_ids) {
      for (int64_t i = begin; i < end; ++i) {
        if (std::isnan(weights[i])) fail_for(use, i, values[i]);
      }
    }
    if (num_intervals == 1) per_interval[0] = end - begin;
    num_bad[use] = bad;
    const int64_t first = router.first_interval(use);
    for (int64_t interval = 0; interval < num_intervals; ++interval) {
      for (int64_t at = router.interval_begin[first + interval];
           at < router.interval_begin[first + interval + 1]; ++at) {
        counts[router.interval_routes[at]] += per_interval[interval];
      }
    }
  }

  void put_id(Slot& slot, int64_t row) const {
    if (wide) {
      std::memcpy(slot.ids, &row, sizeof row);
    } else {
      *slot.ids = static_cast<int32_t>(row);
    }
    slot.ids += words_per_id;
  }

  // For a table that is whole on a rank: copies lengths and IDs unchanged.
  template <typename Id>
  void write_whole(int64_t use, const std::vector<int64_t>& own, const Id* values) const {
    const int64_t key = keys[use], first = bags.first_id(key), num_ids = bags.num_ids(key);
    const int64_t *offsets = bags.offsets + bags.first_bag[key], num_bags = bags.num_bags(key);
    for (int64_t route : own) {
      const Slot slot = slots[route];
      for (int64_t bag = 0; bag < num_bags; ++bag) {
        slot.lengths[bag] = static_cast<int32_t>(offsets[bag + 1] - offsets[bag]);
      }
      if (weights != nullptr) std::copy_n(weights + first, num_ids, slot.weights);
      Slot cursor = slot;
      // Narrow messages hold row numbers, and a whole table starts at row 0, so nothing is subtracted. Hashed
      // keys start at -2^63, and are always wide.
      if (wide || num_bad[use] > 0) {
        for (int64_t i = first; i < first + num_ids; ++i) {
          const int64_t id = values[i];
          put_id(cursor, router.is_inside(use, id) ? minus(id, router.first_row(route)) : 0);
        }
      } else {
        for (int64_t i = 0; i < num_ids; ++i) slot.ids[i] = static_cast<int32_t>(values[first + i]);
      }
    }
  }

  template <typename Id>
  void write(int64_t use, const Id* values) {
    const int64_t key = keys[use], first = router.first_interval(use);
    const IntervalFinder interval_of(router, use);
    const int64_t* routes_begin = router.interval_begin + first;
    std::vector<int64_t> own;  // routes of this use
    for (int64_t at = routes_begin[0]; at < routes_begin[router.num_intervals(use)]; ++at) {
      own.push_back(router.interval_routes[at]);
    }
    // A route spans several intervals if shards with other columns are cut there. It must be listed once.
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    if (own.empty()) return;
    if (router.num_intervals(use) == 1) return write_whole(use, own, values);
    std::vector<const int32_t*> bag_begin(own.size());
    for (int64_t bag = bags.first_bag[key]; bag < bags.first_bag[key + 1]; ++bag) {
      for (size_t r = 0; r < own.size(); ++r) bag_begin[r] = slots[own[r]].ids;
      for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
        const int64_t id = values[i];
        const int64_t row = router.is_inside(use, id) ? id : 0;
        const int64_t interval = interval_of(row);
        for (int64_t at = routes_begin[interval]; at < routes_begin[interval + 1]; ++at) {
          const int64_t route = router.interval_routes[at];
          Slot& slot = slots[route];
          put_id(slot, minus(row, router.first_row(route)));
          if (weights != nullptr) *slot.weights++ = weights[i];
        }
      }
      for (size_t r = 0; r < own.size(); ++r) {
        Slot& slot = slots[own[r]];
        *slot.lengths++ = static_cast<int32_t>((slot.ids - bag_begin[r]) / words_per_id);
      }
    }
  }
};

// Fills the header, and assigns every route a position in the payload. Returns the payload.
Tensor lay_out(Routing& routing, int64_t num_ranks, Tensor& header_tensor) {
  const Router& router = routing.router;
  int64_t* header = header_tensor.mutable_data_ptr<int64_t>();
  std::vector<int64_t> bags(num_ranks, 0), prefix(num_ranks, 0), num_routes(num_ranks, 0);
  int64_t batch = routing.keys.empty() ? 0 : routing.bags.num_bags(routing.keys[0]);
  for (int64_t key : routing.keys) {
    if (routing.bags.num_bags(key) != batch) batch = -1;
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    int64_t* row = header + kHeaderFields * rank;
    row[0] = row[2] = 0;
    row[3] = batch;
  }
  for (int64_t route = 0; route < router.num_routes; ++route) {
    const int64_t rank = router.rank(route),
                  route_bags = routing.bags.num_bags(routing.keys[router.use(route)]);
    int64_t* row = header + kHeaderFields * rank;
    ++num_routes[rank];
    row[2] += routing.counts[route];
    bags[rank] += route_bags;
  }
  int64_t total = 0;
  // Sizes first, positions after: the message for a rank starts where the previous one ends.
  const int64_t words_per_id = routing.words_per_id + (routing.weights != nullptr);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    int64_t* row = header + kHeaderFields * rank;
    prefix[rank] = batch < 0 ? num_routes[rank] : 0;
    row[1] = prefix[rank] + bags[rank] + row[2] * words_per_id;
    total += row[1];
  }
  Tensor payload = empty_cpu(total, ScalarType::Int);
  int32_t* message = payload.mutable_data_ptr<int32_t>();
  // Routes are numbered in rank order, so a single pass assigns all of them.
  int64_t route = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t* row = header + kHeaderFields * rank;
    int32_t* batches = message;
    Slot slot{message + prefix[rank], message + prefix[rank] + bags[rank], nullptr};
    slot.weights = reinterpret_cast<float*>(slot.ids + row[2] * routing.words_per_id);
    for (; route < router.num_routes && router.rank(route) == rank; ++route) {
      const int64_t route_bags = routing.bags.num_bags(routing.keys[router.use(route)]);
      if (row[3] < 0) *batches++ = static_cast<int32_t>(route_bags);
      routing.slots[route] = slot;
      slot.lengths += route_bags;
      slot.ids += routing.counts[route] * routing.words_per_id;
      slot.weights += routing.counts[route];
    }
    message += row[1];
  }
  return payload;
}

Tensor to_tensor(const std::vector<int64_t>& numbers) {
  Tensor tensor = empty_cpu(static_cast<int64_t>(numbers.size()), ScalarType::Long);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

template <typename Id>
Tensor route_all(Routing& routing, const Id* values, int64_t num_ranks, Tensor& header) {
  // Sequential, because it may throw: the error must name the first invalid ID.
  for (int64_t use = 0; use < routing.router.num_uses; ++use) routing.count(use, values);
  Tensor payload = lay_out(routing, num_ranks, header);
  // Safe in parallel: a route belongs to a single use, and lay_out() gave each route separate positions.
  parallel_tasks(routing.router.num_uses, [&](int64_t use) { routing.write(use, values); });
  return payload;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route_ids(Tensor values, Tensor offsets,
                                                     std::optional<Tensor> weights,
                                                     std::optional<Tensor> segments, int64_t num_keys,
                                                     std::vector<int64_t> keys,
                                                     std::vector<Tensor> router_tensors, int64_t num_ranks,
                                                     bool wide, bool check_ids, Tensor names) {
  const Router router(router_tensors);
  const Tensor ids = contiguous(values);
  if (static_cast<int64_t>(keys.size()) != router.num_uses) fail("keys must have one entry per use");
  if (weights && (weights->numel() != ids.numel() || weights->scalar_type() != ScalarType::Float)) {
    fail("per-sample weights must be float32, one for each of ", ids.numel(), " ids, got ", weights->numel(),
         ".");
  }
  const Bags bags(offsets, segments, num_keys, ids.numel());
  const std::optional<Tensor> id_weights =
      weights ? std::optional<Tensor>(contiguous(*weights)) : std::nullopt;
  const Tensor name_bytes = contiguous(names);
  Routing routing{.router = router,
                  .bags = bags,
                  .keys = keys,
                  .weights = id_weights ? id_weights->const_data_ptr<float>() : nullptr,
                  .wide = wide,
                  .check_ids = check_ids,
                  .names = name_bytes};
  Tensor header = torch::stable::empty({num_ranks, kHeaderFields}, ScalarType::Long);
  Tensor payload = ids.scalar_type() == ScalarType::Int
                       ? route_all(routing, ids.const_data_ptr<int32_t>(), num_ranks, header)
                       : route_all(routing, ids.const_data_ptr<int64_t>(), num_ranks, header);
  return {payload, header, to_tensor(routing.counts), to_tensor(routing.num_bad)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack_ids(Tensor received, Tensor header_tensor,
                                                      std::vector<int64_t> blocks, int64_t num_routes,
                                                      bool weighted, bool wide) {
  const Tensor payload = contiguous(received), header_rows = contiguous(header_tensor);
  const int64_t* header = header_rows.const_data_ptr<int64_t>();
  const int64_t num_ranks = static_cast<int64_t>(blocks.size()), words_per_id = wide ? 2 : 1;
  if (header_rows.numel() != num_ranks * kHeaderFields) fail("header must have one row per source rank");
  std::vector<const int32_t*> messages(num_ranks);
  int64_t words = 0, num_ids = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    // Messages are in rank order. The result is in `blocks` order, which may differ.
    messages[rank] = payload.const_data_ptr<int32_t>() + words;
    words += header[kHeaderFields * rank + 1];
    num_ids += header[kHeaderFields * rank + 2];
  }
  if (words != payload.numel())
    fail("header speaks of ", words, " words, ", payload.numel(), " were received");
  Tensor segments = empty_cpu(num_ranks * num_routes + 1, ScalarType::Long);
  int64_t* bounds = segments.mutable_data_ptr<int64_t>();
  int64_t num_bags = 0;
  for (int64_t rank : blocks) {
    const int64_t batch = header[kHeaderFields * rank + 3];
    for (int64_t route = 0; route < num_routes; ++route) {
      *bounds++ = num_bags;
      num_bags += batch < 0 ? messages[rank][route] : batch;
    }
  }
  *bounds = num_bags;
  Tensor values = empty_cpu(num_ids, wide ? ScalarType::Long : ScalarType::Int);
  Tensor weights = empty_cpu(weighted ? num_ids : 0, ScalarType::Float);
  Tensor offsets_tensor = empty_cpu(num_bags + 1, ScalarType::Long);
  int64_t* offsets = offsets_tensor.mutable_data_ptr<int64_t>();
  auto* id_bytes = static_cast<char*>(values.mutable_data_ptr());
  float* weight = weights.mutable_data_ptr<float>();
  const int64_t* segment = segments.const_data_ptr<int64_t>();
  int64_t end = *offsets++ = 0;
  for (int64_t rank : blocks) {
    const int64_t* row = header + kHeaderFields * rank;
    const int32_t* message = messages[rank] + (row[3] < 0 ? num_routes : 0);
    const int64_t block_bags = segment[num_routes] - segment[0], expected = end + row[2];
    segment += num_routes;
    for (int64_t bag = 0; bag < block_bags; ++bag) *offsets++ = end += message[bag];
    // Before the IDs are copied, because a wrong sum would lead past the message.
    if (end != expected) fail("lengths do not sum to the number of ids in the message of rank ", rank);
    message += block_bags;
    const int64_t bytes = row[2] * words_per_id * static_cast<int64_t>(sizeof(int32_t));
    std::memcpy(id_bytes, message, bytes);
    id_bytes += bytes;
    if (weighted) {
      std::memcpy(weight, message + row[2] * words_per_id, row[2] * sizeof(float));
      weight += row[2];
    }
  }
  return {values, offsets_tensor, weights, segments};
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("route_ids", TORCH_BOX(&route_ids));
  m.impl("unpack_ids", TORCH_BOX(&unpack_ids));
}

}  // namespace
}  // namespace meshrec
