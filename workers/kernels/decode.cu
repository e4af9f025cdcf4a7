// The monokernel: the whole decode loop of a rank in one launch. Every thread block has the same roles, one warp or group of warps
// each; they meet through barriers in shared memory, thread blocks meet through words in device memory. See docs/monokernel.md.
#include "layout.cuh"
#include "load.cuh"
#include "multiply.cuh"
#include "finalize.cuh"
#include "sample.cuh"
#ifdef KOG_PROCESSORS
#include "sample_processors.cuh"
#endif
#ifdef KOG_DRAFTS
#include "sample_drafts.cuh"
#endif
#if defined KOG_PROCESSORS && defined KOG_DRAFTS
#include "sample_processor_drafts.cuh"
#endif
#ifdef KOG_COMPANY
#include "sample_company.cuh"
#endif
#include "attend.cuh"

namespace kog {

__device__ __forceinline__ void init_barriers(const Role& role) {
    Shared& shared = *role.shared;
    init_ring(role);
    for (int i = 0; i < kAttendedHalves * kTokens; ++i) mbar_init(role.base + KOG_OFFSET(merge_full[i]), kTokenWarps);
    for (u32 i = 0; i < kSums; ++i) {
        mbar_init(role.base + KOG_OFFSET(red_full[i]), kMatrixWarps);
        mbar_init(role.base + KOG_OFFSET(red_empty[i]), 1);
    }
    for (u32 i = 0; i < kSquares; ++i) mbar_init(role.base + KOG_OFFSET(squares_full[i]), kMatrixWarps);
    mbar_init(role.base + KOG_OFFSET(head_squares_full), kMatrixWarps);
    mbar_init(role.base + KOG_OFFSET(pass_full), 1), mbar_init(role.base + KOG_OFFSET(pass_ended), 1);
    for (int i = 0; i < kLanes; ++i) mbar_init(role.base + KOG_OFFSET(lane_done[i]), 1);
    shared.note.stopped = 0, shared.note.num_waits = 0, shared.finished = 0, shared.cancelled = 0, shared.num_finalized = 0;
#if defined KOG_DRAFTS || defined KOG_COMPANY
    shared.others_wait = 0;
#endif
    shared.note.phase = 0, shared.note.layer = 0, shared.note.lane = 0, shared.note.wanted = 0, shared.note.packed_words = 0;
#ifdef KOG_PROCESSORS
    shared.num_handed = 0;
#endif
#ifdef KOG_AWAITS_ATTENTION
    mbar_init(role.base + KOG_OFFSET(attended_full), kAttendWarps);
#endif
#if defined KOG_DELTA_PASSES || defined KOG_DELTA_COMPANY
    for (int i = 0; i < 2; ++i) mbar_init(role.base + KOG_OFFSET(convolved_full[i]), kAttendWarps);
#endif
#ifdef KOG_EXPERTS
    for (u32 i = 0; i < kChoices; ++i) mbar_init(role.base + KOG_OFFSET(choice_full[i]), 1);
    for (int i = 0; i < kChosen; ++i) shared.chosen[0][i] = 0;
#endif
    for (int i = 0; i < 2; ++i) shared.peer_notes[i].waiting = 0;
    fence_barrier_init();
}

// The watchdog warp. That of the first thread block also looks at the host's words, so that nobody else has to read over PCIe.
__device__ __forceinline__ void watch(const KogDecodeParams& params, const KogPeers& peers, const Role& role, u32* abort_mirror) {
    if (laneid() != 0) return;
    const KogHostPage* host = reinterpret_cast<const KogHostPage*>(params.host_ptr);
    Watchdog watchdog{role.shared->note, abort_mirror, reinterpret_cast<KogWaitRecord*>(params.record_ptr), params.wait_limit_us * 1000ull};
    // A late peer holds up the matrix warps, too: asked first, with a shorter limit, so that the record names the peer.
    PeerWatchdog<2> peer_watchdog{role.shared->peer_notes, &role.shared->note.stopped, abort_mirror, &host->abort, watchdog.record,
                                  peers.rank, watchdog.limit_ns / 4 * 3};
    while (!role.shared->finished) {
        if (role.cta == 0) {
            if (load_system_u32(&host->abort) != 0) atomicExch(abort_mirror, 1u);
#ifdef KOG_COMPANY
            if (const u32 seats = told_seats(role.company)) role.shared->cancelled = seats & kAllSeats, role.shared->others_wait = seats >> 31;
#else
            const u32 told_tag = load_system_u32(&host->cancelled_tag);
            if (told_tag == params.request_tag) role.shared->cancelled = 1;
#ifdef KOG_DRAFTS
            else if (told_tag == kOthersWaitTag) role.shared->others_wait = 1;
#endif
#endif
        }
        if (kRanks > 1 && !peer_watchdog.look()) return;
        if (!watchdog.look()) return;
        __nanosleep(4000);
    }
}

}  // namespace kog

// What a launch takes: the request's parameters and, behind them, the ranks' symmetric heap.
struct KogLaunch {
    KogDecodeParams decode;
    KogPeers peers;
#ifdef KOG_PROCESSORS
    KogProcessorParams processors;
#elif defined KOG_COMPANY
    KogCompanyParams company;
#endif
#ifdef KOG_DRAFTS
    KogDraftParams drafts;
#ifdef KOG_PROCESSORS
    KogForcedParams told;
#endif
#endif
#ifdef KOG_DELTA
    KogDeltaParams delta;
#endif
#ifdef KOG_DELTA_COMPANY
    KogCompanyStatesParams states;
#endif
};

extern "C" __global__ void __launch_bounds__(kog::kNumThreads, 1) kog_decode(const __grid_constant__ KogLaunch launch) {
    using namespace kog;
    const KogDecodeParams& params = launch.decode;
    const KogPeers& peers = launch.peers;
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);  // known to be the same in all threads: a uniform register
#ifdef KOG_COMPANY
    const CompanyStart start = start_of(launch.company);
    const Role role{&shared, opaque(shared_address(&shared)), blockIdx.x, 0, start.num_headless,
                    reinterpret_cast<u64*>(params.trace_ptr) + blockIdx.x * kStampKinds * kTokenVectors, launch.company,
#ifdef KOG_DELTA_COMPANY
                    launch.states,
#endif
    };
    if (threadIdx.x == 0) init_barriers(role), shared.newest_position = start.position;
#else
    const KogDecodeState* before = reinterpret_cast<const KogDecodeState*>(params.state_ptr);
    const Role role{&shared, opaque(shared_address(&shared)), blockIdx.x, before->num_prompt, num_headless(before->position, before->num_prompt),
                    reinterpret_cast<u64*>(params.trace_ptr) + blockIdx.x * kStampKinds * kTokenVectors};
    if (threadIdx.x == 0) init_barriers(role), shared.newest_position = before->position;
#endif
    __syncthreads();

    const u32 num_steps = params.num_steps;
    if (warp < kMatrixWarps) {
        drop_registers<kMatrixRegisters>();
        multiply(params, peers, role, warp);
    } else if (warp < kAttendWarp) {
        drop_registers<kServiceRegisters>();
        if (warp == kLoaderWarp) load_tape(params, role);
        else if (warp == kFinalWarp) finalize(params, peers, role);
        else if (warp == kSampleWarp) {
#if defined KOG_DRAFTS && defined KOG_DELTA
            const u32 stop_position = launch.delta.stop_position;
#elif defined KOG_DRAFTS
            constexpr u32 stop_position = 0;
#endif
#if defined KOG_PROCESSORS && defined KOG_DRAFTS
            sample_processor_drafts(params, peers, launch.processors, launch.drafts, launch.told, role, num_steps, stop_position);
#elif defined KOG_PROCESSORS
            sample_processors(params, peers, launch.processors, role, num_steps);
#elif defined KOG_DRAFTS
            sample_drafts(params, peers, launch.drafts, role, num_steps, stop_position);
#elif defined KOG_COMPANY
            sample_company(params, peers, role, num_steps);
#else
            sample(params, peers, role, num_steps);
#endif
        }
        else watch(params, peers, role, &reinterpret_cast<KogDecodeState*>(params.state_ptr)->abort_mirror);
    } else {
        raise_registers<kAttendRegisters>();
#ifdef KOG_DELTA
        attend(params, launch.delta, role, warp - kAttendWarp);
#else
        attend(params, 0, role, warp - kAttendWarp);
#endif
    }
}
