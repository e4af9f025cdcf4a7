// Products of the rows of a chunk with a quantised matrix as the monokernel has it, binary16 with float32 sums, on Hopper's matrix units.
//
// A tile is kColumns rows of a matrix, 64 for each of two groups of four warps, and up to Tile::kRows of the chunk. Two thread blocks of a cluster
// have the same rows, and each copies half of them to both. A third group of warps copies into a ring of slots, which hold a stage each: kStage
// columns of rows and matrix. The others expand codes into operands in registers, beside the products of what they expanded before; rows are the
// operand in shared memory. Thread blocks stay and take tiles in turn (tape.cu), so the next one is on its way while results are written.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a row has.
#pragma once

#include "operands.cuh"

namespace kog {

constexpr u32 kPair = 2, kPairWarps = kPair * kTileThreads / 32;
template <class Tile>
__device__ __forceinline__ u32 empty_barrier_of(u32 slot) {
    return barrier_of<Tile>(Tile::kStages + slot);
}
template <class Tile>
__device__ __forceinline__ void make_barriers() {  // by one thread; others wait for it before they use them
    for (u32 i = 0; i < Tile::kStages; ++i) {
        mbar_init(barrier_of<Tile>(i), 1);
        mbar_init(empty_barrier_of<Tile>(i), kPairWarps);
    }
    fence_barrier_init();
}

// The blocks of a matrix as tiles see them: each has kRows lines, of which the last one of a thread block of the monokernel may leave some without
// a row. A tile has kColumns neighbouring lines, whatever blocks they are of.
template <class Form>
struct Lines : Blocks<Form> {
    static constexpr u32 kOtherBytes = part_bytes<0>(Form::kRows);  // scales and zero points of a block's part
    static constexpr u32 kAll = Blocks<Form>::kAll * Form::kRows;
    static constexpr u32 kAcross = (kAll + kColumns - 1) / kColumns;  // tiles that all rows take
    static constexpr u32 kBlocks = (kColumns + 2 * Form::kRows - 1 - (Form::kRows & (0 - Form::kRows))) / Form::kRows;  // that a tile has lines of, at most

    // Of the matrix, in a line; kNowhere: there is none.
    static __device__ __forceinline__ u32 row_at(u32 line) {
        const u32 block = line / Form::kRows, at = line % Form::kRows;
        const u32 row = Blocks<Form>::kIsEven ? line : Blocks<Form>::first_row(block) + at;
        return at < Blocks<Form>::num_rows(block) && row < Form::kMatrixRows ? row : kNowhere;
    }
};

// A stage in shared memory: first up to Tile::kRows rows in panels, then codes, [section][line], then what the parts of the tile's blocks have
// behind codes. Tail::Share says what a tile has: of `width` rows from `first` on `count` are there and `room` are written; lines from `line` on.
template <class Tile, class Form, class Tail>
struct TapeCopies {
    using Parts = Lines<Form>;
    static constexpr u32 kStage = Tile::kStage, kPanels = kStage / kPanel;
    static constexpr bool kIsHalved = kStage < kStepColumns;  // a stage has half of a step of codes of 8 bit: one of its two sections
    static constexpr u32 kStagesOfStep = kIsHalved ? 2 : 1;
    static constexpr u32 kLineBytes = kRowBytes / kStagesOfStep, kSectionBytes = kColumns * 64, kCodeBytes = kColumns * kLineBytes;  // of a stage
    static constexpr u32 kXBytes = Tile::kRows * kStage * 2, kPanelBytes = Tile::kRows * kPanel * 2, kStageBytes = Tile::kStageBytes;
    static constexpr u32 kSections = kLineBytes / 64, kCopiesOfPart = kSections + (Parts::kOtherBytes > 0), kCopies = Parts::kBlocks * kCopiesOfPart;
    static constexpr u32 kSteps = (Tail::kWidth + kStepColumns - 1) / kStepColumns, kStages = kSteps * kStagesOfStep;
    static_assert(kStageBytes >= kXBytes + kCodeBytes + Parts::kBlocks * Parts::kOtherBytes && kStageBytes % 1024 == 0 && Tile::kStages >= 2, "stages");

    const typename Tail::Params& params;
    const typename Tail::Share share;
    const u32 base = aligned_memory();

    // What a tile has of one of its blocks.
    struct Piece {
        u32 block, first, end;  // lines
    };
    __device__ __forceinline__ Piece piece(u32 i) const {
        const u32 block = share.line / Form::kRows + i, line = block * Form::kRows;
        if (block >= Blocks<Form>::kAll) return {block, 0, 0};
        return {block, max(line, share.line), min(line + Parts::num_rows(block), share.line + kColumns)};
    }
    __device__ __forceinline__ u32 matrix_bytes() const {  // of a stage
        u32 bytes = 0;
        for (u32 i = 0; i < Parts::kBlocks; ++i) {
            const Piece own = piece(i);
            if (own.first < own.end) bytes += (own.end - own.first) * kLineBytes + part_bytes<0>(Parts::num_rows(own.block));
        }
        return bytes;
    }
    // A copy of stage `at` into slot `slot`, one of kCopies; it may have no bytes.
    struct Copy {
        const unsigned char* from;
        u32 to, bytes;
    };
    __device__ __forceinline__ Copy find_copy(u32 at, u32 slot, u32 number) const {
        const u32 which = number % kCopiesOfPart, i = number / kCopiesOfPart;
        const Piece own = piece(i);
        if (number >= kCopies || own.first >= own.end) return {nullptr, 0, 0};
        const u32 rows = Parts::num_rows(own.block), to = base + slot * kStageBytes + kXBytes;
        const unsigned char* const part = Tail::matrix(params, share) + Parts::part_at(own.block, at / kStagesOfStep);
        if (which == kSections) return {part + rows * kRowBytes, to + kCodeBytes + i * Parts::kOtherBytes, part_bytes<0>(rows)};
        const u32 section = at % kStagesOfStep + which;
        return {part + (section * rows + own.first % Form::kRows) * 64, to + which * kSectionBytes + (own.first - share.line) * 64, (own.end - own.first) * 64};
    }
    // Half of the rows of a pair, to both thread blocks.
    __device__ __forceinline__ void load_half(u32 at, u32 slot) const {
        constexpr u32 kBox = Tile::kLeast / kPair;  // rows
        const u32 own = share.width / kPair, first = cluster_rank() * own;
        for (u32 row = first; row < first + own; row += kBox)
#pragma unroll
            for (u32 panel = 0; panel < kPanels; ++panel)
                tensor_load_many(base + slot * kStageBytes + panel * kPanelBytes + row * 128, Tail::rows_map(params),
                                 static_cast<int>(at * kStage + panel * kPanel), static_cast<int>(share.first + row),
                                 static_cast<int>(Tail::lane_of_rows(share)), 0, barrier_of<Tile>(slot), (1u << kPair) - 1);
    }
    // All of a tile's copies, by a group of four warps. `is_first`: of this thread block's tiles; then the matrix is asked for before others have
    // written the rows.
    __device__ __forceinline__ void run(SlotRing<Tile::kStages>& ring, bool is_first) const {
        constexpr u32 kWarps = 4;
        static_assert(kCopies <= kWarps * 32, "copies");
        const u32 number = laneid() * kWarps + threadIdx.x / 32 % kWarps;  // warps have neighbouring copies: each queues its own one by one
        const u32 num_asked = is_first ? min(kStages, Tile::kStages) : 0, bytes = matrix_bytes() + share.width * kStage * 2;
        const auto ask = [&](const Copy& copy, u32 slot) {
            if (number == 0) mbar_arrive_expect(barrier_of<Tile>(slot), bytes);
            if (copy.bytes > 0) copy_bulk(copy.to, copy.from, copy.bytes, barrier_of<Tile>(slot));
        };
        for (u32 at = 0; at < num_asked; ++at) ask(find_copy(at, at, number), at);
        await_predecessors();
        for (u32 at = 0; at < kStages; ++at) {
            const Copy copy = find_copy(at, ring.slot, number);
            mbar_wait(empty_barrier_of<Tile>(ring.slot), ring.parity);
            if (at >= num_asked) ask(copy, ring.slot);
            if (number == kWarps - 1) load_half(at, ring.slot);
            ring.advance();
        }
    }
};

// Of up to kWidth rows.
template <class Tile, u32 kWidth, class Form, class Tail>
struct TapeProduct : TapeCopies<Tile, Form, Tail> {
    using Copies = TapeCopies<Tile, Form, Tail>;
    using Copies::base, Copies::kCodeBytes, Copies::kIsHalved, Copies::kPanelBytes, Copies::kPanels, Copies::kSectionBytes, Copies::kStageBytes,
        Copies::kSteps, Copies::kXBytes, Copies::params, Copies::share;
    using Parts = Lines<Form>;

    OperandRow upper = operand_row(Tail::row_of_operand(0)), lower = operand_row(Tail::row_of_operand(1));
    float sums[kWidth / 2];

    __device__ __forceinline__ OperandRow operand_row(u32 i) const {
        const u32 line = share.line + i, block = line / Form::kRows, at = line % Form::kRows;
        const u32 others = kCodeBytes + (block - share.line / Form::kRows) * Parts::kOtherBytes;
        return {i * 64 + laneid() % 4 * 16, kSectionBytes, others + at * kScaleBytes, others + Parts::num_rows(block) * kScaleBytes + at * kZeroBytes};
    }
    // This warp has multiplied what is in a slot. Whoever copies to it waits for all of the pair.
    __device__ __forceinline__ void release(u32 slot) {
        if (laneid() < kPair) mbar_arrive_cluster(cluster_address(empty_barrier_of<Tile>(slot), laneid()));
    }
    // `half`: of the step, 64 columns.
    __device__ __forceinline__ void expand(u32 slot, u32 half, Operands& to) {
        const u32 weights = base + slot * kStageBytes + kXBytes, first_section = kIsHalved ? half : 0;
        expand_row<0>(weights, upper, half, first_section, to.v[0][0], to.v[1][0]);
        expand_row<0>(weights, lower, half, first_section, to.v[0][1], to.v[1][1]);
    }
    // A half of a step is expanded beside the products of the half before it, and its own are queued behind these.
    __device__ __forceinline__ void run(SlotRing<Tile::kStages>& ring) {
        const auto before = [](u32 slot) { return slot == 0 ? Tile::kStages - 1 : slot - 1; };
        const auto panel = [&](u32 slot, u32 i) { return base + slot * kStageBytes + i * kPanelBytes; };
        Operands one, other;
#pragma unroll
        for (u32 i = 0; i < kWidth / 2; ++i) sums[i] = 0;
        mbar_wait(barrier_of<Tile>(ring.slot), ring.parity);
        expand(ring.slot, 0, one);
#pragma unroll 1
        for (u32 step = 0; step < kSteps; ++step) {
            const u32 first = ring.slot;
            multiply(sums, panel(first, 0), one);
            products_wait<1>();
            other.settle();
            if (step > 0) release(before(first));
            if constexpr (kIsHalved) {
                ring.advance();
                mbar_wait(barrier_of<Tile>(ring.slot), ring.parity);
            }
            expand(ring.slot, 1, other);
            multiply(sums, panel(ring.slot, kPanels - 1), other);
            products_wait<1>();
            one.settle();
            if constexpr (kIsHalved) release(first);
            ring.advance();
            if (step + 1 < kSteps) {
                mbar_wait(barrier_of<Tile>(ring.slot), ring.parity);
                expand(ring.slot, 0, one);
            }
        }
        products_wait<0>();
        release(before(ring.slot));
        settle(sums);
        Tail::put(*this);
    }

    // What this thread's sums of its upper (0) and lower (1) row are multiplied by.
    __device__ __forceinline__ float factor(u32 which) const { return Tail::factor(params, share, Tail::row_of_operand(which)); }
    __device__ __forceinline__ u32 row_at(u32 i) const { return Parts::row_at(share.line + i); }  // of the matrix, of those of the tile
};

}  // namespace kog
