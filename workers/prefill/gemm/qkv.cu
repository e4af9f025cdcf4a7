// Queries, keys and values of a chunk of tokens: products of its streams, times 1 / rms; queries and keys turned to their positions; keys and
// values rounded to the cache's type and put behind those that are there. What prefill.cu's `append` makes of a product, with its bits.
#include "qkv_shape.cuh"
#include "gemm.cuh"
#include "rope.cuh"

namespace kog {

constexpr u32 kQueryColumns = kHeads * kHeadDim, kKeyColumns = kKvHeads * kHeadDim;
constexpr int kPeriod = kHeadDim / 32;  // eighths of a row after which turns repeat themselves
static_assert(kQueryColumns + 2 * kKeyColumns == kWidth && kHeadDim % 32 == 0, "32 columns are of one head");

struct Turned {
    u32 values[kSums / 2];
    float scale[2];
    u32 lane, row, tile_column, column, start;  // of the first results; `start`: position of the chunk's first row
    float4 turns[2][kPeriod][2];   // of both rows: cosine and sine of 8 columns

    static __device__ __forceinline__ BoxPlace box_place(u32 lane, u32 box) { return plain_box(lane, box); }
    __device__ __forceinline__ void begin(const KogTileParams& params, const Tile& tile, u32 first_row) {
        lane = tile.lane, row = first_row, tile_column = tile.across * kColumns, column = tile_column + laneid() % 4 * 8;
        start = __ldg(reinterpret_cast<const int*>(params.place_ptr));
        const float* scales = reinterpret_cast<const float*>(params.inverse_rms_ptr) + static_cast<u64>(lane) * params.rows + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scale[r] = __ldg(scales + 8 * r);
            const u32 position = start + row + 8 * r, last = kMaxContext - 1;
            const float4* from = reinterpret_cast<const float4*>(params.rope_ptr) + (position < last ? position : last) * (kHeadDim / 4);
#pragma unroll
            for (int i = 0; i < kPeriod; ++i) {
                const u32 at = (column + i * 32) % kHeadDim / 4;
                turns[r][i][0] = __ldg(from + at), turns[r][i][1] = __ldg(from + at + 1);
            }
        }
    }
    __device__ __forceinline__ void take(const KogTileParams& params, const float (&sums)[kSums]) {
        u32 carries = 0;
#pragma unroll
        for (int eighth = 0; eighth < static_cast<int>(kEighths); ++eighth) {
            const u32 first = tile_column + eighth * 32;
            if (first < kQueryColumns) convert<true, false>(sums, eighth, carries);
            else if (first < kQueryColumns + kKeyColumns) convert<true, true>(sums, eighth, carries);
            else convert<false, true>(sums, eighth, carries);
        }
        if (carries & 0x80008000u) *reinterpret_cast<int*>(params.overflow_ptr) = 1;
    }
    template <bool kIsTurned, bool kIsKept>
    __device__ __forceinline__ void convert(const float (&sums)[kSums], int eighth, u32& carries) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = i / 2, half = i % 2;
            const float* v = sums + 16 * eighth + 8 * half + 2 * r;  // two pairs
            float4 pairs = {v[0] * scale[r], v[1] * scale[r], v[4] * scale[r], v[5] * scale[r]};
            if (kIsTurned) pairs = turned(pairs, turns[r][eighth % kPeriod][half]);
            u32* to = values + 8 * eighth + 4 * half + r;
            to[0] = kIsKept ? as_kept(pairs.x, pairs.y) : Fp16::pack(pairs.x, pairs.y);
            to[2] = kIsKept ? as_kept(pairs.z, pairs.w) : Fp16::pack(pairs.z, pairs.w);
            carries |= carry(to[0]) | carry(to[2]);
        }
    }
    // Bits 15 and 31 are set where a value of a pair is not finite.
    static __device__ __forceinline__ u32 carry(u32 packed) { return (packed & 0x7c007c00u) + 0x04000400u; }
    static __device__ __forceinline__ u32 as_kept(float low, float high) {
        const u32 kept = KvFormat::pack(low, high);
        return Fp16::pack(KvFormat::low(kept), KvFormat::high(kept));
    }
    template <int kEighth>  // 8 neighbouring values of both rows
    __device__ __forceinline__ void finish(const KogTileParams& params) const {
        const u32 at = column + kEighth * 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 of_row = static_cast<u64>(row + 8 * r) * kLanes + lane, of_position = of_row + static_cast<u64>(start) * kLanes;
            u64 to = params.query_ptr + (of_row * kQueryColumns + at) * 2;
            if (at >= kQueryColumns) to = params.keys_ptr + (of_position * kKeyColumns + at - kQueryColumns) * 2;
            if (at >= kQueryColumns + kKeyColumns) to = params.values_ptr + (of_position * kKeyColumns + at - kQueryColumns - kKeyColumns) * 2;
            const u32* v = values + 8 * kEighth + r;
            store_global(reinterpret_cast<void*>(to), make_uint4(v[0], v[2], v[4], v[6]));
        }
    }
};

}  // namespace kog

KOG_TILES(qkv, Turned)
