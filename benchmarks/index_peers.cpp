// A flat hash map of another library, from IDs to slots. One build for each: -DMAP=... names the class, and
// -DHEADER=... its header.
#include HEADER

#include <algorithm>
#include <cstdint>

using Map = MAP<int64_t, int64_t>;

extern "C" void* peer_create(const int64_t* ids, int64_t count) {
  Map* map = new Map;
  for (int64_t i = 0; i < count; ++i) map->emplace(ids[i], i);
  return map;
}

extern "C" void peer_destroy(void* map) { delete static_cast<Map*>(map); }

extern "C" void peer_find(const void* pointer, const int64_t* ids, int64_t count, int64_t* slots,
                          int64_t num_threads) {
  const Map& map = *static_cast<const Map*>(pointer);
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int64_t t = 0; t < num_threads; ++t)
    for (int64_t i = count * t / num_threads, end = count * (t + 1) / num_threads; i < end; ++i) {
      const auto found = map.find(ids[i]);
      slots[i] = found == map.end() ? -1 : found->second;
    }
}
