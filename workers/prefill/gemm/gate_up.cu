// Gates and ups of a chunk of tokens, and SwiGLU of them: activation = silu(s g) * s u, where g and u are the chunk's streams times the
// transposed rows of gates and of ups, rounded to binary16, and s = 1 / rms of the stream.
#include "gate_up_shape.cuh"
#include "gemm.cuh"

namespace kog {

struct Swiglu {
    static constexpr u32 kFfn = kWidth / 2;
    u32 values[kSums / 2];  // gates and ups; a box has those of 32 activations among each other, eight columns of each in turn
    float scale[2];
    unsigned char* to;  // where the first row's first activations go

    static __device__ __forceinline__ BoxPlace box_place(u32 lane, u32 box) {
        return {0, static_cast<int>(4 * box), static_cast<int>(2 * lane), 0};
    }
    __device__ __forceinline__ void begin(const KogTileParams& params, const Tile& tile, u32 row) {
        const u64 at = static_cast<u64>(tile.lane) * params.rows + row;
        const float* scales = reinterpret_cast<const float*>(params.inverse_rms_ptr) + at;
        scale[0] = __ldg(scales), scale[1] = __ldg(scales + 8);
        to = reinterpret_cast<unsigned char*>(params.out_ptr) + (at * kFfn + tile.across * (kColumns / 2) + laneid() % 4 * 8) * 2;
    }
    __device__ __forceinline__ void take(const KogTileParams&, const float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < kSums / 2; ++i) values[i] = Fp16::pack(sums[2 * i], sums[2 * i + 1]);
    }
    template <int kEighth>  // 8 neighbouring activations of a row
    __device__ __forceinline__ void finish(const KogTileParams&) const {
        constexpr int kBox = kEighth / 2, kRow = kEighth % 2;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 gates = values[2 * (8 * kBox + 2 * i) + kRow], ups = values[2 * (8 * kBox + 2 * i + 1) + kRow];
            words[i] = Fp16::pack(activation(Fp16::low(gates), Fp16::low(ups), scale[kRow]),
                                  activation(high_half(gates), high_half(ups), scale[kRow]));
        }
        store_global(to + (kRow * 8 * kFfn + kBox * 32) * 2, make_uint4(words[0], words[1], words[2], words[3]));
    }
    // In the arithmetic of prefill.cu's swiglu.
    static __device__ __forceinline__ float activation(float gate, float up, float scale) {
        const float g = gate * scale;
        return __fdividef(g, 1.0f + __expf(-g)) * (up * scale);
    }
};

}  // namespace kog

KOG_TILES(gate_up, Swiglu)
