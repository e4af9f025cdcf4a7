// Products of rows with matrices as the monokernel has them, binary16 with float32 sums, on Hopper's matrix units: those of experts with their
// pairs (experts.cu), and quantised ones of all layers with the rows of a chunk (tape.cu).
//
// A tile has up to kColumns rows of a matrix, 64 for each of two groups of four warps, and up to Tile::kRows of what is multiplied. The matrix
// comes as the monokernel has it, and threads expand it into operands in registers, beside the products of what they expanded before; rows are
// the operand in shared memory. The next kStages - 1 stages of both, each kStage columns, are on their way meanwhile.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a row has.
#pragma once

#include "panels.cuh"
#include "pdl.cuh"
#include "slot_ring.cuh"
#include "weights.cuh"

namespace kog {

constexpr u32 kGroupThreads = 128, kGroups = kTileThreads / kGroupThreads;
constexpr u32 kPanel = 64;
static_assert(kColumns == 64 * kGroups && kTileThreads == 256, "a group has 64 columns");

__device__ __forceinline__ u32 aligned_memory() { return (shared_memory() + 1023) & ~1023u; }
template <class Tile>
__device__ __forceinline__ u32 barrier_of(u32 slot) {
    return aligned_memory() + Tile::kStages * Tile::kStageBytes + slot * 8;
}

constexpr u32 kPair = 2, kPairWarps = kPair * kTileThreads / 32;
template <class Tile>
__device__ __forceinline__ u32 empty_barrier_of(u32 slot) {  // of tiles whose rows are copied for a pair
    return barrier_of<Tile>(Tile::kStages + slot);
}
template <class Tile, bool kIsPaired>
__device__ __forceinline__ void make_barriers() {  // by one thread; others wait for it before they use them
    for (u32 i = 0; i < Tile::kStages; ++i) {
        mbar_init(barrier_of<Tile>(i), 1);
        if (kIsPaired) mbar_init(empty_barrier_of<Tile>(i), kPairWarps);
    }
    fence_barrier_init();
}

// Of up to kWidth rows. Tail::Share says which: `count` rows from `first` on, of which `room` are written, and blocks of the matrix from
// `block` on.
template <class Tile, u32 kWidth, class Form, class Tail>
struct TapeProduct {
    using Parts = Blocks<Form>;
    static constexpr u32 kStage = Tile::kStage, kPanels = kStage / kPanel;
    static constexpr bool kIsHalved = kStage < kStepColumns;  // a stage has half of a step of codes of 8 bit: one of its two sections
    static constexpr u32 kStepsOfStage = kIsHalved ? 1 : kStage / kStepColumns, kStagesOfStep = kIsHalved ? 2 : 1;
    static constexpr u32 kRowBytes = kog::kRowBytes / kStagesOfStep;  // of a step in a stage
    static constexpr u32 kXBytes = kWidth * kStage * 2, kPanelBytes = kWidth * kPanel * 2, kStageBytes = Tile::kStageBytes;
    static constexpr u32 kPartBytes = part_bytes<kRowBytes>(Form::kRows), kStepBytes = Parts::kOfTile * kPartBytes;  // of the parts of a step
    static constexpr u32 kSteps = (Tail::kColumnsOfLane + kStepColumns - 1) / kStepColumns, kStagesOfLane = (kSteps * kStagesOfStep + kStepsOfStage - 1) / kStepsOfStage;
    static constexpr u32 kRowsOfThread = kWidth * 8 / kTileThreads;  // of which it copies 16 bytes of a panel
    static constexpr u32 kAhead = Tile::kStages - 1;  // stages that are on their way
    static constexpr bool kIsAhead = Tile::kCtas == 1 || kWidth < kFirstWideTile;  // wide tiles have no registers for operands beside those that are multiplied
    static_assert(kStageBytes >= kXBytes + kStepsOfStage * kStepBytes && kStageBytes % 1024 == 0 && kAhead >= 1, "stages");

    const typename Tail::Params& params;
    const typename Tail::Share share;
    static constexpr bool kIsPaired = Tail::kIsPaired;
    static constexpr u32 kStages = Tail::kLanesOfTile * kStagesOfLane;
    u32 base;                 // of shared memory
    u32 rows[kRowsOfThread];  // where in what is multiplied, or kNowhere
    u32 stage_bytes;          // of a stage, as far as its barrier counts them
    OperandRow upper, lower;
    float sums[kWidth / 2];

    __device__ __forceinline__ void prepare() {
        base = aligned_memory();
#pragma unroll
        for (u32 i = 0; !kIsPaired && i < kRowsOfThread; ++i) {
            const u32 row = threadIdx.x / 8 + i * (kTileThreads / 8);
            rows[i] = row < share.count ? Tail::row_at(params, share.first + row) + threadIdx.x % 8 * 8 : kNowhere;
        }
        stage_bytes = kIsPaired ? kXBytes : 0;
        for (u32 i = 0; i < Parts::kOfTile; ++i) stage_bytes += share.block + i < Parts::kAll ? kStepsOfStage * part_bytes<kRowBytes>(Parts::num_rows(share.block + i)) : 0;
        upper = operand_row<Form, kRowBytes>(share.block, Tail::row_of_operand(0)), lower = operand_row<Form, kRowBytes>(share.block, Tail::row_of_operand(1));
    }
    // Queue the copies of stage `at` of all lanes' into slot `slot`: of the matrix, and of rows.
    __device__ __forceinline__ void load(u32 at, u32 slot) {
        load_matrix(at, slot);
        load_rows(at, slot);
    }
    __device__ __forceinline__ void load_matrix(u32 at, u32 slot) {
        const u32 lane = at / kStagesOfLane, stage = at % kStagesOfLane, to = base + slot * kStageBytes;
        const unsigned char* const matrix = Tail::matrix(params, share, lane);
        if (threadIdx.x == 0) mbar_arrive_expect(barrier_of<Tile>(slot), stage_bytes);
        if constexpr (kIsHalved) {  // codes, and all scales
            const u32 i = threadIdx.x / 2, own = share.block + i, rows = Parts::num_rows(own), is_scales = threadIdx.x % 2;
            const u32 bytes = is_scales ? part_bytes<0>(rows) : rows * kRowBytes, before = rows * kRowBytes * (is_scales ? 2 : stage % 2);
            if (i < Parts::kOfTile && own < Parts::kAll && bytes > 0)
                copy_bulk(to + kXBytes + i * kPartBytes + is_scales * rows * kRowBytes, matrix + Parts::part_at(own, stage / 2) + before, bytes,
                          barrier_of<Tile>(slot));
            return;
        }
        const u32 own = share.block + threadIdx.x / kStepsOfStage, n = threadIdx.x % kStepsOfStage, step = min(stage * kStepsOfStage + n, kSteps - 1);
        if (threadIdx.x < Parts::kOfTile * kStepsOfStage && own < Parts::kAll)  // behind the last step it stands once more: x is 0 there
            copy_bulk(to + kXBytes + n * kStepBytes + threadIdx.x / kStepsOfStage * kPartBytes, matrix + Parts::part_at(own, step),
                      part_bytes<kRowBytes>(Parts::num_rows(own)), barrier_of<Tile>(slot));
    }
    // Half of the rows of a pair, to both thread blocks.
    __device__ __forceinline__ void load_half(u32 at, u32 slot) {
        constexpr u32 kBox = Tile::kLeast / kPair;  // rows
        if (threadIdx.x != 0) return;
        const u32 first = cluster_rank() * (kWidth / kPair);
#pragma unroll
        for (u32 panel = 0; panel < kPanels; ++panel)
#pragma unroll
            for (u32 row = 0; row < kWidth / kPair; row += kBox)
                tensor_load_many(base + slot * kStageBytes + panel * kPanelBytes + (first + row) * 128, Tail::rows_map(params),
                                 static_cast<int>(at * kStage + panel * kPanel), static_cast<int>(share.first + first + row),
                                 static_cast<int>(Tail::lane_of_rows(share)), 0, barrier_of<Tile>(slot), (1u << kPair) - 1);
    }
    // This warp has multiplied what is in a slot. Whoever copies to it waits for all of the pair.
    __device__ __forceinline__ void release(u32 slot) {
        if constexpr (kIsPaired)
            if (laneid() < kPair) mbar_arrive_cluster(cluster_address(empty_barrier_of<Tile>(slot), laneid()));
    }
    __device__ __forceinline__ void load_rows(u32 at, u32 slot) {
        if constexpr (kIsPaired) return load_half(at, slot);
        else load_own(at, slot);
    }
    __device__ __forceinline__ void load_own(u32 at, u32 slot) {
        const u32 lane = at / kStagesOfLane, stage = at % kStagesOfLane, to = base + slot * kStageBytes;
        const u16* const x = Tail::rows_from(params, share, lane) + stage * kStage;
#pragma unroll
        for (u32 panel = 0; panel < kPanels; ++panel) {
            const bool is_inside = Tail::kWidth % kStage == 0 || stage * kStage + panel * kPanel + threadIdx.x % 8 * 8 < Tail::kWidth;
#pragma unroll
            for (u32 i = 0; i < kRowsOfThread; ++i) {
                const u32 row = threadIdx.x / 8 + i * (kTileThreads / 8);
                const bool is_there = rows[i] != kNowhere && is_inside;
                const u16* const from = is_there ? x + rows[i] + panel * kPanel : x;
                copy_async(to + panel * kPanelBytes + row * 128 + ((threadIdx.x % 8 ^ row % 8) << 4), reinterpret_cast<const unsigned char*>(from), is_there);
            }
        }
    }

    // Operands of 64 columns, two of 32, of 16 rows.
    struct Operands {
        u32 v[2][2][4];  // 32 columns, upper and lower row, pairs

        // They stay where they are until here, whatever multiplies them meanwhile.
        __device__ __forceinline__ void settle() {
#pragma unroll
            for (u32 i = 0; i < 16; ++i) kept(v[i / 8][i / 4 % 2][i % 4]);
        }
    };
    static constexpr u32 kGroupsOfStep = kScales > 0 ? kScales : 1;  // with a scale each
    __device__ __forceinline__ void expand_row(u32 weights, const OperandRow& row, u32 half, u32 first_section, u32 (&even)[4], u32 (&odd)[4]) {
        uint4 given[2];
        u32 factor = 0;
        Zero zero{0xe408e408u, 0xd480d480u};  // of 8
#pragma unroll
        for (u32 n = 0; n < 2; ++n) {
            const u32 operand = half * 2 + n;  // of a stage
            if constexpr (kIsCoded) {
                constexpr u32 kOfSection = 4 / Code::kWords, kOfScale = 4 / kGroupsOfStep;  // operands
                if (kScales > 0 && (operand % kOfScale == 0 || n == 0)) {
                    const u32 group = operand / kOfScale;
                    const float scale = Scale::get(at_shared(weights + row.scales + group * (kScaleBytes / kGroupsOfStep))) * (Code::kFactor * kWeightScale);
                    factor = Fp16::pack(scale, scale);
                    if constexpr (kZeroBytes > 0) zero = Int4::zero(*at_shared(weights + row.zeros + group));
                }
                const Words words = words_at(weights + row.first + (operand / kOfSection - first_section) * row.section);
                given[n] = Code::operands(words.all + operand % kOfSection * Code::kWords, factor, zero);
            } else {
                given[n] = Code::operands(words_at(weights + operand * kStepBytes + row.first).all, factor, zero);
            }
        }
        even[0] = given[0].x, even[1] = given[0].y, even[2] = given[0].z, even[3] = given[0].w;
        odd[0] = given[1].x, odd[1] = given[1].y, odd[2] = given[1].z, odd[3] = given[1].w;
    }
    struct Words {
        u32 all[4];
    };
    static __device__ __forceinline__ Words words_at(u32 address) {
        const uint4 words = *reinterpret_cast<const uint4*>(at_shared(address));
        return {{words.x, words.y, words.z, words.w}};
    }
    // `half`: of the step, 64 columns.
    __device__ __forceinline__ void expand(u32 slot, u32 half, Operands& to) {
        const u32 weights = base + slot * kStageBytes + kXBytes, first_section = kIsHalved ? half : 0;
        expand_row(weights, upper, half, first_section, to.v[0][0], to.v[1][0]);
        expand_row(weights, lower, half, first_section, to.v[0][1], to.v[1][1]);
    }
    __device__ __forceinline__ void multiply(u32 slot, u32 half, const Operands& of) {
        const u64 x = rows_at<kPanel>(base + slot * kStageBytes + half * kPanelBytes);
        __syncwarp();
        settle(sums);
        products_begin();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            const u32 i = k % 2 * 2;
            multiply_rows(sums, of.v[k / 2][0][i], of.v[k / 2][1][i], of.v[k / 2][0][i + 1], of.v[k / 2][1][i + 1], x + (k * 32 >> 4), true);
        }
        products_commit();
    }
    // A stage, which begins with half `half` of a step: its first half is expanded beside the products of the stage before. `one`: where the products before the last have their operands.
    __device__ __forceinline__ void run_stage(u32 at, SlotRing<Tile::kStages>& ring, Operands& one, Operands& other, u32 half = 0) {
        mbar_wait(barrier_of<Tile>(ring.slot), ring.parity);
        const u32 before = ring.slot == 0 ? Tile::kStages - 1 : ring.slot - 1;
        if constexpr (!kIsAhead) {
            products_wait<0>();
            settle(sums), one.settle();
            if (at > 0) release(before);
        } else if constexpr (kPanels > 1) {
            products_wait<1>();
            one.settle();
        }
        expand(ring.slot, half, one);
        if constexpr (kIsAhead) {
            products_wait<0>();
            settle(sums), other.settle();
            if (at > 0) release(before);
        }
        if constexpr (!kIsPaired) {
            copies_wait<kAhead - 1>();
            __syncthreads();  // all have what this stage multiplies, and nobody reads the slot before it
        }
        multiply(ring.slot, 0, one);
        if constexpr (kPanels > 1) {
            expand(ring.slot, 1, other);
            multiply(ring.slot, 1, other);
        }
        if (at + kAhead < kStages) {
            if (kIsPaired && at > 0) mbar_wait(empty_barrier_of<Tile>(before), (at - 1) / Tile::kStages & 1);
            load(at + kAhead, before);
        }
        copies_commit();
        ring.advance();
    }
    __device__ __forceinline__ void run() {
        prepare();
#pragma unroll
        for (u32 at = 0; at < kAhead; ++at)
            if (at < kStages) load_matrix(at, at);
        Tail::await_rows();
#pragma unroll
        for (u32 at = 0; at < kAhead; ++at) {
            if (at < kStages) load_rows(at, at);
            copies_commit();
        }
        SlotRing<Tile::kStages> ring;
        Operands one, other;
#pragma unroll 1
        for (u32 lane = 0; lane < Tail::kLanesOfTile; ++lane) {
#pragma unroll
            for (u32 i = 0; i < kWidth / 2; ++i) sums[i] = 0;
            if constexpr (kPanels > 1) {
#pragma unroll 1
                for (u32 stage = 0; stage < kStagesOfLane; ++stage) run_stage(lane * kStagesOfLane + stage, ring, one, other);
            } else {
#pragma unroll 1
                for (u32 stage = 0; stage + 1 < kStagesOfLane; stage += 2) {
                    run_stage(lane * kStagesOfLane + stage, ring, one, other);
                    run_stage(lane * kStagesOfLane + stage + 1, ring, kIsAhead ? other : one, kIsAhead ? one : other, kIsHalved);
                }
                if constexpr (kStagesOfLane % 2) run_stage(lane * kStagesOfLane + kStagesOfLane - 1, ring, one, other);
            }
            products_wait<0>();
            settle(sums);
            Tail::put(*this, lane);
        }
    }

    // What this thread's sums of its upper (0) and lower (1) row are multiplied by.
    __device__ __forceinline__ float factor(u32 which) const { return Tail::factor(params, share, Tail::row_of_operand(which)); }
    // ---- results on their way out: kOut of each row of what is multiplied, side by side ----
    template <u32 kOut>
    __device__ __forceinline__ u16* result_at(u32 row, u32 at) const {
        return reinterpret_cast<u16*>(at_shared(base + row * (kOut * 2 + 16) + at * 2));
    }
};

// Tails of products whose matrix has gates and ups in turn. A thread has a gate and the up that belongs to it: neighbours, of which every other
// thread has the upper one first, so that eight threads read 128 bytes that do not lie in the same banks.
template <class Form>
struct GatedRows {
    using Parts = Blocks<Form>;
    static constexpr u32 kOut = kColumns / 2, kTogether = Parts::kIsEven && Form::kRows % 4 == 0 && Form::kMatrixRows % 4 == 0 ? 2 : 1;
    static_assert(Form::kRows % 2 == 0 && Form::kLastRows % 2 == 0, "a gate and its up are in one block");
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return threadIdx.x / 32 * 16 + laneid() / 4 * 2 + (which ^ laneid() / 4 % 2); }
    static __device__ __forceinline__ u32 gate_row(u32 block) { return Parts::row_at(block, threadIdx.x / 32 * 16 + laneid() / 4 * 2); }  // this thread's

    // `activation`: of a gate and its up. `to`: where that of a row goes whose gate is a row of the matrix; of kTogether, if it begins there.
    template <class Product, class Activation, class To>
    static __device__ __forceinline__ void put(const Product& tile, Activation activation, To to) {
        const u32 at = threadIdx.x / 32 * 8 + laneid() / 4;
        const bool is_up_first = laneid() / 4 % 2;
        const float upper = tile.factor(0), lower = tile.factor(1);
        __syncthreads();  // nobody reads the slots any more
#pragma unroll
        for (u32 i = 0; i < sizeof(tile.sums) / sizeof(float); i += 4) {
            float values[2];
#pragma unroll
            for (u32 k = 0; k < 2; ++k) {
                const float one = tile.sums[i + k] * upper, other = tile.sums[i + 2 + k] * lower;
                values[k] = activation(is_up_first ? other : one, is_up_first ? one : other);
            }
            const u32 both = Fp16::pack(values[0], values[1]), row = i * 2 + laneid() % 4 * 2;
            *tile.template result_at<kOut>(row, at) = static_cast<u16>(both);
            *tile.template result_at<kOut>(row + 1, at) = static_cast<u16>(both >> 16);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < tile.share.count * (kOut / kTogether); i += kTileThreads) {
            const u32 row = i / (kOut / kTogether), first = i % (kOut / kTogether) * kTogether, gate = Parts::row_at(tile.share.block, 2 * first);
            if (gate == kNowhere) continue;
            u16* const there = to(row, gate);
            if constexpr (kTogether == 2) *reinterpret_cast<u32*>(there) = *reinterpret_cast<const u32*>(tile.template result_at<kOut>(row, first));
            else *there = *tile.template result_at<kOut>(row, first);
        }
    }
};

// Tails whose results are binary16 as they are. A thread has two neighbouring rows of the matrix twice, in such an order that a transposition
// gives it four.
template <class Form>
struct PlainRows {
    using Parts = Blocks<Form>;
    static __device__ __forceinline__ u32 row_of_operand(u32 which) { return threadIdx.x / 32 * 16 + laneid() / 8 * 4 + which * 2 + laneid() / 4 % 2; }

    // `to`: where the results of a row begin.
    template <class Product, class To>
    static __device__ __forceinline__ void put(const Product& tile, To to) {
        const u32 own = threadIdx.x / 32 * 16 + laneid() % 4 * 4, first_row = Parts::row_at(tile.share.block, own);
        const float upper = tile.factor(0), lower = tile.factor(1);
#pragma unroll
        for (u32 i = 0; i < sizeof(tile.sums) / sizeof(float); i += 4) {
            u32 first = transposed(Fp16::pack(tile.sums[i] * upper, tile.sums[i + 1] * upper));
            u32 last = transposed(Fp16::pack(tile.sums[i + 2] * lower, tile.sums[i + 3] * lower));
            const u32 row = i * 2 + laneid() / 4;
            if (row >= tile.share.room) continue;
            if (row >= tile.share.count) first = last = 0;
            u16* const there = to(row);
            if constexpr (Parts::kIsEven && Form::kRows % 4 == 0 && Form::kMatrixRows % 4 == 0) {
                if (first_row != kNowhere) *reinterpret_cast<uint2*>(there + first_row) = make_uint2(first, last);
            } else {
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    const u32 at = Parts::row_at(tile.share.block, own + k);
                    if (at != kNowhere) there[at] = static_cast<u16>((k < 2 ? first : last) >> k % 2 * 16);
                }
            }
        }
    }
};

// A thread block with rows: of the widths that are Tile::kLeast and some more times kLeastWidth the least that holds them.
template <class Tile, class Form, class Tail, u32 kWidth>
__device__ __forceinline__ void run_product(const typename Tail::Params& params, const typename Tail::Share& share) {
    if constexpr (kWidth < Tile::kRows) {
        if (share.count > kWidth) return run_product<Tile, Form, Tail, kWidth + kLeastWidth>(params, share);
    }
    TapeProduct<Tile, kWidth, Form, Tail>{params, share}.run();
}

}  // namespace kog
