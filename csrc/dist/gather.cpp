// Gathers the rows that the ranks sent back into table order, and scatters gradients the opposite way.
// ops/dist/naive.py documents arguments and results.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>

#include "dist/router.h"
#include "dist/wire_rows.h"
#include "host/host_link.h"
#include "host/memory.h"

namespace meshrec {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// Calls work with a null pointer of the element type, as a type tag.
template <typename Work>
void with_floats(ScalarType type, const Work& work) {
  if (type == ScalarType::Float) return work(static_cast<float*>(nullptr));
  if (type == ScalarType::Half) return work(static_cast<Half*>(nullptr));
  if (type == ScalarType::BFloat16) return work(static_cast<BFloat16*>(nullptr));
  fail("embeddings travel as float32, float16 or bfloat16, got another type");
}

template <typename To, typename From>
void copy_scaled(To* to, const From* from, int64_t width, float scale) {
  if constexpr (std::is_same_v<To, From>) {
    if (scale == 1.0f) {
      std::memcpy(to, from, width * sizeof(To));
      return;
    }
  }
  for (int64_t i = 0; i < width; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]) * scale);
}

template <typename From>
void add_scaled(float* to, const From* from, int64_t width, float scale) {
  for (int64_t i = 0; i < width; ++i) to[i] += static_cast<float>(from[i]) * scale;
}

// The layout of `pieces` in ops/dist/naive.py, whose rows are reinterpreted as this struct.
// Columns from a source, and their output columns.
struct PooledPiece {
  int64_t source, source_column, width, column, add, mean_use;
};

struct Pooled {
  Tensor pieces_tensor;
  const PooledPiece* pieces;
  int64_t num_pieces, batch;
  const std::vector<int64_t>& dims;
  std::vector<int64_t> first_element;  // for each source's block
  std::optional<Bags> bags;
  const std::vector<int64_t>& keys;

  Pooled(const Tensor& piece_rows, const std::vector<int64_t>& source_dims, int64_t batch_size,
         const std::optional<Tensor>& offsets, const std::optional<Tensor>& segments, int64_t num_keys,
         const std::vector<int64_t>& use_keys)
      : pieces_tensor(contiguous(piece_rows)), batch(batch_size), dims(source_dims), keys(use_keys) {
    static_assert(sizeof(PooledPiece) == 6 * sizeof(int64_t));
    pieces = reinterpret_cast<const PooledPiece*>(pieces_tensor.const_data_ptr<int64_t>());
    num_pieces = pieces_tensor.numel() / 6;
    if (offsets) bags.emplace(*offsets, segments, num_keys, -1);
    int64_t element = 0;
    for (int64_t dim : dims) {
      first_element.push_back(element);
      element += batch * dim;
    }
    first_element.push_back(element);
  }

  float scale(const PooledPiece& piece, int64_t sample) const {
    if (piece.mean_use < 0) return 1.0f;
    const int64_t* bag = bags->offsets + bags->first_bag[keys[piece.mean_use]] + sample;
    // An empty bag has no rows, and 1 / 0 would make its sum NaN.
    return bag[1] > bag[0] ? 1.0f / static_cast<float>(bag[1] - bag[0]) : 0.0f;
  }

  bool is_local(const PooledPiece& piece) const { return piece.source == static_cast<int64_t>(dims.size()); }

  // Runs work(first, end) for chunks of samples, in parallel.
  template <typename Work>
  void for_chunks(int64_t size, const Work& work) const {
    parallel_tasks((batch + size - 1) / size,
                   [&](int64_t chunk) { work(chunk * size, std::min(batch, (chunk + 1) * size)); });
  }

  template <typename Work>
  void for_samples(const Work& work) const {
    for_chunks(64, [&](int64_t first, int64_t end) {
      for (int64_t sample = first; sample < end; ++sample) work(sample);
    });
  }
};

// Per-thread memory for the rows in a chunk.
struct RowMemory {
  // copy: rows read from a linked rank; decoded: coded rows as fp32; scratch: 4-bit codes during decoding.
  std::vector<char> copy;
  std::vector<float> decoded;
  std::vector<uint8_t> scratch;
};

// Where the rows from each source are: in the received buffer, or in the memory of linked ranks.
struct Sources {
  const char* received;
  int64_t link, exchange;
  const WireColumns* coded;  // null if kernels read rows in the wire format
  std::vector<int64_t> row_bytes, first_byte{0};
  std::atomic<bool> failed = false;

  Sources(const Pooled& pooled, const Tensor& message, const WireColumns* columns, int64_t from_link,
          int64_t number)
      : received(static_cast<const char*>(message.const_data_ptr())),
        link(from_link),
        exchange(number),
        coded(columns) {
    const int64_t size = message.element_size();
    for (size_t source = 0; source < pooled.dims.size(); ++source) {
      if (coded != nullptr && coded->row_elements[source] != pooled.dims[source])
        fail("source ", source, " has ", pooled.dims[source], " columns, and their formats have ",
             coded->row_elements[source]);
      row_bytes.push_back(coded == nullptr ? pooled.dims[source] * size : coded->row_bytes[source]);
      first_byte.push_back(first_byte.back() + pooled.batch * row_bytes.back());
    }
    // With a link, nothing is received: the rows are read from the memory of the senders.
    if (link == 0 && message.numel() * size != first_byte.back())
      fail("received ", message.numel(), " elements in place of ", first_byte.back() / size);
  }

  // Reads rows [first, end) for some pieces of a source. Returns the address that row 0 would have.
  const char* rows(const Pooled& pooled, const PooledPiece* from, const PooledPiece* to, int64_t first,
                   int64_t end, RowMemory& memory) {
    const int64_t source = from->source;
    const int64_t bytes = row_bytes[source], dim = pooled.dims[source], num_rows = end - first;
    // Blocks from the sources are adjacent in `received`. With a link, the rows are read from the sender
    // instead.
    const char* found = received + first_byte[source] + first * bytes;
    if (link != 0) {
      // Grows only, because later chunks of the same thread use the memory again.
      if (int64_t(memory.copy.size()) < num_rows * bytes) memory.copy.resize(num_rows * bytes);
      found = static_cast<const char*>(
          read_from_link(link, exchange, source, first * bytes, num_rows * bytes, memory.copy.data()));
      // Other chunks then stop early, and `gathered` throws on the calling thread.
      if (found == nullptr) failed = true;
    }
    // The address that row 0 would have, because pieces index rows by sample.
    if (coded == nullptr || found == nullptr) return found - first * bytes;
    if (int64_t(memory.decoded.size()) < num_rows * dim) memory.decoded.resize(num_rows * dim);
    int64_t first_column = dim, end_column = 0;  // other pieces of this source may follow later
    for (const PooledPiece* piece = from; piece < to; ++piece) {
      first_column = std::min(first_column, piece->source_column);
      end_column = std::max(end_column, piece->source_column + piece->width);
    }
    coded->decode(source, num_rows, reinterpret_cast<const uint8_t*>(found), memory.decoded.data(),
                  memory.scratch, first_column, end_column);
    return reinterpret_cast<const char*>(memory.decoded.data()) - first * dim * int64_t(sizeof(float));
  }
};

// Copies rows of type T to the output. A chunk's rows from all sources fit into the cache together.
template <typename T>
void gather_chunk(const Pooled& pooled, Sources& sources, const float* own_rows, int64_t own_dim, float* rows,
                  int64_t out_dim, int64_t first, int64_t end) {
  // Kept between calls: at most 64 rows of the widest source per thread.
  thread_local RowMemory memory;
  for (int64_t p = 0, last; p < pooled.num_pieces && !sources.failed; p = last) {
    const int64_t number = pooled.pieces[p].source;
    for (last = p; last < pooled.num_pieces && pooled.pieces[last].source == number;) ++last;
    const bool is_local = pooled.is_local(pooled.pieces[p]);
    const char* elements =
        is_local ? nullptr
                 : sources.rows(pooled, pooled.pieces + p, pooled.pieces + last, first, end, memory);
    if (sources.failed) return;
    for (int64_t sample = first; sample < end; ++sample) {
      for (int64_t q = p; q < last; ++q) {
        const PooledPiece& piece = pooled.pieces[q];
        float* to = rows + sample * out_dim + piece.column;
        const float scale = pooled.scale(piece, sample);
        if (is_local) {
          // Data-parallel tables are whole, so no other source has these columns.
          copy_scaled(to, own_rows + sample * own_dim + piece.source_column, piece.width, scale);
          continue;
        }
        const T* from =
            reinterpret_cast<const T*>(elements) + sample * pooled.dims[number] + piece.source_column;
        if (piece.add) {
          add_scaled(to, from, piece.width, scale);
        } else {
          copy_scaled(to, from, piece.width, scale);
        }
      }
    }
  }
}

Tensor gathered(const Pooled& pooled, const Tensor& received, const std::optional<Tensor>& local,
                const WireColumns* coded, int64_t out_dim, int64_t link, int64_t exchange) {
  const Tensor source = contiguous(received);
  std::optional<Tensor> own;
  if (local) own = contiguous(*local);
  const int64_t own_dim = own && pooled.batch > 0 ? own->numel() / pooled.batch : 0;
  const float* own_rows = own ? own->const_data_ptr<float>() : nullptr;
  Sources sources(pooled, source, coded, link, exchange);
  Tensor out = empty_buffer({pooled.batch, out_dim}, ScalarType::Float);
  float* rows = out.mutable_data_ptr<float>();
  with_floats(coded == nullptr ? source.scalar_type() : ScalarType::Float, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    // Small chunks: decoded rows are read again while they are in the L1 cache.
    pooled.for_chunks(coded == nullptr ? 64 : 16, [&](int64_t first, int64_t end) {
      gather_chunk<T>(pooled, sources, own_rows, own_dim, rows, out_dim, first, end);
    });
  });
  if (sources.failed) throw std::runtime_error(kPeerLost);
  return out;
}

Tensor gather_pooled(Tensor received, std::optional<Tensor> local, Tensor pieces, std::vector<int64_t> dims,
                     int64_t batch, int64_t out_dim, std::optional<Tensor> offsets,
                     std::optional<Tensor> segments, int64_t num_keys, std::vector<int64_t> keys,
                     int64_t link, int64_t exchange) {
  const Pooled pooled(pieces, dims, batch, offsets, segments, num_keys, keys);
  return gathered(pooled, received, local, nullptr, out_dim, link, exchange);
}

Tensor gather_coded(Tensor received, std::optional<Tensor> local, Tensor pieces, std::vector<int64_t> dims,
                    int64_t batch, int64_t out_dim, std::optional<Tensor> offsets,
                    std::optional<Tensor> segments, int64_t num_keys, std::vector<int64_t> keys,
                    std::vector<int64_t> starts, std::vector<int64_t> widths, std::vector<int64_t> formats,
                    int64_t link, int64_t exchange) {
  const Pooled pooled(pieces, dims, batch, offsets, segments, num_keys, keys);
  const WireColumns columns(dims.size(), starts, widths, formats);
  if (received.scalar_type() != ScalarType::Byte) fail("encoded rows must be uint8");
  return gathered(pooled, received, local, &columns, out_dim, link, exchange);
}

std::tuple<Tensor, Tensor> scatter_pooled(Tensor grad, Tensor pieces, std::vector<int64_t> dims,
                                          int64_t local_dim, std::optional<Tensor> offsets,
                                          std::optional<Tensor> segments, int64_t num_keys,
                                          std::vector<int64_t> keys, double scale, ScalarType dtype) {
  const Tensor source = contiguous(grad);
  if (source.scalar_type() != ScalarType::Float || source.dim() != 2)
    fail("the gradient must be 2-D float32");
  const int64_t batch = source.size(0), grad_dim = source.size(1);
  const Pooled pooled(pieces, dims, batch, offsets, segments, num_keys, keys);
  const float* rows = source.const_data_ptr<float>();
  Tensor sent = empty_buffer({pooled.first_element.back()}, dtype);
  Tensor own = empty_buffer({batch, local_dim}, ScalarType::Float);
  float* own_rows = own.mutable_data_ptr<float>();
  with_floats(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* elements = static_cast<T*>(sent.mutable_data_ptr());
    pooled.for_samples([&](int64_t sample) {
      for (int64_t p = 0; p < pooled.num_pieces; ++p) {
        const PooledPiece& piece = pooled.pieces[p];
        const float* from = rows + sample * grad_dim + piece.column;
        const float factor = static_cast<float>(scale) * pooled.scale(piece, sample);
        if (pooled.is_local(piece)) {
          copy_scaled(own_rows + sample * local_dim + piece.source_column, from, piece.width, factor);
        } else {
          copy_scaled(elements + pooled.first_element[piece.source] + sample * pooled.dims[piece.source] +
                          piece.source_column,
                      from, piece.width, factor);
        }
      }
    });
  });
  return {sent, own};
}

// Rows that a rank's lookup returns for a route: some columns for every ID on the route.
struct SequenceLookup {
  int64_t route, use, column, width;
};

// Walks the IDs of a use in order, along with the rows from all lookups holding a part of them. Routing
// keeps the order of IDs, so the rows from every lookup are read sequentially.
struct Sequence {
  const Router router;
  const Bags bags;
  const std::vector<int64_t>& keys;
  const std::vector<int64_t>& dims;
  Tensor lookups_tensor;
  const SequenceLookup* lookups;
  int64_t num_lookups;
  std::vector<int64_t> first_element, route_begin;  // per lookup; lookups per route
  std::vector<int64_t> out_begin;                   // per use

  Sequence(const Tensor& offsets, const std::optional<Tensor>& segments, int64_t num_keys,
           const std::vector<int64_t>& use_keys, const std::vector<Tensor>& router_tensors,
           const Tensor& lookup_rows, const Tensor& counts, const std::vector<int64_t>& use_dims,
           int64_t num_ids)
      : router(router_tensors),
        bags(offsets, segments, num_keys, num_ids),
        keys(use_keys),
        dims(use_dims),
        lookups_tensor(contiguous(lookup_rows)) {
    static_assert(sizeof(SequenceLookup) == 4 * sizeof(int64_t));
    lookups = reinterpret_cast<const SequenceLookup*>(lookups_tensor.const_data_ptr<int64_t>());
    num_lookups = lookups_tensor.numel() / 4;
    const Tensor count_tensor = contiguous(counts);
    const int64_t* count = count_tensor.const_data_ptr<int64_t>();
    int64_t element = 0;
    route_begin.assign(router.num_routes + 1, 0);
    for (int64_t i = 0; i < num_lookups; ++i) {
      first_element.push_back(element);
      element += count[lookups[i].route] * lookups[i].width;
      route_begin[lookups[i].route + 1] = i + 1;  // lookups are ordered by route
    }
    for (int64_t route = 0; route < router.num_routes; ++route) {
      route_begin[route + 1] = std::max(route_begin[route + 1], route_begin[route]);
    }
    first_element.push_back(element);
    out_begin.push_back(0);
    for (size_t use = 0; use < keys.size(); ++use) {
      out_begin.push_back(out_begin.back() + bags.num_ids(keys[use]) * dims[use]);
    }
  }

  // Calls visit(first payload element, first result element, width) for every part of every row.
  template <typename Id, typename Visit>
  void walk(int64_t use, const Id* values, std::vector<int64_t>& cursor, const Visit& visit) const {
    const IntervalFinder interval_of(router, use);
    const int64_t dim = dims[use];
    // The use reads a data-parallel table, whose rows were not sent.
    if (dim == 0) return;
    const int64_t* routes_begin = router.interval_begin + router.first_interval(use);
    const int64_t first = bags.first_id(keys[use]), count = bags.num_ids(keys[use]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = values[first + i];
      // An ID outside the table was sent as row 0 (route.cpp), so its row comes from that route.
      const int64_t interval = interval_of(router.is_inside(use, id) ? id : 0);
      for (int64_t at = routes_begin[interval]; at < routes_begin[interval + 1]; ++at) {
        const int64_t route = router.interval_routes[at];
        for (int64_t l = route_begin[route]; l < route_begin[route + 1]; ++l) {
          visit(cursor[l], out_begin[use] + i * dim + lookups[l].column, lookups[l].width);
          cursor[l] += lookups[l].width;
        }
      }
    }
  }

  template <typename Visit>
  void for_rows(const Tensor& values, const Visit& visit) const {
    const Tensor ids = contiguous(values);
    std::vector<int64_t> cursor(first_element.begin(),
                                first_element.end() - 1);  // no two uses share lookups
    parallel_tasks(static_cast<int64_t>(keys.size()), [&](int64_t use) {
      if (ids.scalar_type() == ScalarType::Int) {
        walk(use, ids.const_data_ptr<int32_t>(), cursor, visit);
      } else {
        walk(use, ids.const_data_ptr<int64_t>(), cursor, visit);
      }
    });
  }
};

Tensor gather_sequence(Tensor received, Tensor values, Tensor offsets, std::optional<Tensor> segments,
                       int64_t num_keys, std::vector<int64_t> keys, std::vector<Tensor> router,
                       Tensor lookups, Tensor counts, std::vector<int64_t> dims) {
  const Sequence sequence(offsets, segments, num_keys, keys, router, lookups, counts, dims, values.numel());
  if (received.numel() != sequence.first_element.back()) {
    fail("received ", received.numel(), " elements in place of ", sequence.first_element.back());
  }
  const Tensor source = contiguous(received);
  Tensor out = empty_buffer({sequence.out_begin.back()}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  with_floats(source.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = static_cast<const T*>(source.const_data_ptr());
    sequence.for_rows(values, [&](int64_t element, int64_t row, int64_t width) {
      copy_scaled(to + row, from + element, width, 1.0f);
    });
  });
  return out;
}

Tensor scatter_sequence(Tensor grad, Tensor values, Tensor offsets, std::optional<Tensor> segments,
                        int64_t num_keys, std::vector<int64_t> keys, std::vector<Tensor> router,
                        Tensor lookups, Tensor counts, std::vector<int64_t> dims, double scale,
                        ScalarType dtype) {
  const Sequence sequence(offsets, segments, num_keys, keys, router, lookups, counts, dims, values.numel());
  const Tensor source = contiguous(grad);
  if (source.scalar_type() != ScalarType::Float || source.numel() != sequence.out_begin.back()) {
    fail("the gradient must be float32 with ", sequence.out_begin.back(), " elements, got ", source.numel());
  }
  const float* from = source.const_data_ptr<float>();
  Tensor sent = empty_buffer({sequence.first_element.back()}, dtype);
  with_floats(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* to = static_cast<T*>(sent.mutable_data_ptr());
    sequence.for_rows(values, [&](int64_t element, int64_t row, int64_t width) {
      copy_scaled(to + element, from + row, width, static_cast<float>(scale));
    });
  });
  return sent;
}

template <typename Id>
void add_weight_grads(const Router& router, const Bags& bags, const std::vector<int64_t>& keys,
                      const Id* values, std::vector<const float*>& next, float* out) {
  // Sequential, because uses may share a key and then add to the same elements.
  for (int64_t use = 0; use < router.num_uses; ++use) {
    if (router.num_rows(use) == 0) continue;
    const IntervalFinder interval_of(router, use);
    const int64_t* routes_begin = router.interval_begin + router.first_interval(use);
    const int64_t first = bags.first_id(keys[use]), end = first + bags.num_ids(keys[use]);
    for (int64_t i = first; i < end; ++i) {
      const int64_t id = values[i];
      const int64_t interval = interval_of(router.is_inside(use, id) ? id : 0);
      for (int64_t at = routes_begin[interval]; at < routes_begin[interval + 1]; ++at) {
        // With column splits, several routes take the same ID, and each returns a partial dot product.
        out[i] += *next[router.interval_routes[at]]++;
      }
    }
  }
}

// Routing keeps the order of IDs, so the values for every route are read sequentially.
Tensor gather_weight_grads(Tensor received, Tensor values, Tensor offsets, std::optional<Tensor> segments,
                           int64_t num_keys, std::vector<int64_t> keys, std::vector<Tensor> router_tensors,
                           Tensor counts) {
  const Router router(router_tensors);
  const Tensor ids = contiguous(values), source = contiguous(received), count_tensor = contiguous(counts);
  const Bags bags(offsets, segments, num_keys, ids.numel());
  const int64_t* count = count_tensor.const_data_ptr<int64_t>();
  const float* from = source.const_data_ptr<float>();
  std::vector<const float*> next;
  int64_t total = 0;
  for (int64_t route = 0; route < router.num_routes; ++route) {
    next.push_back(from + total);
    total += count[route];
  }
  if (source.numel() != total) fail("received ", source.numel(), " elements in place of ", total);
  Tensor out = empty_buffer({ids.numel()}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  std::fill_n(to, ids.numel(), 0.0f);
  if (ids.scalar_type() == ScalarType::Int) {
    add_weight_grads(router, bags, keys, ids.const_data_ptr<int32_t>(), next, to);
  } else {
    add_weight_grads(router, bags, keys, ids.const_data_ptr<int64_t>(), next, to);
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("gather_pooled", TORCH_BOX(&gather_pooled));
  m.impl("gather_coded", TORCH_BOX(&gather_coded));
  m.impl("scatter_pooled", TORCH_BOX(&scatter_pooled));
  m.impl("gather_sequence", TORCH_BOX(&gather_sequence));
  m.impl("scatter_sequence", TORCH_BOX(&scatter_sequence));
  m.impl("gather_weight_grads", TORCH_BOX(&gather_weight_grads));
}

}  // namespace
}  // namespace meshrec
