// Searches among ascending keys; see [Note: keys in buckets] in keyed.cpp. Included only by isa/kernels.inl,
// inside an unnamed namespace, after index/find.inl, which has the search loop.

// Writes the keys, and the addresses of their home buckets.
template <typename Id>
inline void begin_rows(const FindRowsArgs& a, const Id* ids, uint64_t* keys_to, uint64_t* homes_to) {
  constexpr uint64_t kSign = uint64_t(1) << 63;  // keys are ordered as signed integers
  const uint64_t first_bucket = uint64_t(reinterpret_cast<uintptr_t>(a.buckets)),
                 size = uint64_t(a.num_home_buckets);
#if defined(__AVX512F__)
  typedef Id Ids __attribute__((vector_size(sizeof(Id) * kKeys)));
  Ids own;
  std::memcpy(&own, ids, sizeof(own));
  const Words keys = mix((Words) __builtin_convertvector(own, SignedWords), a.seed), fractions = keys ^ kSign;
  const Words homes = ((fractions >> 32) * size + ((fractions & 0xffffffff) * size >> 32)) >> 32;
  *reinterpret_cast<Words*>(keys_to) = keys;
  *reinterpret_cast<Words*>(homes_to) = first_bucket + (homes << 6);
#else
  for (int i = 0; i < kKeys; ++i) {
    const uint64_t key = mix(uint64_t(int64_t(ids[i])), a.seed);
    const auto home = uint64_t((static_cast<unsigned __int128>(key ^ kSign) * size) >> 64);
    keys_to[i] = key, homes_to[i] = first_bucket + (home << 6);
  }
#endif
}

// `fits` becomes false if a row number exceeds the table.
inline GroupFound compare_rows(const uint64_t* keys, const uint64_t* buckets, uint64_t num_rows, bool& fits) {
#if defined(__AVX512F__)
  const Columns columns = transposed(buckets);
  const Words key = *reinterpret_cast<const WordsMemory*>(keys);
  Words entry = Words{} + 7;
#pragma GCC unroll 7
  for (uint64_t e = 7; e-- > 0;) entry = columns.words[e + 1] == key ? Words{} + e : entry;
  // A key above the last key of its bucket may be in the next bucket. Below that, it would be in this bucket.
  const auto is_missing = entry == 7,
             is_displaced = is_missing & ((SignedWords)columns.words[7] < (SignedWords)key);
  const Words rows = columns.words[0] + entry;
  const unsigned missing = _mm512_movepi64_mask((__m512i)is_missing);
  const unsigned displaced = _mm512_movepi64_mask((__m512i)is_displaced);
  fits &= _mm512_movepi64_mask((__m512i)(~is_missing & (rows >= num_rows))) == 0;
  return {rows | (Words)is_missing, missing & ~displaced, displaced};
#else
  GroupFound group = {};
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
    const uint8_t* const bucket = bucket_of(buckets[i]);
    const unsigned found = equal_words(bucket, keys[i], ~uint64_t(0)) >> 1, is_missing = found == 0;
    int64_t first, last;
    std::memcpy(&first, bucket, sizeof(first)), std::memcpy(&last, bucket + 56, sizeof(last));
    const uint64_t row = uint64_t(first) + uint64_t(__builtin_ctz(found | 1u << 7));
    const unsigned is_displaced = is_missing & unsigned(last < int64_t(keys[i]));
    fits &= is_missing | unsigned(row < num_rows);
    group.slots[i] = row | -uint64_t(is_missing);
    group.absent |= (is_missing & ~is_displaced) << i, group.displaced |= is_displaced << i;
  }
  return group;
#endif
}

template <typename Id>
int64_t find_rows_of(const FindRowsArgs& a) {
  const auto* const ids = static_cast<const Id*>(a.ids);
  bool fits = true;
  const auto begin = [&](int64_t i, uint64_t* keys, uint64_t* homes) __attribute__((always_inline)) {
    Id last[kKeys];
    begin_rows(a, i + kKeys <= a.count ? ids + i : filled_up(ids + i, a.count - i, last), keys, homes);
  };
  const auto compare = [&](const uint64_t* keys, const uint64_t* buckets) __attribute__((always_inline)) {
    return compare_rows(keys, buckets, uint64_t(a.num_rows), fits);
  };
  const uint64_t end = uint64_t(reinterpret_cast<uintptr_t>(a.buckets)) + 64 * uint64_t(a.num_buckets);
  const int64_t absent = find_all(begin, compare, a.count, end, a.num_buckets, a.slots, a.rows);
  return fits ? absent : -1;
}

// Returns how many IDs have no row; -1 if the buckets have rows that the table lacks.
int64_t find_rows(const FindRowsArgs& args) {
  const FindRowsArgs a = args;
  return a.wide_ids ? find_rows_of<int64_t>(a) : find_rows_of<int32_t>(a);
}
