// Products of rows with a matrix as the monokernel has it, binary16 with float32 sums, on Hopper's matrix units: of a chunk with a quantised one
// (tape.cu), of pairs with their expert (experts.cu).
//
// A tile is Tile::kLines rows of a matrix, 64 for each of Tile::kGroups groups of four warps, and up to Tile::kRows rows. Two thread blocks of a
// cluster have the same rows, and each copies half of them to both. One more group of warps copies into a ring of slots, which hold a stage each: kStage
// columns of rows and matrix. The others expand codes into operands in registers, beside the products of what they expanded before; rows are the
// operand in shared memory. Thread blocks stay and take tiles in turn, so the next one is on its way while results are written.
//
// Bits: a sum runs over the columns from first to last, whatever tile and place a row has.
#pragma once

#include "operands.cuh"

namespace kog {

constexpr u32 kPair = 2;
template <class Tile>
__device__ __forceinline__ u32 empty_barrier_of(u32 slot) {
    return barrier_of<Tile>(Tile::kStages + slot);
}
template <class Tile>
__device__ __forceinline__ void make_barriers() {  // by one thread; others wait for it before they use them
    for (u32 i = 0; i < Tile::kStages; ++i) {
        mbar_init(barrier_of<Tile>(i), 1);
        mbar_init(empty_barrier_of<Tile>(i), kPair * Tile::kThreads / 32);
    }
    fence_barrier_init();
}

// The blocks of a matrix as tiles see them: each has kRows lines, of which the last one of a thread block of the monokernel may leave some without
// a row. A tile has neighbouring lines, whatever blocks they are of.
template <class Form>
struct Lines : Blocks<Form> {
    static constexpr u32 kOtherBytes = part_bytes<0>(Form::kRows);  // scales and zero points of a block's part
    static constexpr u32 kAll = Blocks<Form>::kAll * Form::kRows;

    // Of the matrix, in a line; kNowhere: there is none.
    static __device__ __forceinline__ u32 row_at(u32 line) {
        const u32 block = line / Form::kRows, at = line % Form::kRows;
        const u32 row = Blocks<Form>::kIsEven ? line : Blocks<Form>::first_row(block) + at;
        return at < Blocks<Form>::num_rows(block) && row < Form::kMatrixRows ? row : kNowhere;
    }
};

template <class Tile, class Form>
struct TileLines : Lines<Form> {
    static constexpr u32 kPairsAcross = (Lines<Form>::kAll + kPair * Tile::kLines - 1) / (kPair * Tile::kLines);  // of tiles, that all rows take
    static constexpr u32 kBlocks = (Tile::kLines + 2 * Form::kRows - 1 - (Form::kRows & (0 - Form::kRows))) / Form::kRows;  // that a tile has lines of, at most
};

// A stage in shared memory: first up to Tile::kRows rows in panels, then codes, [section][line], then what the parts of the tile's blocks have
// behind codes. Tail::Share says what a tile has: of `width` rows from `first` on `count` are there and `room` are written; lines from `line` on.
template <class Tile, class Form, class Tail>
struct TapeCopies {
    using Parts = TileLines<Tile, Form>;
    static constexpr u32 kStage = Tile::kStage, kPanels = kStage / kPanel;
    static constexpr bool kIsHalved = kPanels == 1;  // a stage has half of a step of codes of 8 bit, one of its two sections; or two steps of 16 bit
    static constexpr u32 kStagesOfStep = kIsHalved && kIsCoded ? 2 : 1, kStepsOfStage = kIsCoded ? 1 : kStage / kStepColumns;
    static constexpr u32 kLineBytes = kRowBytes * kStepsOfStage / kStagesOfStep, kSectionBytes = Tile::kLines * 64, kCodeBytes = Tile::kLines * kLineBytes;  // of a stage
    static constexpr u32 kXBytes = Tile::kRows * kStage * 2, kPanelBytes = Tile::kRows * kPanel * 2, kStageBytes = Tile::kStageBytes;
    static constexpr u32 kSections = kLineBytes / 64, kCopiesOfPart = kSections + (Parts::kOtherBytes > 0), kCopies = Parts::kBlocks * kCopiesOfPart;
    static constexpr u32 kSteps = (Tail::kWidth + kStepColumns - 1) / kStepColumns;
    static constexpr u32 kHalves = (Tail::kWidth + kPanel - 1) / kPanel, kStages = (kHalves + kPanels - 1) / kPanels;
    static constexpr u32 kCopyThreads = kGroupThreads, kCopiesOfThread = (kCopies + kCopyThreads - 1) / kCopyThreads;
    static_assert(kStageBytes >= kXBytes + kCodeBytes + Parts::kBlocks * Parts::kOtherBytes && kStageBytes % 1024 == 0 && Tile::kStages >= 2, "stages");
    static_assert(kPanels <= 2 && (kIsCoded || kIsHalved) && kLineBytes % 64 == 0, "stages");

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
        return {block, max(line, share.line), min(line + Parts::num_rows(block), share.line + Tile::kLines)};
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
        const u32 step = min(at / kStagesOfStep * kStepsOfStage + (kIsCoded ? 0 : which), kSteps - 1);  // behind the last one x is 0
        const unsigned char* const part = Tail::matrix(params, share) + Parts::part_at(own.block, step);
        if (which == kSections) return {part + rows * kRowBytes, to + kCodeBytes + i * Parts::kOtherBytes, part_bytes<0>(rows)};
        const u32 section = kIsCoded ? at % kStagesOfStep + which : 0;
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
        constexpr u32 kWarps = kCopyThreads / 32;
        const u32 number = laneid() * kWarps + threadIdx.x / 32 % kWarps;  // warps have neighbouring copies: each queues its own one by one
        const u32 num_asked = is_first ? min(kStages, Tile::kStages) : 0, bytes = matrix_bytes() + share.width * kStage * 2;
        struct Copies {
            Copy own[kCopiesOfThread];
        };
        const auto find = [&](u32 at, u32 slot) {
            Copies copies;
#pragma unroll
            for (u32 i = 0; i < kCopiesOfThread; ++i) copies.own[i] = find_copy(at, slot, number + i * kCopyThreads);
            return copies;
        };
        const auto ask = [&](const Copies& copies, u32 slot) {
            if (number == 0) mbar_arrive_expect(barrier_of<Tile>(slot), bytes);
#pragma unroll
            for (const Copy& copy : copies.own)
                if (copy.bytes > 0) copy_bulk(copy.to, copy.from, copy.bytes, barrier_of<Tile>(slot));
        };
        for (u32 at = 0; at < num_asked; ++at) ask(find(at, at), at);
        await_predecessors();
        for (u32 at = 0; at < kStages; ++at) {
            const Copies copies = find(at, ring.slot);
            mbar_wait(empty_barrier_of<Tile>(ring.slot), ring.parity);
            if (at >= num_asked) ask(copies, ring.slot);
            if (number == kWarps - 1) load_half(at, ring.slot);
            ring.advance();
        }
    }
};

// Of up to kWidth rows.
template <class Tile, u32 kWidth, class Form, class Tail>
struct TapeProduct : TapeCopies<Tile, Form, Tail> {
    using Copies = TapeCopies<Tile, Form, Tail>;
    using Copies::base, Copies::kCodeBytes, Copies::kHalves, Copies::kIsHalved, Copies::kPanelBytes, Copies::kPanels, Copies::kSectionBytes,
        Copies::kStageBytes, Copies::kXBytes, Copies::params, Copies::share;
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
    // `half`: see `expand_row`.
    __device__ __forceinline__ void expand(u32 slot, u32 half, Operands& to) {
        const u32 weights = base + slot * kStageBytes + kXBytes, first_section = kIsHalved ? half * 2 / kOfSection : 0;
        expand_row(weights, upper, half, first_section, to.v[0][0], to.v[1][0]);
        expand_row(weights, lower, half, first_section, to.v[0][1], to.v[1][1]);
    }
    __device__ __forceinline__ u32 panel(u32 slot, u32 i) const { return base + slot * kStageBytes + i * kPanelBytes; }
    __device__ __forceinline__ void wait_for(const SlotRing<Tile::kStages>& ring) { mbar_wait(barrier_of<Tile>(ring.slot), ring.parity); }
    __device__ __forceinline__ void run(SlotRing<Tile::kStages>& ring) {
#pragma unroll
        for (u32 i = 0; i < kWidth / 2; ++i) sums[i] = 0;
        if constexpr (Tile::kIsAhead) run_ahead(ring);
        else run_in_turn(ring);
        settle(sums);
        Tail::put(*this);
    }
    // 64 columns are expanded beside the products of those before them, and their own are queued behind these.
    __device__ __forceinline__ void run_ahead(SlotRing<Tile::kStages>& ring) {
        const auto before = [](u32 slot) { return slot == 0 ? Tile::kStages - 1 : slot - 1; };
        Operands one, other;
        wait_for(ring);
        expand(ring.slot, 0, one);
#pragma unroll 1
        for (u32 half = 0; half + 1 < kHalves; half += 2) {
            const u32 first = ring.slot;
            multiply(sums, panel(first, 0), one);
            products_wait<1>();
            other.settle();
            if (half > 0) release(before(first));
            if constexpr (kIsHalved) {
                ring.advance();
                wait_for(ring);
            }
            expand(ring.slot, 1, other);
            multiply(sums, panel(ring.slot, kPanels - 1), other);
            products_wait<1>();
            one.settle();
            if constexpr (kIsHalved) release(first);
            ring.advance();
            if (half + 2 < kHalves) {
                wait_for(ring);
                expand(ring.slot, 0, one);
            }
        }
        if constexpr (kHalves % 2) {
            multiply(sums, panel(ring.slot, 0), one);
            if constexpr (kHalves > 1) {
                products_wait<1>();
                other.settle();
                release(before(ring.slot));
            }
            ring.advance();
        }
        products_wait<0>();
        release(before(ring.slot));
    }
    // 64 columns are expanded when those before them are multiplied: beside the products of other groups of warps.
    __device__ __forceinline__ void run_in_turn(SlotRing<Tile::kStages>& ring) {
        Operands of;
        const auto run_half = [&](u32 half) {
            expand(ring.slot, half, of);
            multiply(sums, panel(ring.slot, kIsHalved ? 0 : half), of);
            products_wait<0>();
            settle(sums), of.settle();
        };
        const auto next = [&] {
            release(ring.slot);
            ring.advance();
        };
#pragma unroll 1
        for (u32 half = 0; half + 1 < kHalves; half += 2) {
            wait_for(ring);
            run_half(0);
            if constexpr (kIsHalved) {
                next();
                wait_for(ring);
            }
            run_half(1);
            next();
        }
        if constexpr (kHalves % 2) {
            wait_for(ring);
            run_half(0);
            next();
        }
    }

    // What this thread's sums of its upper (0) and lower (1) row are multiplied by.
    __device__ __forceinline__ float factor(u32 which) const { return Tail::factor(params, share, Tail::row_of_operand(which)); }
    __device__ __forceinline__ u32 row_at(u32 i) const { return Parts::row_at(share.line + i); }  // of the matrix, of those of the tile
};

// Thread blocks of a launch take pairs of tiles in turn. Tail::share says what one is, Tail::num_pairs how many there are.

// The products of a thread block's tiles, from pair `pair` on: those of each width have a loop of their own, since in a common one the compiler
// gives each registers of its own for sums. So wide tiles come first.
template <class Tile, class Form, class Tail, u32 kWidth = Tile::kRows>
__device__ __forceinline__ void multiply_tiles(const typename Tail::Params& params, u32 pair, u32 num_pairs, SlotRing<Tile::kStages>& ring) {
    for (; pair < num_pairs; pair += gridDim.x / kPair) {
        const typename Tail::Share share = Tail::template share<Tile>(params, pair);
        if (share.width != kWidth) break;
        if constexpr (kWidth > 0) TapeProduct<Tile, kWidth, Form, Tail>{params, share}.run(ring);
        Tail::template clear_from<Tile>(params, share, kWidth);
    }
    if constexpr (kWidth > 0) multiply_tiles<Tile, Form, Tail, kWidth - Tile::kLeast>(params, pair, num_pairs, ring);
}

// Registers of a thread that copies, and of one that multiplies: together what they are launched with.
template <class Tile>
constexpr int kCopyRegisters = Tile::kCtas == 1 ? 56 : Tile::kCtas == 2 ? 48 : 40;
template <class Tile>
constexpr int kAllThreads = Tile::kThreads + kGroupThreads;
template <class Tile>
constexpr int kAllRegisters = 65536 / (kAllThreads<Tile> * int(Tile::kCtas)) / 8 * 8 * kAllThreads<Tile>;
template <class Tile>
constexpr int kRegisters = (kAllRegisters<Tile> - kCopyRegisters<Tile> * int(kGroupThreads)) / int(Tile::kThreads) / 8 * 8;

template <class Tile, class Form, class Tail>
__device__ __forceinline__ void run_tiles(const typename Tail::Params& params) {
    let_successors_begin();
    const u32 is_copying = __shfl_sync(kFullWarp, threadIdx.x / Tile::kThreads, 0);  // one register for the whole warp
    if (threadIdx.x == 0) make_barriers<Tile>();
    __syncthreads();
    cluster_sync();
    if constexpr (Tail::kAwaitsTiles) await_predecessors();
    const u32 first = blockIdx.x / kPair, num_pairs = Tail::template num_pairs<Tile>(params);
    if (is_copying) {
        drop_registers<kCopyRegisters<Tile>>();
        SlotRing<Tile::kStages> ring{0, 1};
        for (u32 pair = first; pair < num_pairs; pair += gridDim.x / kPair) {
            const typename Tail::Share share = Tail::template share<Tile>(params, pair);
            if (share.width > 0) TapeCopies<Tile, Form, Tail>{params, share}.run(ring, !Tail::kAwaitsTiles && pair == first);
        }
    } else {
        raise_registers<kRegisters<Tile>>();  // the compiler believes in them if no branch in front of here leaves the kernel
        await_predecessors();  // who may still read what results overwrite
        SlotRing<Tile::kStages> ring;
        multiply_tiles<Tile, Form, Tail>(params, first, num_pairs, ring);
    }
    cluster_sync();  // nobody leaves whose barriers the other one tells
}

}  // namespace kog
