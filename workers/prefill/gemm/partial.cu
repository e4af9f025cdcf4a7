// Partial sums of a chunk of tokens, of attention or of the FFN: a product, rounded to binary16.
#include "partial_shape.cuh"
#include "gemm.cuh"

namespace kog {

struct Rounded {
    u32 values[kSums / 2];
    unsigned char* to;  // where the first row's first values go

    static __device__ __forceinline__ BoxPlace box_place(u32 lane, u32 box) { return plain_box(lane, box); }
    __device__ __forceinline__ void begin(const KogTileParams& params, const Tile& tile, u32 row) {
        const u64 at = (static_cast<u64>(tile.lane) * params.rows + row) * kWidth;
        to = reinterpret_cast<unsigned char*>(params.out_ptr) + (at + tile.across * kColumns + laneid() % 4 * 8) * 2;
    }
    __device__ __forceinline__ void take(const KogTileParams&, const float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < kSums / 2; ++i) values[i] = Fp16::pack(sums[2 * i], sums[2 * i + 1]);
    }
    template <int kEighth>  // 8 neighbouring values of both rows
    __device__ __forceinline__ void finish(const KogTileParams&) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32* v = values + 8 * kEighth + r;
            store_global(to + (r * 8 * kWidth + kEighth * 32) * 2, make_uint4(v[0], v[2], v[4], v[6]));
        }
    }
};

}  // namespace kog

KOG_TILES(partial, Rounded)
