// What the layers of a token would have left to its LM head, from streams that prefill has computed: the words of all copies, for the launch
// behind this one (head.cu). Nobody reads such words any more when this is queued: this rank's last
// launch has ended, for which it needed the candidates of all thread blocks of all ranks, which had read them.
#include "sample.cuh"

namespace kog {

constexpr u32 kStreamThreads = 256;  // STREAM_THREADS of the host
constexpr u32 kStreamPairs = kStreams * (kHidden / 2);

}  // namespace kog

struct KogStreamLaunch {
    KogStreamParams params;
    KogPeers peers;
};

// A thread for each pair of neighbouring values of a stream.
extern "C" __global__ void __launch_bounds__(kog::kStreamThreads) kog_publish_streams(const __grid_constant__ KogStreamLaunch launch) {
    using namespace kog;
    const KogStreamParams& params = launch.params;
    const u32 i = blockIdx.x * kStreamThreads + threadIdx.x, lane = i / (kHidden / 2), pair = i % (kHidden / 2);
    if (i >= kStreamPairs) return;
    KogDecodeState* state = reinterpret_cast<KogDecodeState*>(params.state_ptr);
    if (*reinterpret_cast<const int*>(params.invalid_ptr) != 0) {
        if (i == 0) state->finish = kNumericalFaultFinish;  // the launch leaves at once; its host knows, and begins anew
        return;
    }
    const float2 values = reinterpret_cast<const float2*>(params.streams_ptr)[i];
    const u32 tag = layer_tag(kTokens == 1 ? state->epoch : state->pass_epoch, kLayers - 1);
    const u64 word = make_pair_word(values.x, values.y, tag);
    if constexpr (kStreamsToAll) {
        const u64 at = stream_box().row(kRanks, 0, launch.peers.rank) + lane * kReplicas * kStreamCopyWords + pair;
#pragma unroll 1
        for (u32 rank = 0; rank < kRanks; ++rank)
#pragma unroll
            for (u32 copy = 0; copy < kReplicas; ++copy) store_system(heap_of(launch.peers, rank) + at + copy * kStreamCopyWords, word);
    } else {
        u64* at = reinterpret_cast<u64*>(params.words_ptr) + kStreamOffset + lane * (kReplicas * kTokens * kStreamStride) + pair;
#pragma unroll
        for (u32 copy = 0; copy < kReplicas * kTokens; ++copy) store_relaxed(at + copy * kStreamStride, word);  // all tokens get them: the first counts
    }
}
