// Searches in a hash index; see find.h. Included only by isa/kernels.inl, inside an unnamed namespace.
//
// Keys are processed in groups of eight. For a group, keys and homes are computed together, and the cache
// lines are prefetched. Some groups later, when the lines have arrived, the keys are compared with the
// buckets. Keys that are not in a full home bucket are collected, and compared with the next bucket in
// another pass.

constexpr int kKeys = 8, kGroupsAhead = 24;
static_assert(kMaxFound % kKeys == 0);

typedef uint64_t Words __attribute__((vector_size(8 * kKeys)));
typedef uint64_t WordsMemory __attribute__((vector_size(8 * kKeys), aligned(8), may_alias));
typedef int64_t SignedWords __attribute__((vector_size(8 * kKeys)));

// IDs to mix at a time. AVX2 has no 64-bit vector product, but four products of three instructions each are
// faster than scalar code: 19 instructions fewer for each ID.
#if defined(__AVX2__)
typedef uint64_t Mixed __attribute__((vector_size(32)));
#else
typedef uint64_t Mixed;
#endif
constexpr int kMixed = sizeof(Mixed) / sizeof(uint64_t);

inline const uint8_t* bucket_of(uint64_t address) {
  return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(address));
}

// Writes the keys, and the addresses of their home buckets.
inline void begin_group(const FindArgs& a, const int64_t* ids, uint64_t* keys_to, uint64_t* homes_to) {
  const IndexView& index = *a.index;
  const uint64_t first_bucket = uint64_t(reinterpret_cast<uintptr_t>(index.buckets));
#if defined(__AVX512F__)
  Words keys = *reinterpret_cast<const WordsMemory*>(ids);
  if (a.mixes) keys = mix(keys, a.mix_seed);
  keys = mix(keys + a.first, index.seed);
  // Two shifts, because a single shift by 64, for an index with one shard, would be undefined.
  const Words shards = keys >> 1 >> (63 - index.shard_bits), fractions = keys << index.shard_bits;
  const auto of_shards = [&](const uint64_t* numbers) {
    const auto* const all = reinterpret_cast<const Words*>(numbers);
    static_assert(kMaxShards == 2 * kKeys);
    return __builtin_shuffle(all[0], all[1], shards);
  };
  const Words sizes =
      fractions < of_shards(index.boundary) ? of_shards(index.before) : of_shards(index.behind);
  // floor(fraction * size / 2^64); sizes are below 2^32.
  const Words homes = ((fractions >> 32) * sizes + ((fractions & 0xffffffff) * sizes >> 32)) >> 32;
  *reinterpret_cast<Words*>(keys_to) = keys;
  *reinterpret_cast<Words*>(homes_to) =
      first_bucket + ((shards * uint64_t(index.bucket_capacity) + homes) << 6);
#else
  for (int i = 0; i < kKeys; i += kMixed) {
    Mixed keys;
    std::memcpy(&keys, ids + i, sizeof(keys));
    if (a.mixes) keys = mix(keys, a.mix_seed);
    keys = mix(keys + a.first, index.seed);
    std::memcpy(keys_to + i, &keys, sizeof(keys));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
    const uint64_t key = keys_to[i];
    const uint64_t shard = key >> 1 >> (63 - index.shard_bits), fraction = key << index.shard_bits;
    // Not a branch, which would be unpredictable while the shard grows.
    const uint64_t is_behind = -uint64_t(fraction >= index.boundary[shard]);
    const uint64_t size = index.before[shard] + ((index.behind[shard] - index.before[shard]) & is_behind);
    const auto home = uint64_t((static_cast<unsigned __int128>(fraction) * size) >> 64);
    homes_to[i] = first_bucket + ((shard * uint64_t(index.bucket_capacity) + home) << 6);
  }
#endif
}

struct GroupFound {
  Words slots;                 // -1 for a key that is not in the bucket
  unsigned absent, displaced;  // bit masks: keys in no bucket, and keys that may be in a later bucket
};

#if defined(__AVX512F__)

// Word i from each of eight buckets.
struct Columns {
  Words words[kKeys];
};

inline Columns transposed(const uint64_t* buckets) {
  Words rows[kKeys], pairs[kKeys];
  Columns columns;
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) rows[i] = *reinterpret_cast<const WordsMemory*>(bucket_of(buckets[i]));
#pragma GCC unroll 4
  for (int i = 0; i < kKeys; i += 2) {
    pairs[i] = __builtin_shuffle(rows[i], rows[i + 1], Words{0, 8, 2, 10, 4, 12, 6, 14});
    pairs[i + 1] = __builtin_shuffle(rows[i], rows[i + 1], Words{1, 9, 3, 11, 5, 13, 7, 15});
  }
  constexpr Words kEven = {0, 1, 4, 5, 8, 9, 12, 13}, kOdd = {2, 3, 6, 7, 10, 11, 14, 15};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Words a = __builtin_shuffle(pairs[i], pairs[2 + i], kEven);  // words i and i + 4 from four buckets
    const Words b = __builtin_shuffle(pairs[4 + i], pairs[6 + i], kEven);
    const Words c = __builtin_shuffle(pairs[i], pairs[2 + i], kOdd);  // words i + 2 and i + 6
    const Words d = __builtin_shuffle(pairs[4 + i], pairs[6 + i], kOdd);
    columns.words[i] = __builtin_shuffle(a, b, kEven), columns.words[i + 4] = __builtin_shuffle(a, b, kOdd);
    columns.words[i + 2] = __builtin_shuffle(c, d, kEven),
                      columns.words[i + 6] = __builtin_shuffle(c, d, kOdd);
  }
  return columns;
}

inline GroupFound compare(const uint64_t* keys, const uint64_t* buckets) {
  const Columns columns = transposed(buckets);
  const Words key = *reinterpret_cast<const WordsMemory*>(keys), last = columns.words[7];
  const Words header = last >> 56, extra = header >> 3, count = header & 7, key_bits = ~Words{} >> extra;
  Words entry = Words{} + 7, low = {};
  // `low` must be the word of the first equal entry.
  // From last to first, because words past the last entry are undefined.
#pragma GCC unroll 7
  for (uint64_t e = 7; e-- > 0;) {
    const auto equal = ((columns.words[e] ^ key) & key_bits) == 0;
    entry = equal ? Words{} + e : entry, low = equal ? columns.words[e] : low;
  }
  const auto is_missing = entry >= count, is_displaced = is_missing & (count == 7);
  const Words slots = (last >> (entry << 3) & 0xff) << extra | low >> 1 >> (63 - extra);
  const unsigned missing = _mm512_movepi64_mask((__m512i)is_missing);
  const unsigned displaced = _mm512_movepi64_mask((__m512i)is_displaced);
  return {slots | (Words)is_missing, missing & ~displaced, displaced};
}

#else

// Mask for the bits in an entry's word that belong to the key, by the number of slot bits above the minimum.
struct KeyBits {
  uint64_t of[32];
  constexpr KeyBits() : of() {
    for (int extra = 0; extra < 32; ++extra) of[extra] = ~uint64_t(0) >> extra;
  }
};
constexpr KeyBits kKeyBits;

// Returns a bit mask of the words in a bucket whose key bits equal those of the key.
inline unsigned equal_words(const uint8_t* bucket, uint64_t key, uint64_t key_bits) {
#if defined(__AVX2__)
  const auto half = [&](const uint8_t* entries) {
    const __m256i other =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries)) ^ _mm256_set1_epi64x(int64_t(key));
    const __m256i none = _mm256_setzero_si256(), bits = other & _mm256_set1_epi64x(int64_t(key_bits));
    return unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(bits, none))));
  };
  return half(bucket) | half(bucket + 32) << 4;
#else
  unsigned found = 0;
#pragma GCC unroll 8
  for (int word = 8; --word >= 0;) {
    uint64_t own;
    std::memcpy(&own, bucket + 8 * word, sizeof(own));
    found = 2 * found + unsigned(((own ^ key) & key_bits) == 0);
  }
  return found;
#endif
}

inline GroupFound compare(const uint64_t* keys, const uint64_t* buckets) {
  GroupFound group = {};
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
    const uint8_t* const bucket = bucket_of(buckets[i]);
    const unsigned extra = bucket[63] >> 3, count = bucket[63] & 7;
    // Words past the last entry are undefined, but come after an equal entry.
    const unsigned found = equal_words(bucket, keys[i], kKeyBits.of[extra]);
    const unsigned entry = unsigned(__builtin_ctz(found | 1u << 7)), is_missing = entry >= count;
    uint64_t low;
    std::memcpy(&low, bucket + 8 * entry, sizeof(low));
    group.slots[i] =
        (uint64_t(bucket[56 + entry]) << extra | low >> 1 >> (63 - extra)) | -uint64_t(is_missing);
    group.absent |= (is_missing & unsigned(count < 7)) << i;
    group.displaced |= (is_missing & unsigned(count == 7)) << i;
  }
  return group;
}

#endif

// Appends the positions of displaced keys to a list with room for a whole group. Returns the new end.
inline uint32_t* collect(uint32_t* list, int64_t first, unsigned displaced) {
#if defined(__AVX512F__)
  const __m256i places =
      _mm256_add_epi32(_mm256_set1_epi32(int(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(list),
                      _mm256_maskz_compress_epi32(__mmask8(displaced), places));
  return list + __builtin_popcount(displaced);
#else
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) *list = uint32_t(first + i), list += displaced >> i & 1;
  return list;
#endif
}

// Searches displaced keys in the buckets after their homes, up to `end`. Returns how many are absent.
template <typename Compare>
int64_t find_behind(const Compare& compare, const uint64_t* keys, uint64_t* buckets, uint64_t end,
                    int64_t most_turns, uint32_t* displaced, int64_t count, int64_t* slots) {
  int64_t num_absent = 0;
  const auto request_next = [&](uint32_t place, int64_t& next) {
    // Buckets of a shard are adjacent. A hash index has kReach spare buckets after the last home, so only a
    // keyed table needs `end`.
    buckets[place] += 64;
    if (buckets[place] == end) return void(++num_absent);
    __builtin_prefetch(bucket_of(buckets[place]), 0, 3);
    displaced[next++] = place;
  };
  int64_t left = 0;
  for (int64_t i = 0; i < count; ++i) request_next(displaced[i], left);
  for (; left > 0 && most_turns > 0; --most_turns) {
    count = std::exchange(left, 0);
    for (int64_t i = 0; i < count; i += kKeys) {
      alignas(64) uint64_t own_keys[kKeys], own_buckets[kKeys];
      for (int64_t k = 0; k < kKeys; ++k) {
        const uint32_t place = displaced[std::min(i + k, count - 1)];
        own_keys[k] = keys[place], own_buckets[k] = buckets[place];
      }
      const GroupFound found = compare(own_keys, own_buckets);
      const int64_t rest = std::min<int64_t>(kKeys, count - i);
      for (int64_t k = 0; k < rest; ++k) slots[displaced[i + k]] = int64_t(found.slots[k]);
      const unsigned own = (1u << rest) - 1;
      num_absent += __builtin_popcount(found.absent & own);
      for (unsigned bits = found.displaced & own; bits != 0; bits &= bits - 1)
        request_next(displaced[i + __builtin_ctz(bits)], left);
    }
  }
  return num_absent + left;
}

// Prefetches as many rows as a lookup prefetches ahead of the row that it reads (rows_ahead in tbe/pool.inl).
inline void request_rows(const RowsAhead& rows, const int64_t* slots, int64_t count) {
  if (rows.data == nullptr) return;
  const int64_t most = std::min(count, rows_ahead(rows.row_bytes, true));
  for (int64_t i = 0; i < most; ++i)
    if (slots[i] >= 0) prefetch_row(to_prefetch(rows.data, slots[i], rows.row_bytes), rows.row_bytes);
}

// Finds the slots for keys, -1 for a key without one. begin(i, keys, buckets) writes the key group i, and the
// addresses of home buckets; `buckets` has room for all. Returns how many keys have no slot.
template <typename Begin, typename Compare>
inline int64_t find_all(const Begin& begin, const Compare& compare, int64_t count, uint64_t end,
                        int64_t most_turns, int64_t* slots, RowsAhead rows) {
  // On the stack: 20 bytes per ID, 40 KiB in all.
  alignas(64) uint64_t keys[kMaxFound], buckets[kMaxFound];
  uint32_t displaced[kMaxFound + kKeys];
  uint32_t* displaced_end = displaced;
  constexpr int64_t kAhead = kGroupsAhead * kKeys;
  const auto begin_at = [&](int64_t i) __attribute__((always_inline)) {
    begin(i, keys + i, buckets + i);
#if defined(__GNUC__)
    // loads the addresses from memory: extracting them from a vector is slower
    asm volatile("" ::: "memory");
#endif
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) __builtin_prefetch(bucket_of(buckets[i + k]), 0, 3);
  };
  // Fills the pipeline: from here on, a group is started whenever a group is compared.
  for (int64_t i = 0; i < std::min(count, kAhead); i += kKeys) begin_at(i);
  int64_t num_absent = 0;
  for (int64_t i = 0; i < count; i += kKeys) {
    if (i + kAhead < count) begin_at(i + kAhead);
    const GroupFound found = compare(keys + i, buckets + i);
    const int64_t rest = std::min<int64_t>(kKeys, count - i);
    if (rest == kKeys)
      *reinterpret_cast<WordsMemory*>(slots + i) = found.slots;
    else
      std::memcpy(slots + i, &found.slots, 8 * size_t(rest));
    const unsigned own = (1u << rest) - 1;
    num_absent += __builtin_popcount(found.absent & own);
    displaced_end = collect(displaced_end, i, found.displaced & own);
  }
  num_absent +=
      find_behind(compare, keys, buckets, end, most_turns, displaced, displaced_end - displaced, slots);
  request_rows(rows, slots, count);
  return num_absent;
}

// Copies the last IDs, fewer than a group, and repeats the last one.
template <typename Id>
inline const Id* filled_up(const Id* ids, int64_t count, Id* to) {
  for (int64_t k = 0; k < kKeys; ++k) to[k] = ids[std::min(k, count - 1)];
  return to;
}

// Returns how many IDs have no slot.
int64_t find(const FindArgs& args) {
  const FindArgs a = args;
  const auto begin = [&](int64_t i, uint64_t* keys, uint64_t* homes) __attribute__((always_inline)) {
    int64_t last[kKeys];
    begin_group(a, i + kKeys <= a.count ? a.ids + i : filled_up(a.ids + i, a.count - i, last), keys, homes);
  };
  const auto compare_all = [](const uint64_t* keys, const uint64_t* buckets)
                               __attribute__((always_inline)) { return compare(keys, buckets); };
  // No bucket has address 0, so `end` is never reached: kReach limits the search.
  return find_all(begin, compare_all, a.count, 0, kReach - 1, a.slots, a.rows);
}
