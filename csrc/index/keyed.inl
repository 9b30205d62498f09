// Searches of ascending keys; see [Note: keys in ascending order] in keyed.cpp. Included by isa/kernels.inl
// only, inside its unnamed namespace, after index/find.inl.
//
// Groups of eight IDs go through three stages, some groups apart: the entries of `starts` are requested, then
// the keys, and then these are compared.

constexpr int kStageGroups = 6, kWindow = 8;

struct RowsGroup {
  alignas(64) uint64_t keys[kKeys];
  int64_t firsts[kKeys];  // the bucket's number, and then where it begins
  int64_t ends[kKeys];
};

inline void request_starts(const FindRowsArgs& a, int64_t begin, RowsGroup& group) {
  typedef int32_t Narrow __attribute__((vector_size(4 * kKeys)));
  alignas(64) char last[8 * kKeys];
  const int64_t size = a.wide_ids ? 8 : 4, rest = a.count - begin;
  const char* ids = static_cast<const char*>(a.ids) + begin * size;
  if (rest < kKeys) {
    for (int64_t i = 0; i < kKeys; ++i)
      std::memcpy(last + i * size, ids + std::min(i, rest - 1) * size, size);
    ids = last;
  }
  Words keys;
  if (a.wide_ids) {
    std::memcpy(&keys, ids, sizeof(keys));
  } else {
    Narrow narrow;
    std::memcpy(&narrow, ids, sizeof(narrow));
    keys = (Words) __builtin_convertvector(narrow, SignedWords);
  }
  keys = mix(keys, a.seed);
  // Keys are in signed order; two shifts, as there may be one bucket.
  const Words buckets = (keys ^ uint64_t(1) << 63) >> 1 >> (a.shift - 1);
  std::memcpy(group.keys, &keys, sizeof(keys));
  std::memcpy(group.firsts, &buckets, sizeof(buckets));
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) __builtin_prefetch(a.starts + group.firsts[i], 0, 3);
}

// Returns whether the entries of `starts` are those of buckets.
inline bool request_keys(const FindRowsArgs& a, RowsGroup& group) {
  bool fits = true;
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
    const int64_t* const start = a.starts + group.firsts[i];
    const int64_t first = group.firsts[i] = start[0], end = group.ends[i] = start[1];
    fits &= unsigned(first >= 0) & unsigned(first <= end) & unsigned(end <= a.num_keys);
    __builtin_prefetch(a.keys + first, 0, 3);
    __builtin_prefetch(a.keys + first + kWindow - 1, 0, 3);
  }
  return fits;
}

// The keys [0, count) that are equal to one, as bits.
inline unsigned equal_keys(const int64_t* keys, int64_t count, int64_t key) {
#if defined(__AVX512F__)
  const __mmask8 inside = __mmask8((1u << count) - 1);
  return _mm512_mask_cmpeq_epi64_mask(inside, _mm512_maskz_loadu_epi64(inside, keys), _mm512_set1_epi64(key));
#else
  unsigned found = 0;
  for (int64_t i = 0; i < count; ++i) found |= unsigned(keys[i] == key) << i;
  return found;
#endif
}

inline int64_t row_of(const FindRowsArgs& a, int64_t width, int64_t key, int64_t first, int64_t end) {
  while (end - first > kWindow) {  // few buckets have so many keys
    const int64_t middle = first + (end - first) / 2;
    (a.keys[middle] <= key ? first : end) = middle;
  }
  const int64_t at = std::min(first, a.num_keys - width);
  const unsigned found = equal_keys(a.keys + at, width, key);
  return (at + __builtin_ctz(found | 1u << kWindow)) | -int64_t(found == 0);
}

// Returns how many IDs have no row; -1 if the entries of `starts` do not fit the keys.
int64_t find_rows(const FindRowsArgs& args) {
  const FindRowsArgs a = args;
  RowsGroup ring[16];
  static_assert(2 * kStageGroups < 16);
  const int64_t num_groups = (a.count + kKeys - 1) / kKeys, width = std::min<int64_t>(kWindow, a.num_keys);
  int64_t num_absent = 0;
  for (int64_t g = 0; g < num_groups + 2 * kStageGroups; ++g) {
    if (g < num_groups) request_starts(a, g * kKeys, ring[g % 16]);
    if (const int64_t asked = g - kStageGroups; asked >= 0 && asked < num_groups)
      if (!request_keys(a, ring[asked % 16])) return -1;
    const int64_t ready = g - 2 * kStageGroups;
    if (ready < 0) continue;
    const RowsGroup& group = ring[ready % 16];
    for (int64_t i = ready * kKeys, k = 0; i < std::min(a.count, (ready + 1) * kKeys); ++i, ++k) {
      a.slots[i] = row_of(a, width, int64_t(group.keys[k]), group.firsts[k], group.ends[k]);
      num_absent += a.slots[i] < 0;
    }
  }
  return num_absent;
}
