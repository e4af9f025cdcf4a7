// Products of pairs with experts as the monokernel has them, binary16 with float32 sums, on Hopper's matrix units.
//
// A tile has up to kColumns rows of a matrix, 64 for each of two groups of four warps, and up to Tile::kRows pairs. The matrix comes as the
// monokernel has it, and threads expand it into operands in registers, beside the products of what they expanded before; pairs are the operand in
// shared memory. The next kStages - 1 stages of both, each kStage columns, are on their way meanwhile. All threads copy pairs, which stand anywhere.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a row has.
#pragma once

#include "operands.cuh"

namespace kog {

template <class Tile>
__device__ __forceinline__ void make_barriers() {  // by one thread; others wait for it before they use them
    for (u32 i = 0; i < Tile::kStages; ++i) mbar_init(barrier_of<Tile>(i), 1);
    fence_barrier_init();
}

// A tile has a few neighbouring blocks.
template <class Form>
struct WholeBlocks : Blocks<Form> {
    static constexpr u32 kOfTile = kColumns / Form::kRows, kTileRows = kOfTile * Form::kRows;
    static constexpr u32 kAcross = (Blocks<Form>::kAll + kOfTile - 1) / kOfTile;  // tiles that all rows take

    // Of the matrix, at `i` of the tile whose first block is `first`; kNowhere: there is none.
    static __device__ __forceinline__ u32 row_at(u32 first, u32 i) {
        const u32 block = first + i / Form::kRows, at = i % Form::kRows;
        const u32 row = Blocks<Form>::kIsEven ? first * Form::kRows + i : Blocks<Form>::first_row(block) + at;
        return i < kTileRows && at < Blocks<Form>::num_rows(block) && row < Form::kMatrixRows ? row : kNowhere;
    }
    static __device__ __forceinline__ OperandRow operand_row(u32 first_block, u32 i) {
        const u32 row = i < kTileRows ? i : 0, at = row % Form::kRows, num_rows = Blocks<Form>::num_rows(first_block + row / Form::kRows);
        const u32 part = row / Form::kRows * part_bytes<kRowBytes>(Form::kRows);
        return {part + at * 64 + laneid() % 4 * 16, num_rows * 64, part + num_rows * kRowBytes + at * kScaleBytes,
                part + num_rows * (kRowBytes + kScaleBytes) + at * kZeroBytes};
    }
};

// Of up to kWidth rows. Tail::Share says which: `count` rows from `first` on, of which `room` are written, and blocks of the matrix from
// `block` on.
template <class Tile, u32 kWidth, class Form, class Tail>
struct ExpertProduct {
    using Parts = WholeBlocks<Form>;
    static constexpr u32 kStage = Tile::kStage, kPanels = kStage / kPanel;
    static constexpr u32 kStepsOfStage = kStage / kStepColumns;
    static constexpr u32 kXBytes = kWidth * kStage * 2, kPanelBytes = kWidth * kPanel * 2, kStageBytes = Tile::kStageBytes;
    static constexpr u32 kPartBytes = part_bytes<kRowBytes>(Form::kRows), kStepBytes = Parts::kOfTile * kPartBytes;  // of the parts of a step
    static constexpr u32 kSteps = (Tail::kColumnsOfLane + kStepColumns - 1) / kStepColumns, kStagesOfLane = (kSteps + kStepsOfStage - 1) / kStepsOfStage;
    static constexpr u32 kRowsOfThread = kWidth * 8 / kTileThreads;  // of which it copies 16 bytes of a panel
    static constexpr u32 kAhead = Tile::kStages - 1;  // stages that are on their way
    static constexpr bool kIsAhead = Tile::kCtas == 1 || kWidth < kFirstWideTile;  // wide tiles have no registers for operands beside those that are multiplied
    static_assert(kStageBytes >= kXBytes + kStepsOfStage * kStepBytes && kStageBytes % 1024 == 0 && kAhead >= 1, "stages");

    const typename Tail::Params& params;
    const typename Tail::Share share;
    static constexpr u32 kStages = Tail::kLanesOfTile * kStagesOfLane;
    u32 base;                 // of shared memory
    u32 rows[kRowsOfThread];  // where in what is multiplied, or kNowhere
    u32 stage_bytes;          // of a stage, as far as its barrier counts them
    OperandRow upper, lower;
    float sums[kWidth / 2];

    __device__ __forceinline__ void prepare() {
        base = aligned_memory();
#pragma unroll
        for (u32 i = 0; i < kRowsOfThread; ++i) {
            const u32 row = threadIdx.x / 8 + i * (kTileThreads / 8);
            rows[i] = row < share.count ? Tail::row_at(params, share.first + row) + threadIdx.x % 8 * 8 : kNowhere;
        }
        stage_bytes = 0;
        for (u32 i = 0; i < Parts::kOfTile; ++i) stage_bytes += share.block + i < Parts::kAll ? kStepsOfStage * part_bytes<kRowBytes>(Parts::num_rows(share.block + i)) : 0;
        upper = Parts::operand_row(share.block, Tail::row_of_operand(0)), lower = Parts::operand_row(share.block, Tail::row_of_operand(1));
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
        const u32 own = share.block + threadIdx.x / kStepsOfStage, n = threadIdx.x % kStepsOfStage, step = min(stage * kStepsOfStage + n, kSteps - 1);
        if (threadIdx.x < Parts::kOfTile * kStepsOfStage && own < Parts::kAll)  // behind the last step it stands once more: x is 0 there
            copy_bulk(to + kXBytes + n * kStepBytes + threadIdx.x / kStepsOfStage * kPartBytes, matrix + Parts::part_at(own, step),
                      part_bytes<kRowBytes>(Parts::num_rows(own)), barrier_of<Tile>(slot));
    }
    __device__ __forceinline__ void load_rows(u32 at, u32 slot) {
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

    // `half`: of the step, 64 columns.
    __device__ __forceinline__ void expand(u32 slot, u32 half, Operands& to) {
        const u32 weights = base + slot * kStageBytes + kXBytes;
        expand_row<kStepBytes>(weights, upper, half, 0, to.v[0][0], to.v[1][0]);
        expand_row<kStepBytes>(weights, lower, half, 0, to.v[0][1], to.v[1][1]);
    }
    __device__ __forceinline__ u32 panel(u32 slot, u32 i) const { return base + slot * kStageBytes + i * kPanelBytes; }
    // A stage: its first half is expanded beside the products of the stage before. `one`: where the products before the last have their operands.
    __device__ __forceinline__ void run_stage(u32 at, SlotRing<Tile::kStages>& ring, Operands& one, Operands& other) {
        mbar_wait(barrier_of<Tile>(ring.slot), ring.parity);
        const u32 before = ring.slot == 0 ? Tile::kStages - 1 : ring.slot - 1;
        if constexpr (!kIsAhead) {
            products_wait<0>();
            settle(sums), one.settle();
        } else if constexpr (kPanels > 1) {
            products_wait<1>();
            one.settle();
        }
        expand(ring.slot, 0, one);
        if constexpr (kIsAhead) {
            products_wait<0>();
            settle(sums), other.settle();
        }
        copies_wait<kAhead - 1>();
        __syncthreads();  // all have what this stage multiplies, and nobody reads the slot before it
        multiply(sums, panel(ring.slot, 0), one);
        if constexpr (kPanels > 1) {
            expand(ring.slot, 1, other);
            multiply(sums, panel(ring.slot, 1), other);
        }
        if (at + kAhead < kStages) load(at + kAhead, before);
        copies_commit();
        ring.advance();
    }
    __device__ __forceinline__ void run() {
        prepare();
#pragma unroll
        for (u32 at = 0; at < kAhead; ++at)
            if (at < kStages) load_matrix(at, at);
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
                    run_stage(lane * kStagesOfLane + stage + 1, ring, kIsAhead ? other : one, kIsAhead ? one : other);
                }
                if constexpr (kStagesOfLane % 2) run_stage(lane * kStagesOfLane + kStagesOfLane - 1, ring, one, other);
            }
            products_wait<0>();
            settle(sums);
            Tail::put(*this, lane);
        }
    }

    __device__ __forceinline__ u32 row_at(u32 i) const { return Parts::row_at(share.block, i); }  // of the matrix, of those of the tile
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
    using Parts = WholeBlocks<Form>;
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

// A thread block with rows: of the widths that are Tile::kLeast and some more times kLeastWidth the least that holds them.
template <class Tile, class Form, class Tail, u32 kWidth>
__device__ __forceinline__ void run_product(const typename Tail::Params& params, const typename Tail::Share& share) {
    if constexpr (kWidth < Tile::kRows) {
        if (share.count > kWidth) return run_product<Tile, Form, Tail, kWidth + kLeastWidth>(params, share);
    }
    ExpertProduct<Tile, kWidth, Form, Tail>{params, share}.run();
}

}  // namespace kog
