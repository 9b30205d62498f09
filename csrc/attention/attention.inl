// Attention over jagged sequences in tiles of queries and keys, and its gradient. Included only by
// isa/kernels.inl, inside an unnamed namespace.
//
// [Note: tiles of attention] A unit is a sample, or some heads of it. Keys and values are packed once per
// unit: padded with zeros to whole vectors, and transposed where a product needs them as the right operand.
// Then every query tile is combined with the key tiles allowed by the mask. Bias and mask do not depend on
// the head, so they are computed once per tile. The gradient computes the scores again.

// Compared with torch's products over padded groups, a step takes a fourth to a sixth of the processor time,
// because most of it was spent outside the products.
// Keys attended to by a query: [0, prefix), [begin, end) and itself. These do not overlap.
struct AllowedKeys {
  int64_t prefix, begin, end, itself;  // itself: -1 if contained in a range

  int64_t within(int64_t first, int64_t last) const {
    const auto overlap = [&](int64_t a, int64_t b) {
      return std::max<int64_t>(0, std::min(b, last) - std::max(a, first));
    };
    return overlap(0, prefix) + overlap(begin, end) + (itself >= first && itself < last);
  }
};

inline AllowedKeys allowed_keys(const AttentionArgs& a, const AttentionUnit& unit, int64_t row) {
  const int64_t history = unit.length - unit.num_targets;
  AllowedKeys keys{0, 0, a.causal ? row + 1 : unit.length, -1};
  // Contextual queries attend to the whole history, also to later tokens.
  if (row < a.num_contextual) {
    keys.end = unit.length;
  } else if (a.window > 0) {
    keys.prefix = std::min(a.num_contextual, history);
    keys.begin = std::max(keys.prefix, row - a.window + 1);
    keys.end = std::min(keys.end, row + a.window);
  }
  // Targets are at the end, and only attend to themselves.
  keys.end = std::max(keys.begin, std::min(keys.end, history));
  if (row >= keys.prefix && (row < keys.begin || row >= keys.end)) keys.itself = row;
  return keys;
}

// Memory for the tiles of a unit, within attention_scratch floats.
struct AttentionWork {
  int64_t query_width, value_width, keys;  // padded
  float *bias, *mask, *scores, *weights, *grad_scores, *grad_bias;
  int32_t* buckets;
  // [heads, kAttentionRows, ...]. For the gradient, out_rows has the output gradient, row_sums its dot
  // product with the output, and row_max the log-sum-exp.
  float *grad_query, *out_rows, *query_rows, *row_sums, *row_max;
  float *keys_across, *keys_packed, *values_across, *values_packed, *grad_keys, *grad_values;  // [heads, ...]

  AttentionWork(const AttentionArgs& a, const AttentionUnit& unit) {
    const int64_t heads = unit.last_head - unit.first_head;
    query_width = attention_padded(a.query.width), value_width = attention_padded(a.value.width);
    keys = (unit.length + kAttentionColumns - 1) / kAttentionColumns * kAttentionColumns;
    float* next = a.scratch;
    const auto take = [&](int64_t size) { return next += size, next - size; };
    constexpr int64_t kTile = kAttentionRows * kAttentionColumns;
    for (float** tile : {&bias, &mask, &scores, &weights, &grad_scores, &grad_bias}) *tile = take(kTile);
    buckets = reinterpret_cast<int32_t*>(take(kTile));
    grad_query = take(heads * kAttentionRows * query_width),
    query_rows = take(heads * kAttentionRows * query_width);
    out_rows = take(heads * kAttentionRows * value_width);
    row_sums = take(heads * kAttentionRows), row_max = take(heads * kAttentionRows);
    for (float** packed : {&keys_across, &keys_packed, &grad_keys})
      *packed = take(heads * keys * query_width);
    for (float** packed : {&values_across, &values_packed, &grad_values})
      *packed = take(heads * keys * value_width);
  }
};

// Packs rows [0, count) for a head, padded with zeros to `width` values.
inline void pack_rows(const AttentionTokens& tokens, int64_t first, int64_t count, int64_t head,
                      int64_t width, float factor, float* target) {
  for (int64_t j = 0; j < count; ++j, target += width) {
    const float* row = tokens.at(first + j, head);
    for (int64_t d = 0; d < tokens.width; ++d) target[d] = row[d] * factor;
    for (int64_t d = tokens.width; d < width; ++d) target[d] = 0;
  }
}

// Packs the same rows as tiles [width, kAttentionColumns], end to end.
inline void pack_across(const AttentionTokens& tokens, int64_t first, int64_t count, int64_t head,
                        float* target) {
  for (int64_t begin = 0; begin < count; begin += kAttentionColumns) {
    const int64_t columns = std::min(kAttentionColumns, count - begin);
    for (int64_t j = 0; j < kAttentionColumns; ++j) {
      // Past the last key, an existing row is read, and 0 is stored.
      const float* row = tokens.at(first + begin + std::min(j, columns - 1), head);
      for (int64_t d = 0; d < tokens.width; ++d) target[d * kAttentionColumns + j] = j < columns ? row[d] : 0;
    }
    target += tokens.width * kAttentionColumns;
  }
}

// A tile of queries and keys in a unit, as positions within the sample.
struct AttentionTile {
  int64_t row, rows, column, columns, padded_columns;
  bool is_full;  // every query attends to every key
};

// Computes what all heads share: the sum of the biases, the time buckets, and the mask unless it is all ones.
inline void prepare_tile(const AttentionArgs& a, const AttentionUnit& unit, const AllowedKeys* allowed,
                         const AttentionTile& tile, AttentionWork& work) {
  const int64_t* times = a.time == nullptr ? nullptr : a.timestamps + unit.first_token;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.row + r, at = r * kAttentionColumns;
    float* bias = work.bias + at;
    if (a.position != nullptr) {
      std::memcpy(bias, a.position + a.max_length - 1 + tile.column - row, tile.columns * sizeof(float));
    } else if (times != nullptr) {
      std::memset(bias, 0, tile.columns * sizeof(float));
    }
    if (times != nullptr) {
      // The time of a history query is that of the next token, which it predicts. The last history token and
      // the targets use their own times.
      const int64_t from = times[row + 1 < unit.length - unit.num_targets ? row + 1 : row];
      int32_t* buckets = work.buckets + at;
      for (int64_t j = 0; j < tile.columns; ++j) {
        const int64_t apart = from - times[tile.column + j];
        const float seconds = std::max(float(apart < 0 ? -apart : apart), 1.f);
        // Exponent and three mantissa bits, minus the exponent bias. Not negative, because seconds are at
        // least 1.
        const int32_t slot = int32_t(as_bits(seconds) >> 20) - 127 * 8;
        buckets[j] = a.buckets->first[slot] + (seconds >= a.buckets->border[slot]);
        bias[j] += a.time[buckets[j]];
      }
    }
    for (int64_t j = tile.columns; j < tile.padded_columns; ++j) bias[j] = 0;
    if (tile.is_full) continue;
    float* mask = work.mask + at;
    std::memset(mask, 0, tile.padded_columns * sizeof(float));
    const auto allow = [&](int64_t begin, int64_t end) {
      begin = std::max<int64_t>(begin - tile.column, 0), end = std::min(end - tile.column, tile.columns);
      for (int64_t j = begin; j < end; ++j) mask[j] = 1;
    };
    const AllowedKeys& keys = allowed[r];
    allow(0, keys.prefix), allow(keys.begin, keys.end);
    if (keys.itself >= 0) allow(keys.itself, keys.itself + 1);
  }
}

// Finite: in a row that has no allowed key in the first tile, the maximum stays kNever, and -inf minus -inf
// would be NaN. The weights then come out as 1, and softmax_tile multiplies them by the mask.
constexpr float kNever = -1e30f;  // score for a key that a softmax must not see

// For every key tile with an allowed pair, calls prepare_tile and then work(tile).
template <typename Function>
inline void for_tiles(const AttentionArgs& a, const AttentionUnit& unit, int64_t row, int64_t rows,
                      AttentionWork& work, const Function& function) {
  AllowedKeys allowed[kAttentionRows];
  for (int64_t r = 0; r < rows; ++r) allowed[r] = allowed_keys(a, unit, row + r);
  for (int64_t column = 0; column < unit.length; column += kAttentionColumns) {
    const int64_t columns = std::min(kAttentionColumns, unit.length - column);
    const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
    int64_t pairs = 0;
    for (int64_t r = 0; r < rows; ++r) pairs += allowed[r].within(column, column + columns);
    // Whole tiles outside the causal triangle or the window are never computed.
    if (pairs == 0) continue;
    // Padding counts as masked, so the last tile of a sample has a mask unless its keys fill whole vectors.
    const AttentionTile tile{row, rows, column, columns, padded, pairs == rows * padded};
    prepare_tile(a, unit, allowed, tile, work);
    function(tile);
  }
}

// Adds the biases to the scaled products. Before a softmax, hides scores forbidden by the mask.
inline void finish_scores(const AttentionArgs& a, const AttentionTile& tile, AttentionWork& work) {
  // SiLU weights are multiplied by the mask afterwards, so their scores need not be hidden.
  const bool biased = a.position != nullptr || a.time != nullptr, hides = a.softmax && !tile.is_full;
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t j = r * kAttentionColumns; j < r * kAttentionColumns + tile.padded_columns; j += kLanes) {
      Vec score = load(work.scores + j) * a.scale;
      if (biased) score += load(work.bias + j);
      if (hides) score = load(work.mask + j) > 0.f ? score : splat(kNever);
      store(work.scores + j, score);
    }
  }
}

// Whether a sample reads keys and values in place: with few queries, packing would cost more than it saves.
// This is the case when a server continues a cached history.
inline bool reads_in_place(const AttentionArgs& a, const AttentionUnit& unit) {
  // Values are the right operand of a product, which reads whole vectors: in place, a padded row would run
  // into the next head.
  return unit.num_queries <= kFewQueries && a.value.width == attention_padded(a.value.width);
}

inline void scores_of(const AttentionArgs& a, const AttentionUnit& unit, const AttentionTile& tile,
                      int64_t head, AttentionWork& work) {
  const int64_t query = unit.first_query + tile.row - (unit.length - unit.num_queries);
  if (reads_in_place(a, unit)) {
    for (int64_t j = 0; j < tile.padded_columns; ++j) {
      // Padded columns repeat the last key instead of reading past the tokens. The mask hides them.
      const int64_t key = unit.first_token + tile.column + std::min(j, tile.columns - 1);
      for (int64_t r = 0; r < tile.rows; ++r) {
        work.scores[r * kAttentionColumns + j] =
            dot_product(a.query.at(query + r, unit.first_head + head), a.key.at(key, unit.first_head + head),
                        a.key.width);
      }
    }
    return finish_scores(a, tile, work);
  }
  const Left left{a.query.at(query, unit.first_head + head), a.query.stride, 1};
  const float* across = work.keys_across + head * work.keys * a.query.width + tile.column * a.query.width;
  product(left, {across, kAttentionColumns}, work.scores, kAttentionColumns, tile.rows, tile.padded_columns,
          a.query.width, false);
  finish_scores(a, tile, work);
}

inline float most_of(const float* row, int64_t count) {
  Vec most = load(row);
  for (int64_t j = kLanes; j < count; j += kLanes) most = larger(load(row + j), most);
  float found = most[0];
  for (int k = 1; k < kLanes; ++k) found = std::max(found, most[k]);
  return found;
}

inline float total_of(Vec part) {
  float total = 0;
  for (int k = 0; k < kLanes; ++k) total += part[k];
  return total;
}

// The online softmax of FlashAttention.
// Turns the scores in a tile into softmax weights before normalization, and rescales the sums from earlier
// tiles to the new row maxima.
inline void softmax_tile(const AttentionTile& tile, AttentionWork& work, float* out, float* sums,
                         float* most) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* row = work.scores + r * kAttentionColumns;
    const float top = std::max(most[r], most_of(row, tile.padded_columns));
    const float factor = exponential(splat(most[r] - top))[0];
    Vec sum{};
    for (int64_t j = 0; j < tile.padded_columns; j += kLanes) {
      Vec weight = exponential(load(row + j) - top);
      if (!tile.is_full) weight *= load(work.mask + r * kAttentionColumns + j);
      sum += weight;
      store(row + j, weight);
    }
    sums[r] = sums[r] * factor + total_of(sum), most[r] = top;
    // The factor is 1 unless this tile raised the maximum of the row.
    if (factor != 1.f) {
      for (int64_t d = 0; d < work.value_width; d += kLanes)
        store(out + r * work.value_width + d, load(out + r * work.value_width + d) * factor);
    }
  }
}

inline void silu_tile(const AttentionTile& tile, AttentionWork& work) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t j = r * kAttentionColumns; j < r * kAttentionColumns + tile.padded_columns; j += kLanes) {
      const Vec score = load(work.scores + j);
      Vec weight = score * sigmoid(score);
      if (!tile.is_full) weight *= load(work.mask + j);
      store(work.scores + j, weight);
    }
  }
}

inline float* out_of(float* data, const AttentionArgs& a, int64_t query, int64_t head, int64_t width) {
  return data + (query * a.num_heads + head) * width;
}

void attend(const AttentionArgs& a, const AttentionUnit& unit) {
  AttentionWork work(a, unit);
  const int64_t heads = unit.last_head - unit.first_head, out_size = kAttentionRows * work.value_width;
  const bool in_place = reads_in_place(a, unit);
  for (int64_t head = 0; head < heads && !in_place; ++head) {
    pack_across(a.key, unit.first_token, unit.length, unit.first_head + head,
                work.keys_across + head * work.keys * a.query.width);
    pack_rows(a.value, unit.first_token, unit.length, unit.first_head + head, work.value_width, 1.f,
              work.values_packed + head * work.keys * work.value_width);
  }
  for (int64_t row = unit.length - unit.num_queries; row < unit.length; row += kAttentionRows) {
    const int64_t rows = std::min(kAttentionRows, unit.length - row);
    std::memset(work.out_rows, 0, heads * out_size * sizeof(float));
    for (int64_t k = 0; k < heads * kAttentionRows; ++k) work.row_sums[k] = 0, work.row_max[k] = kNever;
    for_tiles(a, unit, row, rows, work, [&](const AttentionTile& tile) {
      for (int64_t head = 0; head < heads; ++head) {
        float* out = work.out_rows + head * out_size;
        scores_of(a, unit, tile, head, work);
        if (a.softmax) {
          softmax_tile(tile, work, out, work.row_sums + head * kAttentionRows,
                       work.row_max + head * kAttentionRows);
        } else {
          silu_tile(tile, work);
        }
        Right values{work.values_packed + (head * work.keys + tile.column) * work.value_width,
                     work.value_width};
        if (in_place)
          values = {a.value.at(unit.first_token + tile.column, unit.first_head + head), a.value.stride};
        product({work.scores, kAttentionColumns, 1}, values, out, work.value_width, rows, work.value_width,
                tile.columns, true);
      }
    });
    const int64_t query = unit.first_query + row - (unit.length - unit.num_queries);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t r = 0; r < rows; ++r) {
        const float sum = work.row_sums[head * kAttentionRows + r];
        // `sum` is positive: every query attends at least to itself (allowed_keys).
        const float factor = a.softmax ? 1.f / sum : 1.f / float(a.max_length);
        const float* from = work.out_rows + head * out_size + r * work.value_width;
        float* to = out_of(a.out, a, query + r, unit.first_head + head, a.value.width);
        for (int64_t d = 0; d < a.value.width; ++d) to[d] = from[d] * factor;
        if (a.softmax) {
          *out_of(a.log_sums, a, query + r, unit.first_head + head, 1) =
              work.row_max[head * kAttentionRows + r] + std::log(sum);
        }
      }
    }
  }
}

// Given scores, and weight gradients (in grad_scores), computes the weights and the score gradients. Softmax
// only: log_sums has the log-sum-exp per row, and shifts the dot product of output and output gradient.
inline void tile_gradient(const AttentionArgs& a, const AttentionTile& tile, const float* log_sums,
                          const float* shifts, bool sums_bias, AttentionWork& work) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t j = r * kAttentionColumns; j < r * kAttentionColumns + tile.padded_columns; j += kLanes) {
      const Vec score = load(work.scores + j), grad_weight = load(work.grad_scores + j);
      Vec weight, grad_score;
      if (a.softmax) {
        weight = exponential(score - log_sums[r]);
        if (!tile.is_full) weight *= load(work.mask + j);
        // Softmax backward: dS = P (dP - sum(out * grad)), with the sum computed once per row.
        grad_score = weight * (grad_weight - shifts[r]);
      } else {
        const Vec chance = sigmoid(score);
        weight = score * chance;
        // The derivative of s sigmoid(s) is sigmoid(s) + s sigmoid(s) (1 - sigmoid(s)).
        grad_score = grad_weight * (chance + weight * (1.f - chance));
        if (!tile.is_full) {
          const Vec mask = load(work.mask + j);
          weight *= mask, grad_score *= mask;
        }
      }
      store(work.weights + j, weight);
      store(work.grad_scores + j, grad_score);
      if (sums_bias) store(work.grad_bias + j, load(work.grad_bias + j) + grad_score);
    }
  }
}

inline void add_bias_gradients(const AttentionArgs& a, const AttentionTile& tile, const AttentionWork& work) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* grad_bias = work.grad_bias + r * kAttentionColumns;
    if (a.grad_position != nullptr) {
      // The bias is indexed by the distance from query to key, shifted by max_length - 1. It is contiguous
      // along a row, and all heads share it.
      float* target = a.grad_position + a.max_length - 1 + tile.column - tile.row - r;
      for (int64_t j = 0; j < tile.columns; ++j) target[j] += grad_bias[j];
    }
    if (a.grad_time != nullptr) {
      const int32_t* buckets = work.buckets + r * kAttentionColumns;
      for (int64_t j = 0; j < tile.columns; ++j)
        a.grad_time[buckets[j] * kHistogramLanes + j % kHistogramLanes] += grad_bias[j];
    }
  }
}

void attend_grad(const AttentionArgs& a, const AttentionUnit& unit) {
  AttentionWork work(a, unit);
  const int64_t heads = unit.last_head - unit.first_head, skipped = unit.length - unit.num_queries;
  const int64_t query_rows = kAttentionRows * work.query_width,
                value_rows = kAttentionRows * work.value_width;
  const AttentionTokens grads{a.grad, a.num_heads * a.value.width, a.value.width};
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t own = unit.first_head + head;
    pack_across(a.key, unit.first_token, unit.length, own,
                work.keys_across + head * work.keys * a.query.width);
    pack_across(a.value, unit.first_token, unit.length, own,
                work.values_across + head * work.keys * a.value.width);
    pack_rows(a.key, unit.first_token, unit.length, own, work.query_width, 1.f,
              work.keys_packed + head * work.keys * work.query_width);
  }
  // Every query tile adds to these.
  std::memset(work.grad_keys, 0, heads * work.keys * work.query_width * sizeof(float));
  std::memset(work.grad_values, 0, heads * work.keys * work.value_width * sizeof(float));
  const bool sums_bias = a.grad_position != nullptr || a.grad_time != nullptr;
  for (int64_t row = skipped; row < unit.length; row += kAttentionRows) {
    const int64_t rows = std::min(kAttentionRows, unit.length - row),
                  query = unit.first_query + row - skipped;
    std::memset(work.grad_query, 0, heads * query_rows * sizeof(float));
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t own = unit.first_head + head;
      pack_rows(a.query, query, rows, own, work.query_width, 1.f, work.query_rows + head * query_rows);
      float* grad_rows = work.out_rows + head * value_rows;
      // The forward divides SiLU outputs by max_length. Scaling the output gradient once per row carries that
      // through all products below.
      pack_rows(grads, query, rows, own, work.value_width, a.softmax ? 1.f : 1.f / float(a.max_length),
                grad_rows);
      for (int64_t r = 0; a.softmax && r < rows; ++r) {
        const float* out = out_of(a.out, a, query + r, own, a.value.width);
        float sum = 0;
        for (int64_t d = 0; d < a.value.width; ++d) sum += out[d] * grad_rows[r * work.value_width + d];
        work.row_sums[head * kAttentionRows + r] = sum;
        work.row_max[head * kAttentionRows + r] = *out_of(a.log_sums, a, query + r, own, 1);
      }
    }
    for_tiles(a, unit, row, rows, work, [&](const AttentionTile& tile) {
      if (sums_bias) std::memset(work.grad_bias, 0, kAttentionRows * kAttentionColumns * sizeof(float));
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t first_key = head * work.keys + tile.column;
        const float* grad_rows = work.out_rows + head * value_rows;
        scores_of(a, unit, tile, head, work);
        const float* values = work.values_across + first_key * a.value.width;
        product({grad_rows, work.value_width, 1}, {values, kAttentionColumns}, work.grad_scores,
                kAttentionColumns, rows, tile.padded_columns, a.value.width, false);
        tile_gradient(a, tile, work.row_max + head * kAttentionRows, work.row_sums + head * kAttentionRows,
                      sums_bias, work);
        product({work.weights, 1, kAttentionColumns}, {grad_rows, work.value_width},
                work.grad_values + first_key * work.value_width, work.value_width, tile.columns,
                work.value_width, rows, true);
        product({work.grad_scores, 1, kAttentionColumns},
                {work.query_rows + head * query_rows, work.query_width},
                work.grad_keys + first_key * work.query_width, work.query_width, tile.columns,
                work.query_width, rows, true);
        product({work.grad_scores, kAttentionColumns, 1},
                {work.keys_packed + first_key * work.query_width, work.query_width},
                work.grad_query + head * query_rows, work.query_width, rows, work.query_width, tile.columns,
                true);
      }
      if (sums_bias) add_bias_gradients(a, tile, work);
    });
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t r = 0; r < rows; ++r) {
        float* to = out_of(a.grad_query, a, query + r, unit.first_head + head, a.query.width);
        const float* from = work.grad_query + head * query_rows + r * work.query_width;
        // Scores are scale * q k. The factor is applied once per gradient row instead of once per pair.
        for (int64_t d = 0; d < a.query.width; ++d) to[d] = from[d] * a.scale;
      }
    }
  }
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t j = 0; j < unit.length; ++j) {
      const int64_t key = head * work.keys + j;
      float* to = out_of(a.grad_key, a, unit.first_token + j, unit.first_head + head, a.key.width);
      const float* from = work.grad_keys + key * work.query_width;
      for (int64_t d = 0; d < a.key.width; ++d) to[d] = from[d] * a.scale;
      std::memcpy(out_of(a.grad_value, a, unit.first_token + j, unit.first_head + head, a.value.width),
                  work.grad_values + key * work.value_width, a.value.width * sizeof(float));
    }
  }
}
