// Who does what, and where things lie in shared memory. `shape.cuh` is generated from the model's spec (workers/cuda/kernel_header.py).
#pragma once
#include "abi.cuh"
#include "ptx.cuh"
#include "wait.cuh"
#include "words.cuh"
#include "peers.cuh"
#include "peers_shape.cuh"
#include "shape.cuh"

namespace kog {

// One of two types.
template <bool kFirst, class First, class Second>
struct OneOf {
    using Type = First;
};
template <class First, class Second>
struct OneOf<false, First, Second> {
    using Type = Second;
};

// Warps of a thread block. The matrix warps split K between them; everything else is one warp, attention is four.
constexpr int kLoaderWarp = kMatrixWarps, kFinalWarp = kMatrixWarps + 1, kSampleWarp = kMatrixWarps + 2, kWatchWarp = kMatrixWarps + 3;
constexpr int kAttendWarp = kMatrixWarps + 4, kAttendWarps = 4, kAttendThreads = 32 * kAttendWarps;
constexpr int kNumWarps = kAttendWarp + kAttendWarps, kNumThreads = kNumWarps * 32;

// A thread block owns what it was launched with, no more: an increase beyond that would wait for ever.
static_assert(kMatrixWarps * kMatrixRegisters + 4 * (kServiceRegisters + kAttendRegisters) <= kNumWarps * kLaunchRegisters, "registers");

constexpr int kGroup = kHeads / kKvHeads;            // query heads that share a KV head
constexpr int kQueryRows = kHeads * kHeadDim;        // of one lane
constexpr int kKvRows = kKvHeads * kHeadDim;
constexpr int kGateRow = kQueryRows + 2 * kKvRows;    // the first of those that a gated head's outputs are multiplied with
constexpr int kQkvRows = kGateRow + (kGated ? kQueryRows : 0);
constexpr int kItems = kKvHeads * kSplits;           // attention's splits of one lane and layer
// A split's batches in layers without a window come in partitions. Words of the outputs of a partition's splits, a row for each head and
// split.
constexpr u32 kPartitionPositions = kPartitionBatches * 16 * kSplits, kPartitionWords = kQueryRows * kSplits / 2;
// Windowed layers keep a ring of batches, or all of them as other layers do; attention reads as many either way.
#ifdef KOG_WHOLE_WINDOWS
constexpr bool kWholeWindows = true;
#else
constexpr bool kWholeWindows = false;
#endif
constexpr int kKeptWindowBatches = kWholeWindows ? kFullBatches : kWindowBatches;
// Layers with a gated delta net, whose input has an `Op` of its own in the place of QKV's; all others have attention. The rows of a lane's input are
// queries, keys, values, output gates, and two factors of each value head.
#ifdef KOG_DELTA
constexpr u32 kDeltaKeys = kDeltaKeyHeads * kKeyDim, kDeltaValues = kDeltaHeads * kValueDim, kDeltaChannels = 2 * kDeltaKeys + kDeltaValues;
constexpr u32 kDeltaPlainRows = kDeltaChannels + kDeltaValues, kDeltaRows = kDeltaPlainRows + 2 * kDeltaHeads;
// As they are multiplied: of quantised inputs each factor is the sum of kFactorTerms rows of codes.
constexpr u32 kDeltaMatrixRows = kDeltaPlainRows + kFactorTerms * 2 * kDeltaHeads;
static_assert((kFactorTerms == 1 || kFactorTerms == 2 || kFactorTerms == 4) && kDeltaPlainRows % (2 * kFactorTerms) == 0, "whole words of neighbouring rows");
constexpr u32 kDeltaItems = kDeltaHeads * kDeltaSlices, kSquareWords = kDeltaSlices * kAttendWarps;  // of a lane and layer; of a head
constexpr u32 kSliceColumns = kValueDim / kDeltaSlices, kItemChannels = 2 * kKeyDim + kSliceColumns;
static_assert(kDeltaValues == kQueryRows, "OUT has the same form in all layers");
__device__ __forceinline__ bool has_delta_net(u32 layer) { return delta_layers().has(layer); }
__device__ __forceinline__ u32 attention_layer(u32 layer) { return layer - delta_layers().num_before(layer); }  // its number among those with attention
#else
constexpr int kDeltaLayers = 0;
constexpr u32 kDeltaInLanes = kQkvLanes;
__device__ __forceinline__ constexpr bool has_delta_net(u32) { return false; }
__device__ __forceinline__ constexpr u32 attention_layer(u32 layer) { return layer; }
#endif
// Whether the tokens of a pass are of different requests.
#ifdef KOG_COMPANY
#if defined KOG_DRAFTS || defined KOG_PROCESSORS || defined KOG_HEAD_ONLY
#error "a build with several requests has neither drafts nor processors, and no first step that is an LM head alone"
#endif
constexpr bool kCompany = true;
static_assert(kTokens > 1 && kTokens <= sizeof(KogCompanyParams::state_ptr) / sizeof(u64), "a seat for each token");
#else
constexpr bool kCompany = false;
#endif
constexpr int kModelLanes = kLanes * kRanks;
// The LM head of the forms `lane` and `vocab_parallel` is made of products of single streams, which the finaliser scales like QKV's. Only
// with `vocab_parallel`, or where all lanes share one stream, a rank needs no other rank's last streams.
constexpr bool kStreamHead = kLaneHead || kVocabParallelHead || kOneStream, kStreamsToAll = kGathersStreams;
static_assert(kStreams == (kOneStream ? 1 : kLanes), "a stream of each lane, or one that all share");
// A lane's residual stream, among this rank's.
__device__ __forceinline__ constexpr u32 stream_of(u32 lane_idx) { return kOneStream ? 0 : lane_idx; }
constexpr u32 kTogether = kModelLanes % 4 == 0 ? 4 : kModelLanes % 2 == 0 ? 2 : 1;  // last streams that are asked for at a time
// Two ranks that share a stream send their sums as words to all thread blocks of both, in kSumCopies; see Gatherer.
static_assert(!kDirectSums || (kOneStream && kRanks == 2), "two halves");
constexpr int kHistory = kDelay + 1;                 // layers whose partials a row's owner remembers
// Query heads of a KV head are taken in sets: the score matrix has eight columns, two (high, low) for each head. A warp has one set, or two of
// small heads, and reads rows once for both. Teams of warps, of which each has all rows, have the others at the same time.
constexpr int kSets = (kGroup + 3) / 4, kTeams = kSets / kWarpSets, kTeamWarps = kAttendWarps / kTeams, kWarpHeads = kWarpSets * kSetHeads;
static_assert(kSets % kWarpSets == 0 && kAttendWarps % kTeams == 0, "every set has as many warps");
static_assert(kSetHeads == (kGroup + kSets - 1) / kSets && kSetHeads <= 4, "sets of at most four heads");

constexpr u32 kSlotBytes = kMatrixWarps * kTileRows * 64;  // one ring slot: at most kTileRows rows x 32 columns of each matrix warp
constexpr int kRowGroups = (kTileRows + 7) / 8;           // groups of eight rows of a block, at most
constexpr int kRingPieces = kNumSlots * kPieces;     // barriers; a piece is what kMatrixWarps / kPieces warps need of a tile: copied and given back by itself
static_assert(kMatrixWarps % kPieces == 0, "pieces of a tile");
// Where the ring is packed, tiles lie in it one behind the other, each whole: one that does not fit in front of the end lies at the beginning.
static_assert(kPacked ? kPieces == 1 : kRingBytes == kNumSlots * kSlotBytes, "a slot for each tile, or none");
// A piece stands at the same place of its slot in tiles of all sizes: what is given back by itself must not lie where another piece was.
constexpr u32 kPieceWarps = kMatrixWarps / kPieces, kPieceBytes = kSlotBytes / kPieces;
// One activation vector of each token, as high and low halves: bytes of a step of 32 columns, and of all.
constexpr u32 kXStepBytes = 128 * kTokens, kXBytes = kMaxPer * kMatrixWarps * kXStepBytes;
static_assert(kTokens == 1 || kTokens == 2 || kTokens == 4, "the matrix unit's eight columns are two for each token");

constexpr float kLog2e = 1.44269504f;
constexpr int kMaxFragments = 4;  // of a tile in each warp: eight rows (or fewer) and 32 columns, what one mma takes

// How weights lie in a warp's part of a tile: a step's columns, by 32, and its bytes. Quantised ones as in decode/coded_packing.py.
template <class Format_>
struct UncodedWeights {
    using Format = Format_;
    static constexpr int kXSteps = 1;
    static constexpr bool kCoded = false, kFourBits = false, kIntegers = false;
    static constexpr u32 step_bytes(u32 rows) { return rows * 64; }
};
using PlainWeights = UncodedWeights<WeightFormat>;
#ifdef KOG_CODE
struct CodedWeights {
    using Format = KOG_CODE_FORMAT;
    static constexpr int kXSteps = 4;
    static constexpr bool kCoded = true, kFourBits = kCodeBits == 4;
#ifdef KOG_INTEGERS
    static constexpr bool kIntegers = true;
#else
    static constexpr bool kIntegers = false;
#endif
    static constexpr u32 kRowBytes = 16 * kCodeBits;
    static constexpr u32 step_bytes(u32 rows) { return rows * kRowBytes + (rows * (kCodeScaleBytes + kCodeZeroBytes) + 15) / 16 * 16; }
};
using LayerWeights = CodedWeights;
constexpr bool kRowScales = kCodeScales == 0;  // each row of a matrix has one scale, which lies behind all tapes
#else
using LayerWeights = PlainWeights;
constexpr bool kRowScales = false;
#endif
constexpr bool kFourBits = LayerWeights::kFourBits;
constexpr bool kIntegers = LayerWeights::kIntegers;  // codes are multiplied as such, by digits of x: x_digits.cuh
#ifdef KOG_HEAD_FORMAT
// Of the LM head in integers of 8 bits. Its tiles are as large as those of 16 bit: a step has twice as many columns. Scales of rows lie behind all tapes.
struct HeadWeights {
    using Format = KOG_HEAD_FORMAT;
    static constexpr int kXSteps = 2;
    static constexpr bool kCoded = true, kFourBits = false, kIntegers = false;
    static constexpr u32 step_bytes(u32 rows) { return rows * 64; }
};
#else
using HeadWeights = PlainWeights;
#endif

// Shape of one matrix-vector product in one thread block: kRows rows in kBlocks blocks, K = kPer * 32 * kMatrixWarps.
// A tile is kSteps k-steps of 32 columns (or 128) for each warp; the tape holds [block][tile][warp][step][row][32]. Tiles have parts of kWarps warps;
// of each block's tiles those behind the first kLongTiles have one part less, since the last warp has no columns there, or, where warps take parts
// in turn, kShortWarps. The last block has kLastRows rows.
template <class Weights, int kRows_, int kBlocks_, int kPer_, int kSteps_, int kWarps_, int kLongTiles_, int kLastRows_, int kShortWarps_ = kWarps_ - 1>
struct Op {
    static constexpr bool kCoded = Weights::kCoded, kFourBits = Weights::kFourBits, kIntegers = Weights::kIntegers;
    using Kind = Weights;
    using Format = typename Weights::Format;  // of weights and x in 16 bit
    static constexpr int kXSteps = kSteps_ * Weights::kXSteps;  // of a tile
    static constexpr int kRows = kRows_, kBlocks = kBlocks_, kPer = kPer_ * Weights::kXSteps, kSteps = kSteps_, kWarps = kWarps_, kLongTiles = kLongTiles_,
                         kLastRows = kLastRows_, kShortWarps = kShortWarps_;
    static constexpr int kTiles = kPer_ / kSteps;
    static constexpr bool kHasAll = kWarps == kMatrixWarps && kLongTiles == kTiles;  // every warp has a part of every tile
    static constexpr bool kIsEven = kHasAll && kLastRows == kRows;
    using Last = Op<Weights, kLastRows, 1, kPer_, kSteps, kWarps, kLongTiles, kLastRows, kShortWarps>;  // its last block
    static constexpr int kRowGroups = (kRows + 7) / 8;
    static constexpr int kCtaRows = kRows * (kBlocks - 1) + kLastRows;
    static constexpr u32 kWarpBytes = kSteps * Weights::step_bytes(kRows);
    static constexpr u32 kTileBytes = kWarps * kWarpBytes, kShortTileBytes = kShortWarps * kWarpBytes;
    static constexpr u64 block_bytes(u32 rows) { return u64{kSteps * Weights::step_bytes(rows)} * (kWarps * kLongTiles + kShortWarps * (kTiles - kLongTiles)); }
    static constexpr u64 kBytes = (kBlocks - 1) * block_bytes(kRows) + block_bytes(kLastRows);
    static_assert(kIsEven || kPieces == 1, "a piece is what some of all warps need");
    static_assert(kHasAll || kPieces == 1, "parts are left out of whole tiles");
    static_assert(((kCoded && kPacked) || kTileBytes <= kSlotBytes) && kPer_ % kSteps == 0 && kRows <= kTileRows, "the tile must fit into a slot");
    static_assert(kSteps * kRowGroups <= kMaxFragments, "the tile must fit into registers");
};
#ifdef KOG_PLAIN_ATTENTION
using AttentionWeights = PlainWeights;  // and LayerWeights are experts' alone
#else
using AttentionWeights = LayerWeights;
#endif
#ifdef KOG_EXPERTS
// In front of GATE_UP, with the same input: so its weights have the type of that.
#ifdef KOG_CODE
using RouterWeights = UncodedWeights<KOG_CODE_FORMAT>;
#else
using RouterWeights = PlainWeights;
#endif
using RouteOp = Op<RouterWeights, KOG_ROUTE_OP>;
constexpr u64 kRouteBytes = RouteOp::kBytes;
static_assert(kNumExperts <= 512, "what a warp chooses from");
// Shares of the chosen experts' rows of GATE_UP that a thread block has: kExpertShares, but the last ones may have fewer.
constexpr u32 kAllShares = kChosen * kExpertCtas;
constexpr bool kHasOneShare = kExpertShares == 1 && kAllShares == kNumCtas;  // each thread block
__device__ __forceinline__ u32 num_shares(u32 cta) {
    if constexpr (kHasOneShare) return 1;
    const u32 first = min(cta * kExpertShares, kAllShares);
    return min(kAllShares - first, static_cast<u32>(kExpertShares));
}
// Choices that the loader waits for in a layer: of a union one for all tokens of the pass, else one for each.
#ifdef KOG_UNION
constexpr u32 kChoices = 1;
#else
constexpr u32 kChoices = kTokens;
#endif
#else
constexpr int kChosen = 1;
#endif
using QkvOp = Op<AttentionWeights, KOG_QKV_OP>;
using OutOp = Op<AttentionWeights, KOG_OUT_OP>;
// What delta nets multiply first and last may have 16 bit beside codes of attention, in the type of x that codes have.
#ifdef KOG_PLAIN_NET_INPUTS
constexpr bool kPlainNetInputs = true;
#else
constexpr bool kPlainNetInputs = false;
#endif
#ifdef KOG_PLAIN_NET_OUTPUTS
constexpr bool kPlainNetOutputs = true;
#else
constexpr bool kPlainNetOutputs = false;
#endif
#if defined KOG_PLAIN_NET_INPUTS || defined KOG_PLAIN_NET_OUTPUTS
using NetWeights = UncodedWeights<KOG_CODE_FORMAT>;
#else
constexpr float kNetScale = 1;
using NetWeights = AttentionWeights;
#endif
#ifdef KOG_DELTA
using DeltaInOp = Op<typename OneOf<kPlainNetInputs, NetWeights, AttentionWeights>::Type, KOG_DELTA_IN_OP>;
static_assert(DeltaInOp::kPer == QkvOp::kPer, "both have the stream as input");
#else
using DeltaInOp = QkvOp;
#endif
#ifdef KOG_PLAIN_NET_OUTPUTS
using DeltaOutOp = Op<NetWeights, KOG_DELTA_OUT_OP>;
static_assert(DeltaOutOp::kPer == OutOp::kPer && DeltaOutOp::kRows == OutOp::kRows && DeltaOutOp::kCtaRows == OutOp::kCtaRows, "the same rows and columns");
#else
using DeltaOutOp = OutOp;
#endif
using GateUpOp = Op<LayerWeights, KOG_GATE_UP_OP>;
using DownOp = Op<LayerWeights, KOG_DOWN_OP>;
using HeadOp = Op<HeadWeights, KOG_HEAD_OP>;
// From a warp's x of GATE_UP to that of the router: the same, but where experts want digits.
constexpr u32 kRouterX = kExperts && kIntegers ? GateUpOp::kPer * kXStepBytes : 0;
static_assert(kRouterX == 0 || 2 * GateUpOp::kPer <= kMaxPer, "room for both");
#ifdef KOG_SHARED_EXPERT
// The shared expert's gate and up rows, of which all thread blocks have some, stand on the tape behind the router; its part of DOWN stands there
// for each lane. It is the last slot of DOWN.
using SharedGateUpOp = Op<LayerWeights, KOG_SHARED_GATE_UP_OP>;
constexpr u32 kSlots = kChosen + 1;
constexpr u64 kSharedDownBytes = u64{DownOp::kBlocks} * kSharedParts * DownOp::kWarpBytes, kSharedExpertBytes = SharedGateUpOp::kBytes + kLanes * kSharedDownBytes;
static_assert(SharedGateUpOp::kPer == QkvOp::kPer, "both have a stream as input");
#else
constexpr u32 kSlots = kChosen, kSharedParts = 0, kSharedFfn = 0;
constexpr u64 kSharedExpertBytes = 0;
#endif
static_assert(OutOp::kCtaRows == DownOp::kCtaRows && OutOp::kRows == DownOp::kRows, "a row of the residual has one owner");

// The build with processors (kernels/decode_processors.cu) keeps x and score of its vocabulary rows in shared memory: in `attended`, which attention
// does not need while the LM head and sampling run, or in room of their own.
constexpr u32 kScoreBytes = 2 * HeadOp::kCtaRows * 4, kMaskWords = HeadOp::kCtaRows / 32 + 2;
// What attention's warps leave of a split. Of several tokens two have the same warps, where a team's shares suffice for these, but not two requests, whose
// caches are others, nor long heads, whose queries fill the registers; of as many tokens as there are warps there is no second buffer.
constexpr bool kShareWarps = !kCompany && kTokens > 1 && kHeadDim <= 128 && 2 * kAttendWarps / kTokens <= kTeamWarps;
constexpr int kWarpTokens = kShareWarps ? 2 : 1, kTokenWarps = kAttendWarps * kWarpTokens / kTokens;
constexpr int kAttendedHalves = kTokens == kAttendWarps ? 1 : 2;
constexpr bool kMergesInTurn = kAttendedHalves == 1 && kTokenWarps > 1;  // a warp must not store what another one still reads
static_assert(!kMergesInTurn || kWarpTokens == 2, "the second token's barrier says that all have read");
constexpr bool kScoresFit = kScoreBytes <= kAttendedHalves * kTokens * 4 * kWarpHeads * kHeadDim * 4;

// a * b + c * d, of which the second product is rounded. Left to the compiler, what stands around decides which one is, and builds for other numbers of
// tokens or ranks would have other bits.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) { return __fmaf_rn(a, b, __fmul_rn(c, d)); }

// Weight of a norm, of which files may have 1 less.
__device__ __forceinline__ float norm_weight(float stored) { return kNormAddsOne ? stored + 1.0f : stored; }

// Code that each token of a pass has in turn is there once, in a loop: unrolled, a layer's would be more than the instruction cache holds. So what
// threads keep of all tokens is chosen by comparisons, or one thread has it for each.
template <class T>
__device__ __forceinline__ T of_token(const T (&values)[kTokens], u32 token) {
    T value = values[0];
#pragma unroll
    for (u32 i = 1; i < kTokens; ++i) value = token == i ? values[i] : value;
    return value;
}
template <class T>
__device__ __forceinline__ void set_of_token(T (&values)[kTokens], u32 token, T value) {
    values[0] = kTokens == 1 || token == 0 ? value : values[0];
#pragma unroll
    for (u32 i = 1; i < kTokens; ++i) values[i] = token == i ? value : values[i];
}

// A pass of the weights, as the sampler announces it: tags count passes, and positions are those of its tokens.
struct alignas(16) Pass {
    u32 position, number;  // of its first token; among all since the words were zeroed
    u32 is_none;           // the launch ends instead
    u32 tokens[kTokens];
#ifdef KOG_COMPANY
    // Of each token its position, of which `position` is the furthest, and its seat in four bits: that of the request that it is of.
    u32 positions[kTokens], seats;

    __device__ __forceinline__ u32 position_of(u32 token) const { return of_token(positions, token); }
    __device__ __forceinline__ u32 noise_position(u32 token) const { return position_of(token); }
    __device__ __forceinline__ u32 seat_of(u32 token) const { return seats >> 4 * token & 15; }
#else
    // A token beyond the context has the last place: it is none that counts.
    __device__ __forceinline__ u32 position_of(u32 token) const { return kTokens == 1 ? position : min(position + token, kMaxContext - 1u); }
    // That of its sampling's noise.
    __device__ __forceinline__ u32 noise_position(u32 token) const { return position + token; }
#endif
};

#ifdef KOG_DRAFTS
// Of each number of tokens that the pass may give: places where all but the newest one stood before, how many tokens are alike there, and which one
// follows. See drafts.cuh.
struct Drafting {
    u32 num_places[kTokens], places[kTokens][kPlaces], lengths[kTokens][kPlaces], followers[kTokens][kPlaces];
};
#endif

struct Shared {
    unsigned char ring[kRingBytes];
    unsigned char x[kXBytes];
    float red[kSums][kTokens][kMatrixWarps][kTileRows];          // partial sums of the last blocks of rows
    float squares[kSquares][kTokens][kMatrixWarps][32];          // sums of squares of the last vectors, by matrix thread
    float head_squares[2][kMatrixWarps][kModelLanes];
    float residual[kTokens][kStreams][OutOp::kCtaRows];
    float history[kTokens][2][kHistory][kLanes][OutOp::kCtaRows];  // published partials: attention, MLP
    alignas(16) float attended[kAttendedHalves][kTokens][4][kWarpHeads][kHeadDim];  // unnormalised outputs of the attention warps, splits in turn
    alignas(16) u32 fresh[kTokens > 1 ? kTokens : kTeams][kHeadDim];  // K and V of a new position, in pairs, for each token or team
    float attended_max[kAttendedHalves][kTokens][4][kWarpHeads], attended_sum[kAttendedHalves][kTokens][4][kWarpHeads];
#ifdef KOG_DELTA
    alignas(16) float convolved[2][kItemChannels];   // query, key and columns of the value of a delta net's item, items in turn
#endif
    u64 full[kRingPieces], empty[kRingPieces];
#if defined KOG_DELTA_PASSES || defined KOG_DELTA_COMPANY
    u64 convolved_full[2];
#endif
    u64 red_full[kSums], red_empty[kSums], squares_full[kSquares], head_squares_full, merge_full[kAttendedHalves * kTokens], pass_full, pass_ended, lane_done[kLanes];
    Pass passes[2];                                  // of a launch, in turn
    volatile u32 newest_position;                    // of the newest one
    WaitNote note;
    PeerNote peer_notes[2];                          // what the finaliser and the sampler wait for from peers
    u32 done_cycles[kLanes];                         // when the finaliser was done with the lane's last product
    volatile u32 finished, cancelled;                // of requests with company `cancelled` has a bit for each seat
    volatile u32 num_finalized;                      // products of this launch that the finaliser is done with
#if defined KOG_DRAFTS || defined KOG_COMPANY
    volatile u32 others_wait;
#endif
#ifdef KOG_AWAITS_ATTENTION
    u64 attended_full;                               // the attention warps have done their share of a layer
#endif
#ifdef KOG_EXPERTS
    u64 choice_full[kChoices];                       // the next layer's experts are chosen
    u32 chosen[kTokens][kChosen];                   // in ascending order
    float chosen_weights[kTokens][kChosen];
#ifdef KOG_UNION
    u32 num_united, united[kTokens * kChosen], united_slots[kTokens * kChosen];  // the experts of a pass: see union.cuh
#endif
#endif
#ifdef KOG_PROCESSORS
    u32 num_handed;                                  // blocks of logits that the finaliser has handed to the sampler: see hand_logits
    u32 num_exchanges, chosen_place, max_tokens, turn;  // of the sampler, which has too few registers: see OwnRows
    alignas(8) u32 top_p_limit[2];
    u32 mask[kMaskWords];                            // of a grammar, from the word that has the first own id
    u32 scores[kScoresFit ? 1 : kScoreBytes / 4];
#endif
#ifdef KOG_DRAFTS
    Drafting drafting;
#endif
    u32 places[kPacked ? kRingPieces : 1];           // where tiles begin in a packed ring, for the loader
};
static_assert(sizeof(Shared) <= kSharedBytes, "shared memory of a thread block");

// Where a member of `Shared` lies in it; array indices need not be constants. Shared memory is addressed by 32-bit numbers, `base` and
// this: pointers would be generic ones, whose arithmetic is twice as wide and reads special registers.
#define KOG_OFFSET(member) static_cast<u32>(reinterpret_cast<u64>(&reinterpret_cast<const Shared*>(u64{4096})->member) - 4096)

// What every role keeps in registers.
struct Role {
    Shared* shared;
    u32 base;  // address of `*shared` in shared memory
    u32 cta;
    u32 num_prompt;
    u32 num_headless;  // passes of this launch without an LM head, the first ones: their tokens' successors stand in the prompt
    u64* trace;  // of this thread block, or null
#ifdef KOG_COMPANY
    const KogCompanyParams& company;
#endif
#ifdef KOG_DELTA_COMPANY
    const KogCompanyStatesParams& states;
#endif

    __device__ __forceinline__ u32 stopped() const { return base + KOG_OFFSET(note.stopped); }
};

// Products of one token, those of the LM head included. A traced build has a stamp of each kind for each of them, in their order.
constexpr u32 kTokenVectors = kNumProducts + kHeadProducts;

__device__ __forceinline__ void stamp(const Role& role, StampKind kind, u32 turn, u32 vector) {
#ifdef KOG_TRACE
    if (turn == kTracedStep && laneid() == 0) role.trace[kind * kTokenVectors + vector] = globaltimer_ns();
#endif
}

// Product `number` of a token: the phase's input is multiplied for a layer and a lane. `kProducts` (generated) has the order.
struct Place {
    static_assert(kQkvPhase == 0 && kOutPhase == 1 && kGateUpPhase == 2 && kDownPhase == 3, "two bits; what the residual takes is odd");
    u32 packed;  // one register, since it is kept through whole products

    __device__ __forceinline__ explicit Place(u32 number) : packed(kProducts[number]) {}
    __device__ __forceinline__ u32 phase() const { return packed & ((1u << kPlaceLaneBit) - 1); }  // kQkvPhase to kDownPhase
    __device__ __forceinline__ u32 lane() const { return packed >> kPlaceLaneBit & ((1u << (kPlaceLayerBit - kPlaceLaneBit)) - 1); }  // of products of the LM head: their number
    __device__ __forceinline__ u32 layer() const { return packed >> kPlaceLayerBit; }
    __device__ __forceinline__ bool is_last() const { return layer() == kLayers; }  // the place after all products: the LM head
    __device__ __forceinline__ u32 index() const { return 4 * layer() + phase(); }  // among the lane's products of the token
};
// QKV and GATE_UP of neighbouring lanes may be one product, which has the place of the first one's.
constexpr u32 kQkvProductsOfLayer = kLanes / kQkvLanes, kDeltaInProductsOfLayer = kLanes / kDeltaInLanes, kGateUpProductsOfLayer = kLanes / kGateUpLanes;
static_assert(kNumProducts == kLayers * (2 * kLanes + kGateUpProductsOfLayer) + (kLayers - kDeltaLayers) * kQkvProductsOfLayer +
                                  kDeltaLayers * kDeltaInProductsOfLayer, "products of a token");
static_assert(kOneStream || (kQkvLanes == 1 && kGateUpLanes == 1), "lanes with one input");

// The builds for a first step whose layers prefill has run (kernels/head.cu): only the LM head, whose input is in the words where the last
// layer would have left it (kernels/last_streams.cu). Launches of one step.
#ifndef KOG_HEAD_ONLY
#define KOG_HEAD_ONLY false
#endif
constexpr bool kHeadOnly = KOG_HEAD_ONLY;
__device__ __forceinline__ constexpr u32 first_product() { return kHeadOnly ? kNumProducts : 0; }
template <class O>
constexpr u64 kOpBytes = O::kBytes;
constexpr u64 kMixerBytes = (kLayers - kDeltaLayers) * kQkvProductsOfLayer * kOpBytes<QkvOp> + kDeltaLayers * kDeltaInProductsOfLayer * kOpBytes<DeltaInOp> +
                            (kLayers - kDeltaLayers) * u64{kLanes} * kOpBytes<OutOp> + kDeltaLayers * u64{kLanes} * kOpBytes<DeltaOutOp>;
#ifdef KOG_EXPERTS
constexpr u64 kLayerBytes = kMixerBytes + kLayers * (kRouteBytes + kSharedExpertBytes);
#else
constexpr u64 kLayerBytes = kMixerBytes + u64{kLayers} * (kLanes * kOpBytes<DownOp> + kGateUpProductsOfLayer * kOpBytes<GateUpOp>);  // of the tape
#endif
static_assert(kTapeBytes == kLayerBytes + kHeadProducts * kOpBytes<HeadOp>, "the LM head stands at the end of the tape");

// Vocabulary rows of this rank that a thread block owns, from the first to before the end. With `vocab_parallel` they are one lane's: each
// lane has kHeadCtas thread blocks, and those left over have no rows.
__device__ __forceinline__ u32 first_vocab_row(u32 cta) {
    return kVocabParallelHead ? cta / kHeadCtas * kLaneVocab + cta % kHeadCtas * HeadOp::kCtaRows : cta * HeadOp::kCtaRows;
}
__device__ __forceinline__ u32 end_vocab_row(u32 cta) {
    return !kVocabParallelHead ? kVocabRows : cta < kHeadCtas * kLanes ? (cta / kHeadCtas + 1) * kLaneVocab : 0;
}
__device__ __forceinline__ u32 vocab_lane(u32 cta) { return min(cta / kHeadCtas, static_cast<u32>(kLanes - 1)); }

// The tag of what layer `layer` publishes in pass number `number`.
__device__ __forceinline__ u32 layer_tag(u32 number, u32 layer) { return (number * (kLayers + 1) + layer + 1) & 0xffffu; }

// Passes of a launch that begins at `position` whose tokens' successors are all known: their LM head is skipped.
__device__ __forceinline__ u32 num_headless(u32 position, u32 num_prompt) {
    return num_prompt > position + 1 ? (num_prompt - 1 - position) / kTokens : 0;
}
// Of pass `turn` of this launch.
__device__ __forceinline__ bool has_head(const Role& role, u32 turn) { return turn >= role.num_headless; }
// Partitions of the positions up to `position` in this layer.
__device__ __forceinline__ u32 num_partitions(u32 layer, u32 position) {
    return kPartitions == 1 || window_layers().has(layer) ? 1 : position / kPartitionPositions + 1;
}

// Wait until pass `turn` of this launch is announced. False: leave, there is none or an abort was called.
__device__ __forceinline__ bool begin_pass(const Role& role, u32 turn, Pass& pass) {
    if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(pass_full), turn & 1)) return false;
    pass = role.shared->passes[turn & 1];
    return pass.is_none == 0;
}
// Announce it to the other warps of the thread block. Called by one thread.
__device__ __forceinline__ void announce(const Role& role, u32 turn, const Pass& pass) {
    role.shared->passes[turn & 1] = pass;
    role.shared->newest_position = pass.position;
    if (pass.is_none) role.shared->finished = 1;
    mbar_arrive(role.base + KOG_OFFSET(pass_full));
}

// Words are polled only when they may be there; polling earlier only loads the memory system, also for those who write. All thread
// blocks advance together, so a product's input is near when this thread block's finaliser is done with the lane's product before it,
// and the cycles that words need at least (by the phase that reads them) have passed. `index`: among the lane's products of the token.
__device__ __forceinline__ u32 poll_delay(u32 phase) {
    constexpr u32 kPollDelays[] = {KOG_POLL_DELAYS};
    return phase == kQkvPhase ? kPollDelays[0] : phase == kOutPhase ? kPollDelays[1] : phase == kGateUpPhase ? kPollDelays[2] : kPollDelays[3];
}
__device__ __forceinline__ bool is_due(const Role& role, u32 lane_idx, u32 phase) {
    return clock_cycles() - load_shared_u32(role.base + KOG_OFFSET(done_cycles) + lane_idx * 4) >= poll_delay(phase);
}
__device__ __forceinline__ bool is_near(const Role& role, u32 lane_idx, u32 index) {
    return __all_sync(kFullWarp, mbar_test(role.base + KOG_OFFSET(lane_done[lane_idx]), (index - 1) & 1) && is_due(role, lane_idx, index & 3));
}
template <int kPhase>
__device__ __forceinline__ bool wait_until_near(const Role& role, u32 lane_idx, u32 index) {
    if (index == 0) return true;
    if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(lane_done[lane_idx]), (index - 1) & 1)) return false;
    while (!__all_sync(kFullWarp, is_due(role, lane_idx, kPhase))) __nanosleep(kOneStream ? 50 : 200);
    return true;
}

}  // namespace kog
