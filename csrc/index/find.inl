// Searches of a hash index; see find.h. Included by isa/kernels.inl only, inside its unnamed namespace.
//
// Keys go through in groups of eight. A group's keys and homes are computed together and their cache lines
// requested; some groups later, when the lines have come, each key is compared with its bucket. Keys whose
// home is full and does not have them are collected, and compared with the next bucket in a further turn.

constexpr int kKeys = 8, kGroupsAhead = 16;
constexpr int64_t kDisplacedAhead = 32;
static_assert(kMostFound % kKeys == 0);

typedef uint64_t Words __attribute__((vector_size(8 * kKeys)));
typedef uint64_t WordsMemory __attribute__((vector_size(8 * kKeys), aligned(8), may_alias));
typedef int64_t SignedWords __attribute__((vector_size(8 * kKeys)));
typedef uint8_t Bytes __attribute__((vector_size(kKeys)));

struct KeyGroup {
  Words keys, buckets;  // buckets: their addresses
};

// Keys that are not in a full bucket: their places among the IDs, and the buckets behind.
struct Displaced {
  int64_t count;
  uint64_t places[kMostFound], keys[kMostFound], buckets[kMostFound];
};

// The bits of an entry's word that belong to its key, by the bits of its slot beyond the least.
struct KeyBits {
  uint64_t of[32];
  constexpr KeyBits() : of() {
    for (int extra = 0; extra < 32; ++extra) of[extra] = ~uint64_t(0) >> extra;
  }
};
constexpr KeyBits kKeyBits;

inline Words widened(const uint8_t* bytes) {
  Bytes all;
  std::memcpy(&all, bytes, sizeof(all));
  return __builtin_convertvector(all, Words);
}

inline const uint8_t* bucket_of(uint64_t address) {
  return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(address));
}

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
  group.keys = keys;
  group.buckets =
      uint64_t(reinterpret_cast<uintptr_t>(index.buckets)) + ((shards * uint64_t(index.room) + homes) << 6);
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) __builtin_prefetch(bucket_of(group.buckets[i]), 0, 3);
}

// The entries of a bucket whose key bits are those of the key, as bits; those without an entry, too.
inline unsigned equal_entries(const uint8_t* bucket, const uint64_t& key, const uint64_t& key_bits) {
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

struct GroupFound {
  Words slots;                    // -1 where a key is not in its bucket
  Words is_absent, is_displaced;  // -1: true
};

inline GroupFound compare(const KeyGroup& group) {
  alignas(64) uint64_t keys[kKeys], buckets[kKeys], lows[kKeys];
  uint8_t highs[kKeys], entries[kKeys], headers[kKeys];
  std::memcpy(keys, &group.keys, sizeof(keys));
  std::memcpy(buckets, &group.buckets, sizeof(buckets));
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) {
    const uint8_t* const bucket = bucket_of(buckets[i]);
    const uint8_t header = bucket[63];
    const uint64_t found =
        equal_entries(bucket, keys[i], kKeyBits.of[header >> 3]) & ((1u << (header & 7)) - 1);
    const uint64_t entry = uint64_t(__builtin_ctzll(found | 1u << 7));
    std::memcpy(&lows[i], bucket + 8 * entry, sizeof(lows[i]));
    highs[i] = bucket[56 + entry], entries[i] = uint8_t(entry), headers[i] = header;
  }
  Words low;
  std::memcpy(&low, lows, sizeof(low));
  const Words header = widened(headers), extra = header >> 3;
  const Words is_missing = (Words)(widened(entries) == 7), is_full = (Words)((header & 7) == 7);
  return {(widened(highs) << extra | low >> 1 >> (63 - extra)) | is_missing, is_missing & ~is_full,
          is_missing & is_full};
}

// Collects the displaced keys of a group; there must be room for a whole group.
inline void collect(const KeyGroup& group, Words places, Words is_displaced, Displaced& to) {
  const Words next = group.buckets + 64;
#if defined(__AVX512DQ__)
  const __mmask8 chosen = _mm512_movepi64_mask((__m512i)is_displaced);
  const auto add = [&](uint64_t* list, Words words) {
    _mm512_storeu_si512(list + to.count, _mm512_maskz_compress_epi64(chosen, (__m512i)words));
  };
  add(to.places, places), add(to.keys, group.keys), add(to.buckets, next);
  to.count += __builtin_popcount(chosen);
#else
  for (int i = 0; i < kKeys; ++i) {
    to.places[to.count] = places[i], to.keys[to.count] = group.keys[i], to.buckets[to.count] = next[i];
    to.count += int64_t(is_displaced[i] & 1);
  }
#endif
}

inline int64_t sum_of(Words words) {
  uint64_t sum = 0;
  for (int i = 0; i < kKeys; ++i) sum += words[i];
  return int64_t(sum);
}

inline Words load_words(const uint64_t* from) { return *reinterpret_cast<const WordsMemory*>(from); }

// Looks for displaced keys in their buckets, and collects those that are not there either. Returns how many
// are absent.
inline int64_t find_behind(const FindArgs& a, Displaced& displaced) {
  auto& [collected, places, keys, buckets] = displaced;
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t count = std::exchange(collected, 0);
  for (int64_t i = count; i % kKeys != 0; ++i)  // a whole group
    places[i] = places[count - 1], keys[i] = keys[count - 1], buckets[i] = buckets[count - 1];
  Words num_absent = {};
  for (int64_t i = -kDisplacedAhead; i < count; i += kKeys) {
    for (int64_t j = i + kDisplacedAhead; j < std::min(count, i + kDisplacedAhead + kKeys); ++j)
      __builtin_prefetch(bucket_of(buckets[j]), 0, 3);
    if (i < 0) continue;
    const KeyGroup group{load_words(keys + i), load_words(buckets + i)};
    const Words place = load_words(places + i), is_one = (Words)(lanes < uint64_t(count - i));
    const GroupFound found = compare(group);
    for (int k = 0; k < kKeys; ++k) a.slots[place[k]] = int64_t(found.slots[k]);
    num_absent -= found.is_absent & is_one;
    collect(group, place, found.is_displaced & is_one, displaced);
  }
  return sum_of(num_absent);
}

// Returns how many IDs have no slot.
int64_t find(const FindArgs& args) {
  Displaced displaced;
  const FindArgs a = args;
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  KeyGroup ring[kGroupsAhead];
  const int64_t num_groups = (a.count + kKeys - 1) / kKeys;
  const auto begin_one = [&](int64_t g, KeyGroup& group) __attribute__((always_inline)) {
    if ((g + 1) * kKeys <= a.count) return begin_group(a, a.ids + g * kKeys, group);
    int64_t last[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) last[i] = a.ids[std::min(g * kKeys + i, a.count - 1)];
    begin_group(a, last, group);
  };
  for (int64_t g = 0; g < std::min<int64_t>(num_groups, kGroupsAhead); ++g) begin_one(g, ring[g]);
  displaced.count = 0;
  Words num_absent = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    KeyGroup& group = ring[g % kGroupsAhead];
    const GroupFound found = compare(group);
    const int64_t rest = std::min<int64_t>(kKeys, a.count - g * kKeys);
    if (rest == kKeys)
      *reinterpret_cast<WordsMemory*>(a.slots + g * kKeys) = found.slots;
    else
      std::memcpy(a.slots + g * kKeys, &found.slots, 8 * size_t(rest));
    const Words is_one = (Words)(lanes < uint64_t(rest));
    num_absent -= found.is_absent & is_one;
    collect(group, lanes + uint64_t(g * kKeys), found.is_displaced & is_one, displaced);
    if (g + kGroupsAhead < num_groups) begin_one(g + kGroupsAhead, group);
  }
  int64_t absent = sum_of(num_absent);
  for (int64_t turn = 1; turn < kReach && displaced.count > 0; ++turn) absent += find_behind(a, displaced);
  return absent + displaced.count;
}
