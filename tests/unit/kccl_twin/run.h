// What the twins of all kernels share: heaps, files of float32, and launches until all have ended.
#pragma once
#include "ptx.cuh"

namespace twin {

struct Gpu {
    std::vector<u64> heap;
    std::vector<u64> host;  // KogKcclHost
    u32 mirror = 0;
    Launch launch;
};

inline std::vector<float> read_floats(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) exit(3);
    fseek(file, 0, SEEK_END);
    std::vector<float> values(ftell(file) / 4);
    rewind(file);
    if (fread(values.data(), 4, values.size(), file) != values.size()) exit(3);
    fclose(file);
    return values;
}
inline void write_floats(const char* path, const void* values, size_t count) {
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(values, 4, count, file) != count) exit(3);
    fclose(file);
}

// 16-byte aligned start of a heap.
inline u64* start_of(Gpu& gpu) { return reinterpret_cast<u64*>((reinterpret_cast<uintptr_t>(gpu.heap.data()) + 127) / 128 * 128); }

template <class Peers>
Peers peers_of(std::vector<Gpu>& gpus, u32 rank) {
    Peers peers{};
    for (size_t i = 0; i < gpus.size(); ++i) peers.heap_ptr[i] = reinterpret_cast<uintptr_t>(start_of(gpus[i]));
    peers.rank = rank, peers.num_ranks = gpus.size();
    return peers;
}
template <class Waits>
Waits waits_of(Gpu& gpu, u64 limit_us) {
    return Waits{reinterpret_cast<uintptr_t>(gpu.host.data()), reinterpret_cast<uintptr_t>(&gpu.mirror), limit_us};
}

}  // namespace twin
