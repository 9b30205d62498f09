// Initial rows; see draw.h. Included only by isa/kernels.inl, inside an unnamed namespace.

// Computes rows [begin, end).
void draw(const DrawArgs& args, int64_t begin, int64_t end) {
  const DrawArgs a = args;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t bits = mix(uint64_t(a.ids[i]), a.seed);
    const uint32_t lower = uint32_t(bits) + uint32_t(a.first_column) * 0x9E3779B9u,
                   upper = uint32_t(bits >> 32);
    float* const target = a.rows + (a.slots == nullptr ? i : a.slots[i]) * a.width;
    for (int32_t d = 0; d < int32_t(a.width); ++d) {
      uint32_t x = (lower + uint32_t(d) * 0x9E3779B9u) ^ upper;
      x = (x ^ (x >> 16)) * 0x7FEB352Du;  // the finalizer "lowbias32" of C. Wellons
      x = (x ^ (x >> 15)) * 0x846CA68Bu;
      x ^= x >> 16;
      // The product is exact in double: 24 bits times 24 bits. So there is a single rounding, fused or not.
      target[d] = float(a.low + double(int32_t(x >> 8)) * a.step);
    }
  }
}
