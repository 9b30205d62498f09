// Scans over all entries in a hash index; see scan.h. Included only by isa/kernels.inl, inside an unnamed
// namespace, after find.inl.

constexpr int64_t kScanned = 64;  // buckets per pass

#if defined(__AVX512DQ__)
typedef uint8_t HighBytes __attribute__((vector_size(8)));
#endif

// IDs up to the maximum, and their slots.
struct Candidates {
  int64_t count;
  // A vector store writes 8 entries per bucket, of which at most 7 count.
  uint64_t ids[8 * kScanned], slots[8 * kScanned];
};

// Adds the IDs in a bucket up to `most`. Without branches, because the count is unpredictable.
inline void add_candidates(const uint8_t* bucket, uint64_t least, uint64_t seed, int64_t most,
                           Candidates& to) {
  const uint64_t extra = bucket[63] >> 3, count = bucket[63] & 7;
#if defined(__AVX512DQ__)
  const Words lows = *reinterpret_cast<const WordsMemory*>(bucket);
  HighBytes high_bytes;
  std::memcpy(&high_bytes, bucket + 56, sizeof(high_bytes));
  const Words highs = __builtin_convertvector(high_bytes, Words);
  const Words ids = unmix(least + ((lows - least) << extra >> extra), seed);
  const Words slots = highs << extra | lows >> 1 >> (63 - extra);
  const __mmask8 chosen =
      __mmask8((1u << count) - 1) & _mm512_cmple_epi64_mask((__m512i)ids, _mm512_set1_epi64(most));
  _mm512_storeu_si512(to.ids + to.count, _mm512_maskz_compress_epi64(chosen, (__m512i)ids));
  _mm512_storeu_si512(to.slots + to.count, _mm512_maskz_compress_epi64(chosen, (__m512i)slots));
  to.count += __builtin_popcount(chosen);
#else
  for (uint64_t entry = 0; entry < 7; ++entry) {
    uint64_t low;
    std::memcpy(&low, bucket + 8 * entry, sizeof(low));
    const uint64_t id = unmix(least + ((low - least) << extra >> extra), seed);
    to.ids[to.count] = id,
    to.slots[to.count] = uint64_t(bucket[56 + entry]) << extra | low >> 1 >> (63 - extra);
    to.count += int64_t(entry < count) & int64_t(int64_t(id) <= most);
  }
#endif
}

// Returns how many IDs are listed.
int64_t scan(const ScanArgs& args) {
  const ScanArgs a = args;
  Candidates found;
  int64_t listed = 0;
  for (int64_t begin = a.begin; begin < a.end; begin += kScanned) {
    found.count = 0;
    for (int64_t b = begin; b < std::min(begin + kScanned, a.end); ++b) {
      // The smallest key that bucket b may hold, as in Shard::base.
      const int64_t first = std::max<int64_t>(0, b - kReach + 1);
      const uint64_t fraction = uint64_t(first) * (first < a.moved ? a.before_step : a.after_step);
      add_candidates(a.buckets + 64 * b, a.first_key | fraction >> a.shard_bits, a.seed, a.most, found);
    }
    for (int64_t i = 0; i < found.count; ++i) {
      a.ids[listed] = int64_t(found.ids[i]), a.slots[listed] = int64_t(found.slots[i]);
      // Always written, kept only if marked: without a branch on unpredictable marks.
      listed += a.marks[found.slots[i]];
    }
  }
  return listed;
}
