// Attention of a chunk of tokens with heads of more than 128 values, which attention.cu has no registers for: binary16, with float32 scores and
// sums, by `mma`. An item is kRows rows of a head, a warp has 16 of them. Their queries stand in shared memory, a tile of keys and one of values
// beside them: while one is multiplied the other one is copied, and two thread blocks of a multiprocessor fill each other's waits.
//
// Bits: tiles of keys stand at fixed positions, and a tile that a row does not see changes nothing of it. So a row has the same bits wherever it
// stands, in chunks of every size.
#include "wide_attention_shape.cuh"
#include "fragments.cuh"

namespace kog {

using WideParams = KogWideAttentionParams;
constexpr u32 kStride = kHeadDim + kPadding, kEights = kHeadDim / 8;
constexpr int kScoreTiles = kKeys / 8, kValueTiles = kHeadDim / 8;
static_assert(kHeadDim % 16 == 0 && kRows == 64 && kKeys % 16 == 0, "four warps of 16 rows");

struct WideItem {
    const WideParams& params;
    u32 head, kv_head;
    int start, first, end;  // position of the chunk's first row, the item's first row, one past the last position of the chunk
    u16 *queries, *keys, *values;

    __device__ __forceinline__ explicit WideItem(const WideParams& all) : params(all) {
        head = blockIdx.x % kHeads, kv_head = head / kShare;
        first = static_cast<int>((all.num_tiles - 1 - blockIdx.x / kHeads) * kRows);  // the longest first
        start = *reinterpret_cast<const int*>(all.place_ptr), end = start + static_cast<int>(all.size);
        queries = reinterpret_cast<u16*>(at_shared(shared_memory())), keys = queries + kRows * kStride, values = keys + kKeys * kStride;
    }
    __device__ __forceinline__ int num_tiles() const { return (min(end, start + first + kRows) - 1) / kKeys + 1; }  // of keys
    // Rows of a head from row `from` on; behind row `last` - 1 there are zeros.
    __device__ __forceinline__ void copy(u16* to, u64 ptr, u32 row_values, u32 of_head, int from, int last, u32 count) const {
        const u16* rows = reinterpret_cast<const u16*>(ptr) + of_head * kHeadDim;
        for (u32 i = threadIdx.x; i < count * kEights; i += blockDim.x) {
            const int row = from + static_cast<int>(i / kEights);
            const bool is_there = row < last;
            copy_eight(to + i / kEights * kStride + i % kEights * 8, rows + static_cast<u64>(is_there ? row : from) * row_values + i % kEights * 8, is_there);
        }
    }
    __device__ __forceinline__ void copy_tile(u16* to, u64 ptr, int tile) const {
        if (tile < num_tiles()) copy(to, ptr, kKvHeads * kHeadDim, kv_head, tile * kKeys, end, kKeys);
        copies_commit();
    }

    __device__ __forceinline__ void run() const {
        const u32 warp_row = threadIdx.x / 32 * 16;
        const int position[2] = {start + first + static_cast<int>(warp_row + laneid() / 4), start + first + static_cast<int>(warp_row + laneid() / 4) + 8};
        float out[kValueTiles][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        copy(queries, params.query_ptr, kHeads * kHeadDim, head, first, static_cast<int>(params.size), kRows);
        copy_tile(keys, params.keys_ptr, 0);  // with the queries
        copy_tile(values, params.values_ptr, 0);
        const int tiles = num_tiles();
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            copies_wait<1>();  // this tile's keys
            __syncthreads();
            float scores[kScoreTiles][4] = {};
#pragma unroll
            for (int k = 0; k < kHeadDim / 16; ++k) {
                u32 a[4];
                load_operand(a, queries + warp_row * kStride + k * 16, kStride);
#pragma unroll
                for (int n = 0; n < kScoreTiles; n += 2) {
                    u32 b[4];
                    load_rows(b, keys + n * 8 * kStride + k * 16, kStride);
                    Fp16::mma(scores[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                    Fp16::mma(scores[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
            __syncthreads();
            copy_tile(keys, params.keys_ptr, tile + 1);
            float factor[2];
            exponentiate(scores, tile * kKeys, position, top, sum, factor);
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
            copies_wait<1>();  // its values
            __syncthreads();
#pragma unroll
            for (int k = 0; k < kKeys / 16; ++k) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = Fp16::pack(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int n = 0; n < kValueTiles; n += 2) {
                    u32 b[4];
                    load_columns(b, values + k * 16 * kStride + n * 8, kStride);
                    Fp16::mma(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                    Fp16::mma(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
            __syncthreads();
            copy_tile(values, params.values_ptr, tile + 1);
        }
        copies_wait<0>();
        store(out, sum, warp_row);
    }
    // Scores become exponentials; what was added up before is to be multiplied by `factor`.
    static __device__ __forceinline__ void exponentiate(float (&scores)[kScoreTiles][4], int first_key, const int (&position)[2], float (&top)[2],
                                                        float (&sum)[2], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = top[r];
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[n][2 * r + e];
                    if (first_key + n * 8 + static_cast<int>(laneid() % 4) * 2 + e > position[r]) score = -INFINITY;
                    highest = score > highest || score != score ? score : highest;  // what is no number is not hidden
                }
#pragma unroll
            for (int offset = 1; offset < 4; offset <<= 1) {
                const float other = __shfl_xor_sync(kFullWarp, highest, offset);
                highest = other > highest || other != other ? other : highest;
            }
            factor[r] = exp2_approx((top[r] - highest) * kScale);  // a row sees the first key, so this is a number
            top[r] = highest;
            float added = 0;
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[n][2 * r + e];
                    score = exp2_approx((score - highest) * kScale);
                    added += score;
                }
            sum[r] = sum[r] * factor[r] + added;
        }
    }
    __device__ __forceinline__ void store(const float (&out)[kValueTiles][4], float (&sum)[2], u32 warp_row) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(kFullWarp, sum[r], 1);
            sum[r] += __shfl_xor_sync(kFullWarp, sum[r], 2);
            const float inverse = 1.0f / sum[r];
            const u32 row = first + warp_row + laneid() / 4 + 8 * r;
            if (row >= params.size) continue;
            const u64 at = ((static_cast<u64>(head / kLaneHeads) * params.size + row) * kLaneHeads + head % kLaneHeads) * kHeadDim;
            u32* to = reinterpret_cast<u32*>(reinterpret_cast<u16*>(params.out_ptr) + at) + laneid() % 4;
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n) to[n * 4] = Fp16::pack(out[n][2 * r] * inverse, out[n][2 * r + 1] * inverse);
        }
    }
};

}  // namespace kog

using namespace kog;

extern "C" __global__ void __launch_bounds__(128, 2) attend_wide(const __grid_constant__ WideParams params) { WideItem(params).run(); }
