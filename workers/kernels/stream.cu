// The ceiling: the loader and the ring of the monokernel, with the same tape, and matrix warps that take the tiles without looking
// at them. What this kernel needs for a token is the time that memory alone would take.
#define KOG_STREAM
#include "layout.cuh"
#include "load.cuh"

extern "C" __global__ void __launch_bounds__(kog::kNumThreads, 1) kog_stream(const __grid_constant__ KogDecodeParams params) {
    using namespace kog;
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 warp = threadIdx.x >> 5;
    const Role role{&shared, opaque(shared_address(&shared)), blockIdx.x, 0, 0, nullptr};
    if (threadIdx.x == 0) {
        init_ring(role);
        shared.note.stopped = 0, shared.finished = 0, shared.newest_position = 0;
#ifdef KOG_EXPERTS
        for (u32 i = 0; i < kChosen; ++i) shared.chosen[0][i] = i * (kNumExperts / kChosen);
#ifdef KOG_UNION
        for (u32 i = 0; i < kChosen; ++i) shared.united[i] = i * (kNumExperts / kChosen);
        shared.num_united = kChosen;  // as of one token
#endif
#endif
        fence_barrier_init();
    }
    __syncthreads();
    if (warp == kLoaderWarp) load_tape(params, role);
    if (warp >= kMatrixWarps) return;
#ifdef KOG_EXPERTS
#ifdef KOG_SHARED_EXPERT
    constexpr u32 kRouteTiles = RouteOp::kBlocks * RouteOp::kTiles + SharedGateUpOp::kBlocks * SharedGateUpOp::kTiles;
#else
    constexpr u32 kRouteTiles = RouteOp::kBlocks * RouteOp::kTiles;
#endif
    const u32 num_gate_ups = num_shares(role.cta);
#else
    constexpr u32 kRouteTiles = 0, num_gate_ups = kGateUpProductsOfLayer;
#endif
    const u32 kLayerTiles = kRouteTiles + num_gate_ups * GateUpOp::kBlocks * GateUpOp::kTiles + kLanes * DownOp::kBlocks * DownOp::kTiles;
    constexpr u32 kMixerTiles =
        (kLayers - kDeltaLayers) * (kQkvProductsOfLayer * QkvOp::kBlocks * QkvOp::kTiles + kLanes * OutOp::kBlocks * OutOp::kTiles) +
        kDeltaLayers * (kDeltaInProductsOfLayer * DeltaInOp::kBlocks * DeltaInOp::kTiles + kLanes * DeltaOutOp::kBlocks * DeltaOutOp::kTiles);
    const u32 num_tiles = params.num_steps * (kLayers * kLayerTiles + kMixerTiles + kHeadProducts * HeadOp::kBlocks * HeadOp::kTiles);
    const u32 first = warp / kPieceWarps;
    u32 piece = first, parity = 0;
    for (u32 i = 0; i < num_tiles; ++i) {
        if (!mbar_wait(role.stopped(), role.base + KOG_OFFSET(full[piece]), parity)) return;
        if (laneid() == 0) mbar_arrive(role.base + KOG_OFFSET(empty[piece]));
        piece += kPieces;
        if (piece >= kRingPieces) piece = first, parity ^= 1;
    }
}
