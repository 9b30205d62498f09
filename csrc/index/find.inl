// Searches of a hash index; see find.h. Included by isa/kernels.inl only, inside its unnamed namespace.
//
// Keys go through in groups of eight. A group's keys and homes are computed together and their cache lines
// requested; some groups later, when the lines have come, each key is compared with its bucket.

constexpr int kKeys = 8, kGroupsAhead = 6;

typedef uint64_t Words __attribute__((vector_size(8 * kKeys)));
typedef uint64_t WordsMemory __attribute__((vector_size(8 * kKeys), aligned(8), may_alias));

struct KeyGroup {
  alignas(64) uint64_t keys[kKeys];
  alignas(64) const uint8_t* homes[kKeys];
};

// A number of each shard.
inline Words of_shards(const uint64_t* numbers, Words shards) {
#if defined(__AVX512F__)
  const auto* const all = reinterpret_cast<const Words*>(numbers);
  static_assert(kMostShards == 2 * kKeys);
  return __builtin_shuffle(all[0], all[1], shards);
#else
  Words found;
  for (int i = 0; i < kKeys; ++i) found[i] = numbers[shards[i]];
  return found;
#endif
}

inline void begin_group(const FindArgs& a, const int64_t* ids, KeyGroup& group) {
  const IndexView& index = *a.index;
  Words keys = *reinterpret_cast<const WordsMemory*>(ids);
  if (a.mixes) keys = mix(keys, a.mix_seed);
  keys = mix(keys + a.first, index.seed);
  const Words shards = keys >> 1 >> (63 - index.shard_bits), fractions = keys << index.shard_bits;
  const Words sizes = fractions < of_shards(index.boundary, shards) ? of_shards(index.before, shards)
                                                                    : of_shards(index.behind, shards);
  // floor(fraction * size / 2^64), as sizes are below 2^32.
  const Words homes = ((fractions >> 32) * sizes + ((fractions & 0xffffffff) * sizes >> 32)) >> 32;
  const Words addresses =
      uint64_t(reinterpret_cast<uintptr_t>(index.buckets)) + ((shards * uint64_t(index.room) + homes) << 6);
  std::memcpy(group.keys, &keys, sizeof(keys));
  std::memcpy(group.homes, &addresses, sizeof(addresses));
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) __builtin_prefetch(group.homes[i], 0, 3);
}

// The entries of a bucket whose low bits are those of the key, as bits.
inline unsigned equal_entries(const uint8_t* bucket, const uint64_t& key, int extra) {
  const uint64_t key_bits = ~uint64_t(0) >> extra;
#if defined(__AVX512F__)
  const Words entries = *reinterpret_cast<const WordsMemory*>(bucket);
  return _mm512_testn_epi64_mask((__m512i)(entries ^ key), _mm512_set1_epi64(int64_t(key_bits)));
#else
  unsigned found = 0;
#pragma GCC unroll 7
  for (int entry = 7; --entry >= 0;) {
    uint64_t low;
    std::memcpy(&low, bucket + 8 * entry, sizeof(low));
    found = 2 * found + unsigned(((low ^ key) & key_bits) == 0);
  }
  return found;
#endif
}

// Looks for the keys of a group, those of the IDs [begin, end), in their homes. Returns how many are
// displaced.
inline int64_t end_group(const FindArgs& a, const KeyGroup& group, int64_t begin, int64_t end,
                         int64_t* displaced) {
  int64_t num_displaced = 0;
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* const bucket = group.homes[i - begin];
    const int count = bucket[63] & 7, extra = bucket[63] >> 3;
    const unsigned found = equal_entries(bucket, group.keys[i - begin], extra) & ((1u << count) - 1);
    const int entry = __builtin_ctz(found | 1u << 7);
    uint64_t low;
    std::memcpy(&low, bucket + 8 * entry, sizeof(low));
    const uint64_t slot = uint64_t(bucket[56 + entry]) << extra | low >> 1 >> (63 - extra);
    a.slots[i] = found != 0 ? int64_t(slot) : -1;
    displaced[num_displaced] = i;  // without a branch, which would often be mispredicted
    num_displaced += unsigned(found == 0) & unsigned(count == 7);
  }
  return num_displaced;
}

int64_t find(const FindArgs& args) {
  const FindArgs a = args;
  KeyGroup ring[kGroupsAhead];
  const int64_t num_groups = (a.count + kKeys - 1) / kKeys;
  const auto begin_one = [&](int64_t g, KeyGroup& group) __attribute__((always_inline)) {
    if ((g + 1) * kKeys <= a.count) return begin_group(a, a.ids + g * kKeys, group);
    int64_t last[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) last[i] = a.ids[std::min(g * kKeys + i, a.count - 1)];
    begin_group(a, last, group);
  };
  for (int64_t g = 0; g < std::min<int64_t>(num_groups, kGroupsAhead); ++g) begin_one(g, ring[g]);
  int64_t num_displaced = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    KeyGroup& group = ring[g % kGroupsAhead];
    int64_t* const displaced = a.displaced + num_displaced;
    const int64_t begin = g * kKeys;
    num_displaced += begin + kKeys <= a.count ? end_group(a, group, begin, begin + kKeys, displaced)
                                              : end_group(a, group, begin, a.count, displaced);
    if (g + kGroupsAhead < num_groups) begin_one(g + kGroupsAhead, group);
  }
  return num_displaced;
}
