// How a matrix warp gets its slice of the next vector: it polls the words of its own columns, applies the norm's weights, and writes
// x into its own part of shared memory, as the B operand of its products. No other warp takes part, so nothing has to be handed over.
// The words of the vector after the present one are read before the present one is multiplied, where enough lanes take turns for them to
// have arrived by then. The RMS scale is applied to the product, so nothing waits for the sum of squares.
#pragma once
#include "layout.cuh"

namespace kog {

constexpr int kMany = (kMaxPer * 8 + 31) / 32;      // units (four neighbouring values) of a thread
constexpr int kSplitsOfThread = kSplits / 4;        // of a unit of the attention's output: four threads share a unit
static_assert(kSplits % 8 == 0, "a thread reads the log-sums of its splits two at a time");
constexpr int kPartLoads = kSplitsOfThread + kSplitsOfThread / 2, kPartsLoaded = kParts > 1 ? 2 : 1;  // of a part; parts under way
constexpr int kGot = kMany > kPartLoads * kPartsLoaded ? kMany : kPartLoads * kPartsLoaded;

struct Gatherer {
    const KogDecodeParams& params;
    const KogPeers& peers;
    const Role& role;
    u32 warp, lane;          // the warp is also the number of its slice of K
    u32 step = 0, token = 0, num_heads = 0;
    bool loaded = false;     // `got` holds words that were read for the next vector; perhaps too early
    ulonglong2 got[kGot];
    uint2 scale[kMany];      // norm weights, four 16-bit values

    static __device__ __forceinline__ float4 values(const ulonglong2& words) {
        return make_float4(first_of(words.x), second_of(words.x), first_of(words.y), second_of(words.y));
    }
    static __device__ __forceinline__ float payload(u64 word) { return __uint_as_float(static_cast<u32>(word)); }
    static __device__ __forceinline__ float4 widen(uint2 packed) {
        return make_float4(WeightFormat::low(packed.x), WeightFormat::high(packed.x), WeightFormat::low(packed.y),
                           WeightFormat::high(packed.y));
    }
    static __device__ __forceinline__ float4 times(const float4& a, const float4& b) {
        return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
    }
    static __device__ __forceinline__ float4 add_scaled(const float4& sum, float factor, const float4& v) {
        return make_float4(sum.x + factor * v.x, sum.y + factor * v.y, sum.z + factor * v.z, sum.w + factor * v.w);
    }
    static __device__ __forceinline__ float square_sum(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

    // Where unit `unit` of this warp's slice stands in x.
    __device__ __forceinline__ u32 place_of(u32 unit) {
        return role.base + KOG_OFFSET(x) + (warp * kMaxPer + (unit >> 3)) * 128 + (unit & 1) * 64 + ((unit & 7) >> 1) * 8;
    }
    // x of a unit: in two 16-bit parts.
    __device__ __forceinline__ void write_x(u32 at, const float4& value) {
        const float4 v = make_float4(value.x * kXScale, value.y * kXScale, value.z * kXScale, value.w * kXScale);
        const u32 high0 = WeightFormat::pack(v.x, v.y), high1 = WeightFormat::pack(v.z, v.w);
        const u32 low0 = pack_rest<WeightFormat>(v.x, v.y, high0), low1 = pack_rest<WeightFormat>(v.z, v.w, high1);
        store_shared(at, make_uint2(high0, high1));
        store_shared(at + 32, make_uint2(low0, low1));
    }

    // What a wait looks at, for the record of one that did not end.
    __device__ __forceinline__ void note_wait(u32 phase, u32 layer, u32 lane_idx, u32 tag, const u64* words, u32 num_words) {
        WaitNote& note = role.shared->note;
        note.phase = phase + 1, note.layer = layer, note.lane = lane_idx;
        note.wanted = tag, note.set_words(words, num_words);
        static_assert(kAttendedPart <= WaitNote::kMostWords && kHidden <= WaitNote::kMostWords && kFfn <= WaitNote::kMostWords, "counts");
    }

    __device__ __forceinline__ void begin(u32 step_, u32 token_) { step = step_, token = token_, loaded = false; }

    // ---- streams and activations ----
    struct Source {
        const u64* words;
        u32 tag;
    };
    template <int kPhase>
    __device__ __forceinline__ Source source(const Place& at) {
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr);
        const u32 copy = at.lane() * kReplicas + role.cta % kReplicas;
        const u32 tag = layer_tag(role.first_epoch + step, at.layer());
        if constexpr (kPhase == kDownPhase) return {words + kActivationOffset + copy * kActivationStride, tag};
        if constexpr (kPhase == kGateUpPhase) return {words + kMiddleOffset + copy * kStreamStride, tag};
        return {words + kStreamOffset + copy * kStreamStride, (tag - 1) & 0xffffu};
    }
    // A vector of kColumns values, of which a warp has kPer times 32 neighbouring ones.
    template <int kColumns_, int kPer_>
    struct Slice {
        static constexpr int kColumns = kColumns_, kUnits = kPer_ * 8, kLoads = (kUnits + 31) / 32;  // of a warp; of a thread
        static constexpr bool kEven = kUnits % 32 == 0 && kUnits * 4 * kMatrixWarps == kColumns;     // no thread without a unit
        // Whether the i-th unit of a thread is the warp's, and whether it is one of the vector's, too.
        static __device__ __forceinline__ bool is_mine(u32 lane, int i) { return kEven || i * 32 + lane < kUnits; }
        static __device__ __forceinline__ bool is_real(u32 warp, u32 lane, int i) {
            return kEven || (is_mine(lane, i) && warp * kUnits + i * 32 + lane < kColumns / 4);
        }
    };
    using HiddenSlice = Slice<kHidden, QkvOp::kPer>;
    using FfnSlice = Slice<kFfn, DownOp::kPer>;
    static_assert(QkvOp::kPer == GateUpOp::kPer && QkvOp::kPer == HeadOp::kPer, "products of the hidden size");

    // `kSystem`: words that peers may write, too.
    template <class S, bool kSystem = false>
    __device__ __forceinline__ void load_units(const u64* words) {
        const u64* mine = words + 2 * (warp * S::kUnits + lane);
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i)
            if (S::is_real(warp, lane, i)) got[i] = kSystem ? load_system_x2(mine + 64 * i) : load_relaxed_x2(mine + 64 * i);
    }
    template <class S>
    __device__ __forceinline__ bool units_ready(u32 tag) {
        u32 wrong = 0;
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i)
            if (S::is_real(warp, lane, i)) wrong |= tag_difference(got[i], tag);
        return __all_sync(kFullWarp, wrong == 0);
    }
    // Until all of this warp's words have come; `note`: writes down what is missing.
    template <class S, bool kSystem = false, class Note>
    __device__ __forceinline__ bool wait_for_units(const Source& from, Note note) {
        for (u32 rounds = 1; !units_ready<S>(from.tag); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) note();
            load_units<S, kSystem>(from.words);
        }
        return true;
    }
    template <int kPhase>
    __device__ __forceinline__ void load_norm(const Place& at) {
        const u32 half = 2 * at.layer() + (kPhase >> 1);
        const uint2* norm = reinterpret_cast<const uint2*>(params.norms_ptr) +
                            (half * kNormLanes + (kNormLanes == 1 ? 0 : at.lane())) * (kHidden / 4) + warp * HiddenSlice::kUnits + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) scale[i] = norm[32 * i];
    }

    // ---- the attention's output: merged from its splits ----
    static constexpr u32 kOutUnits = kQueryRows / 4, kHeadUnits = kHeadDim / 4;
    struct Splits {
        const u64 *outputs, *log_sums;
        u32 tag;
    };
    __device__ __forceinline__ Splits splits(const Place& at, u32 group) {
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr);
        const u32 copy = at.lane() * kReplicas + role.cta % kReplicas, first = (lane & 3) * kSplitsOfThread;
        u32 unit = (warp * OutOp::kPer + group) * 8 + (lane >> 2);
        u32 reader = warp;
        if (unit >= kOutUnits) unit = 0, reader = 0;  // padding: read something that will be there
        const u32 head = unit / kHeadUnits, place = unit % kHeadUnits;
        return {words + kAttendedOffset + copy * kAttendedStride + ((head * kSplits + first) * kHeadUnits + place) * 2,
                words + kLogSumOffset + copy * kLogSumStride + reader * (kParts * kLogSumWords) + head * kSplits + first,
                layer_tag(role.first_epoch + step, at.layer())};
    }
    // The parts' words are read in turn into one half of `got` and the other.
    static __device__ __forceinline__ Splits behind(const Splits& from) {
        return {from.outputs + kAttendedPart, from.log_sums + kLogSumWords, from.tag};
    }
    template <int kHalf = 0>
    __device__ __forceinline__ void load_splits(const Splits& from) {
        constexpr int kOutputs = kHalf * kPartLoads, kLogSums = kOutputs + kSplitsOfThread;
#pragma unroll
        for (int i = 0; i < kSplitsOfThread; ++i) got[kOutputs + i] = load_relaxed_x2(from.outputs + i * kHeadUnits * 2);
#pragma unroll
        for (int i = 0; i < kSplitsOfThread / 2; ++i) got[kLogSums + i] = load_relaxed_x2(from.log_sums + 2 * i);
    }
    template <int kHalf>
    __device__ __forceinline__ bool splits_ready(const Splits& from) {
        constexpr int kOutputs = kHalf * kPartLoads, kLogSums = kOutputs + kSplitsOfThread;
        u32 wrong = 0;
#pragma unroll
        for (int i = 0; i < kSplitsOfThread; ++i) wrong |= tag_difference(got[kOutputs + i], from.tag);
#pragma unroll
        for (int i = 0; i < kSplitsOfThread / 2; ++i)
            wrong |= (static_cast<u32>(got[kLogSums + i].x >> 32) ^ from.tag) | (static_cast<u32>(got[kLogSums + i].y >> 32) ^ from.tag);
        return __all_sync(kFullWarp, wrong == 0);
    }
    template <int kHalf>
    __device__ __forceinline__ float log_sum(int i) const {
        const ulonglong2& pair = got[kHalf * kPartLoads + kSplitsOfThread + i / 2];
        return payload(i & 1 ? pair.y : pair.x);
    }
    // Outputs of the splits so far, with weights relative to the largest log-sum. Four neighbouring threads hold the splits of a unit.
    struct Mixture {
        float peak, total = 0;
        float4 sum = make_float4(0, 0, 0, 0);
    };
    template <int kHalf>
    __device__ __forceinline__ float peak_of_splits() const {
        float peak = -INFINITY;
#pragma unroll
        for (int i = 0; i < kSplitsOfThread; ++i) peak = fmaxf(peak, log_sum<kHalf>(i));
        peak = fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, 1));
        return fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, 2));
    }
    template <int kHalf>
    __device__ __forceinline__ void add_splits(Mixture& mixture) const {
#pragma unroll
        for (int i = 0; i < kSplitsOfThread; ++i) {
            const float weight = exp2_approx(log_sum<kHalf>(i) - mixture.peak);
            mixture.total += weight;
            mixture.sum = add_scaled(mixture.sum, weight, values(got[kHalf * kPartLoads + i]));
        }
    }
    template <int kHalf>
    __device__ __forceinline__ bool add_part(const Place& at, const Splits& from, u32 number, Mixture& mixture) {
        if (!wait_for_splits<kHalf>(at, from, number)) return false;
        const float peak = fmaxf(mixture.peak, peak_of_splits<kHalf>()), shrink = exp2_approx(mixture.peak - peak);
        mixture = {peak, mixture.total * shrink, times(mixture.sum, make_float4(shrink, shrink, shrink, shrink))};
        add_splits<kHalf>(mixture);
        return true;
    }
    __device__ __forceinline__ void write_mixture(u32 group, Mixture mixture) {
        float total = mixture.total;
        float4 sum = mixture.sum;
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            total += __shfl_xor_sync(kFullWarp, total, offset);
            sum.x += __shfl_xor_sync(kFullWarp, sum.x, offset);
            sum.y += __shfl_xor_sync(kFullWarp, sum.y, offset);
            sum.z += __shfl_xor_sync(kFullWarp, sum.z, offset);
            sum.w += __shfl_xor_sync(kFullWarp, sum.w, offset);
        }
        const u32 unit = group * 8 + (lane >> 2);
        const float inverse = warp * OutOp::kPer * 8 + unit < kOutUnits ? reciprocal_approx(total) : 0.0f;
        if ((lane & 3) == 0) write_x(place_of(unit), make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse));
    }

    // ---- the last streams, of forms of the LM head that multiply them one by one ----
    __device__ __forceinline__ Source last_source(u32 lane_idx) { return {last_stream(lane_idx), layer_tag(role.first_epoch + step, kLayers - 1)}; }
    __device__ __forceinline__ void load_last_stream(u32 lane_idx) {
        const uint2* norm = reinterpret_cast<const uint2*>(params.final_norm_ptr) +
                            (kFinalNormLanes == 1 ? 0 : lane_idx) * (kHidden / 4) + warp * HiddenSlice::kUnits + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) scale[i] = norm[32 * i];
        load_units<HiddenSlice, kStreamsToAll>(last_source(lane_idx).words);
    }
    __device__ __forceinline__ bool gather_last_stream(const Place& at, float& squares) {
        const u32 lane_idx = kVocabParallelHead ? vocab_lane(role.cta) : at.lane();
        if (!loaded) {
            if (!wait_until_near<kQkvPhase>(role, kVocabParallelHead ? lane_idx : kLanes - 1, 4 * kLayers)) return false;
            load_last_stream(lane_idx);
        }
        const Source from = last_source(lane_idx);
        if (!wait_for_units<HiddenSlice, kStreamsToAll>(from, [&] { note_wait(kHeadPhase, kNowhere, lane_idx, from.tag, from.words, kHidden / 2); }))
            return false;
        write_units<HiddenSlice, true>(squares);
        loaded = false;
        __syncwarp();
        return true;
    }

    // ---- any vector ----
    static constexpr bool kReadsWordsAhead = kLanes > 2;
    // Read what may be there already of the next vector; never waits. One lane alone is never ahead of itself. Of two lanes only the
    // attention's output is early enough: two of three looks at other words would come too early, and each delays the present product.
    __device__ __forceinline__ void read_ahead(const Place& at) {
        loaded = false;
        if constexpr (kLaneHead) {
            if (at.is_last() && at.lane() > 0) {  // all streams come at about the same time
                load_last_stream(at.lane());
                loaded = true;
            }
        }
        if (kLanes == 1 || at.is_last() || (!kReadsWordsAhead && at.phase() != kOutPhase && at.index() != 0)) return;
        if constexpr (kReadsWordsAhead) {
            if (at.phase() == kQkvPhase) load_norm<kQkvPhase>(at);
            else if (at.phase() == kGateUpPhase) load_norm<kGateUpPhase>(at);
        }
        if (at.index() == 0) {
            load_embedding();
        } else if (!is_near(role, at.lane(), at.index())) {
            return;
        } else if (at.phase() == kOutPhase) {
            load_splits(splits(at, 0));
        } else if constexpr (kReadsWordsAhead) {
            if (at.phase() == kDownPhase) load_units<FfnSlice>(source<kDownPhase>(at).words);
            else load_units<HiddenSlice>(at.phase() == kGateUpPhase ? source<kGateUpPhase>(at).words : source<kQkvPhase>(at).words);
        }
        loaded = true;
    }
    // x of the vector, in this warp's part of shared memory. `squares`: of this thread's values. False: leave.
    template <int kPhase>
    __device__ __forceinline__ bool gather(const Place& at, float& squares) {
        squares = 0;
        if constexpr (kPhase == kOutPhase) {
            if (!gather_merged(at)) return false;
        } else if constexpr (kPhase == kDownPhase) {
            if (!gather_units<FfnSlice, kDownPhase>(at)) return false;
            write_units<FfnSlice, false>(squares);
        } else {
            if (!kReadsWordsAhead || (kPhase == kQkvPhase && at.index() == 0 && !loaded)) load_norm<kPhase>(at);  // words take as long
            if (kPhase == kQkvPhase && at.index() == 0) {
                if (!loaded) load_embedding();
                widen_embedding();
            } else if (!gather_units<HiddenSlice, kPhase>(at)) {
                return false;
            }
            write_units<HiddenSlice, true>(squares);
        }
        loaded = false;
        __syncwarp();
        return true;
    }
    __device__ __forceinline__ bool gather_merged(const Place& at) {
#pragma unroll 1
        for (u32 group = 0; group < OutOp::kPer; ++group) {
            Splits from = splits(at, group);
            if (group > 0 || !loaded) {
                if (!wait_until_near<kOutPhase>(role, at.lane(), at.index())) return false;
                load_splits(from);
            }
            const u32 parts = num_parts(at.layer(), role.first_position + step);
            Splits next = behind(from);
            if (parts > 1) load_splits<kPartsLoaded - 1>(next);
            if (!wait_for_splits<0>(at, from, 0)) return false;
            Mixture mixture{peak_of_splits<0>()};
            add_splits<0>(mixture);
            for (u32 number = 1; number < parts; number += 2) {
                from = behind(next);
                if (number + 1 < parts) load_splits<0>(from);
                if (!add_part<kPartsLoaded - 1>(at, next, number, mixture)) return false;
                if (number + 1 == parts) break;
                next = behind(from);
                if (number + 2 < parts) load_splits<kPartsLoaded - 1>(next);
                if (!add_part<0>(at, from, number + 1, mixture)) return false;
            }
            write_mixture(group, mixture);
        }
        return true;
    }
    template <int kHalf>
    __device__ __forceinline__ bool wait_for_splits(const Place& at, const Splits& from, u32 number) {
        for (u32 rounds = 1; !splits_ready<kHalf>(from); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) {
                const u64* all = reinterpret_cast<const u64*>(params.words_ptr) + kAttendedOffset +
                                 (at.lane() * kReplicas + role.cta % kReplicas) * kAttendedStride + number * kAttendedPart;
                note_wait(kOutPhase, at.layer(), at.lane(), from.tag, all, kSplits * kQueryRows / 2);
            }
            load_splits<kHalf>(from);
        }
        return true;
    }
    template <class S, int kPhase>
    __device__ __forceinline__ bool gather_units(const Place& at) {
        const Source from = source<kPhase>(at);
        if (!loaded) {
            if (!wait_until_near<kPhase>(role, at.lane(), at.index())) return false;
            load_units<S>(from.words);
        }
        return wait_for_units<S>(from, [&] {
            note_wait(kPhase, at.layer(), at.lane(), from.tag, from.words, S::kColumns / 2);
        });
    }
    template <class S, bool kNormed>
    __device__ __forceinline__ void write_units(float& squares) {
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            if (!S::is_mine(lane, i)) continue;
            float4 v = make_float4(0, 0, 0, 0);
            if (S::is_real(warp, lane, i)) {
                v = values(got[i]);
                if (kNormed) {
                    squares += square_sum(v);
                    v = times(v, widen(scale[i]));
                }
            }
            write_x(place_of(i * 32 + lane), v);
        }
    }

    // ---- the embedding ----
    // The token's embedding, where the words of a stream will lie later.
    __device__ __forceinline__ void load_embedding() {
        const u64* row = reinterpret_cast<const u64*>(params.embedding_ptr) + static_cast<u64>(token) * (kHidden / 4) + warp * HiddenSlice::kUnits + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) got[i].x = row[32 * i];
    }
    __device__ __forceinline__ void widen_embedding() {
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) {
                const float4 v = widen(make_uint2(static_cast<u32>(got[i].x), static_cast<u32>(got[i].x >> 32)));
                got[i] = make_ulonglong2(make_pair_word(v.x, v.y, 0), make_pair_word(v.z, v.w, 0));
            }
    }

    // ---- LM head ----
    // Of the form `replicate` its input is the mean over the model's lanes of rmsnorm(h), or rmsnorm of the sum of h. The scales need whole vectors: the
    // warps add up their sums of squares through shared memory. Every rank reads all lanes in the same order, hence the same bits.
    // Streams lie one behind the other, those of a peer's lanes, too: its row of the mailbox has no gap (kernel_boxes.py).
    static constexpr u32 kStreamWords = kReplicas * (kStreamsToAll ? kStreamCopyWords : kStreamStride);
    __device__ __forceinline__ const u64* last_stream(u32 lane_idx) const {
        const u64* first = kStreamsToAll ? heap_of(peers, peers.rank) + stream_box().row(kRanks, 0, 0) + role.cta % kReplicas * kStreamCopyWords
                                         : reinterpret_cast<const u64*>(params.words_ptr) + kStreamOffset + role.cta % kReplicas * kStreamStride;
        return first + lane_idx * kStreamWords;
    }
    // A norm that all lanes share is multiplied into their sum. Its weights wait in x, where the sum will be, while registers are full.
    static constexpr bool kParksNorm = kPreNormSum || kFinalNormLanes == 1;
    struct Streams {
        ulonglong2 got[kTogether][HiddenSlice::kLoads];
    };
    __device__ __forceinline__ void load_streams(u32 first, Streams& streams) {
        const u64* mine = last_stream(first) + 2 * (warp * HiddenSlice::kUnits + lane);
#pragma unroll
        for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
            for (int i = 0; i < HiddenSlice::kLoads; ++i)
                if (HiddenSlice::is_real(warp, lane, i)) {
                    const u64* at = mine + k * kStreamWords + 64 * i;
                    streams.got[k][i] = kRanks > 1 ? load_system_x2(at) : load_relaxed_x2(at);
                }
    }
    __device__ __forceinline__ bool wait_for_streams(u32 first, u32 tag, Streams& streams) {
#pragma unroll 1
        for (u32 rounds = 1;; ++rounds) {
            load_streams(first, streams);
            u32 wrong = 0;
#pragma unroll
            for (u32 k = 0; k < kTogether; ++k)
#pragma unroll
                for (int i = 0; i < HiddenSlice::kLoads; ++i)
                    if (HiddenSlice::is_real(warp, lane, i)) wrong |= tag_difference(streams.got[k][i], tag);
            if (__all_sync(kFullWarp, wrong == 0)) return true;
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) note_wait(kHeadPhase, kNowhere, first, tag, last_stream(first), kHidden / 2);
        }
    }
    __device__ __forceinline__ bool gather_head(const Place& at, float& squares) {
        if constexpr (kStreamHead) return gather_last_stream(at, squares);
        else return gather_agreed();
    }
    __device__ __forceinline__ bool gather_agreed() {
        Shared& shared = *role.shared;
        const u32 tag = layer_tag(role.first_epoch + step, kLayers - 1);
        using S = HiddenSlice;
        const u32 warp = this->warp;  // not read anew after each wait: the compiler cannot know that nothing writes it
        float4 sum[S::kLoads];
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) sum[i] = make_float4(0, 0, 0, 0);
        const uint2* norm = reinterpret_cast<const uint2*>(params.final_norm_ptr) + warp * S::kUnits + lane;
        if constexpr (kParksNorm) {
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i)
                if (S::is_real(warp, lane, i)) store_shared(place_of(i * 32 + lane), norm[32 * i]);
        }
        // An abort ends the waits, but nobody leaves before the end: on a way around, registers would be kept for what is not there yet.
        bool alive = true;
#pragma unroll 1
        for (u32 first = 0; first < kModelLanes; first += kTogether) {
            Streams streams;
            alive = wait_until_near<kQkvPhase>(role, kLanes - 1, 4 * kLayers) && alive;
            alive = wait_for_streams(first, tag, streams) && alive;
            float squares[kTogether];
#pragma unroll
            for (u32 k = 0; k < kTogether; ++k) {
                squares[k] = 0;
#pragma unroll
                for (int i = 0; i < S::kLoads; ++i) {
                    if (!S::is_real(warp, lane, i)) continue;
                    if (kPreNormSum) sum[i] = add_scaled(sum[i], 1.0f, values(streams.got[k][i]));
                    else squares[k] += square_sum(values(streams.got[k][i]));
                }
            }
            if (!kPreNormSum) add_squares(squares, first);
        }
        if (kPreNormSum) {
            float squares[1] = {0};
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i) squares[0] += square_sum(sum[i]);
            add_squares(squares, 0);
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(head_squares_full));
        alive = mbar_wait(role.stopped(), role.base + KOG_OFFSET(head_squares_full), num_heads & 1) && alive;
        const u32 mine = lane < (kPreNormSum ? 1 : kModelLanes) ? lane : 0;
        float total = 0;
#pragma unroll 4
        for (int i = 0; i < kMatrixWarps; ++i) total += shared.head_squares[num_heads & 1][i][mine];
        const float factor = inverse_root_approx(total * (1.0f / kHidden) + kNormEps) * (kPreNormSum ? 1.0f : 1.0f / kModelLanes);
        if (!kPreNormSum) {  // the mean: all streams are read once more
#pragma unroll 1
            for (u32 first = 0; first < kModelLanes; first += kTogether) {
                Streams streams;
                load_streams(first, streams);
#pragma unroll
                for (u32 k = 0; k < kTogether; ++k) {
                    const float lane_factor = __shfl_sync(kFullWarp, factor, first + k);
#pragma unroll
                    for (int i = 0; i < S::kLoads; ++i) {
                        if (!S::is_real(warp, lane, i)) continue;
                        float4 stream = values(streams.got[k][i]);
                        if (kFinalNormLanes > 1) stream = times(stream, widen(norm[(first + k) * (kHidden / 4) + 32 * i]));
                        sum[i] = add_scaled(sum[i], lane_factor, stream);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            if (!S::is_mine(lane, i)) continue;
            float4 v = sum[i];
            if (kPreNormSum) v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
            if (kParksNorm && S::is_real(warp, lane, i)) {
                uint2 weights;
                load_shared(place_of(i * 32 + lane), weights);
                v = times(v, widen(weights));
            }
            write_x(place_of(i * 32 + lane), v);
        }
        ++num_heads;
        forget();
        __syncwarp();
        return alive;
    }
    // Nothing read ahead is wanted: its registers were free meanwhile.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < kGot; ++i) got[i] = make_ulonglong2(0, 0);
#pragma unroll
        for (int i = 0; i < kMany; ++i) scale[i] = make_uint2(0, 0);
    }
    // Sums over the warp of kMany values at once, each in the order of a butterfly: thread i has that of value i / (32 / kMany).
    template <u32 kMany>
    __device__ __forceinline__ float sums_of_warp(float (&values)[kMany]) {
        u32 offset = 16;
#pragma unroll
        for (u32 left = kMany / 2; left > 0; left /= 2, offset /= 2) {
            const bool upper = lane & offset;
#pragma unroll
            for (u32 k = 0; k < left; ++k) {
                const float mine = upper ? values[k + left] : values[k], others = upper ? values[k] : values[k + left];
                values[k] = mine + __shfl_xor_sync(kFullWarp, others, offset);
            }
        }
#pragma unroll
        for (; offset > 0; offset /= 2) values[0] += __shfl_xor_sync(kFullWarp, values[0], offset);
        return values[0];
    }
    // This warp's sums of squares of the streams from `first` on, to all warps.
    template <u32 kMany>
    __device__ __forceinline__ void add_squares(float (&squares)[kMany], u32 first) {
        const float sum = sums_of_warp(squares);
        const u32 lane_idx = first + lane / (32 / kMany);
        const bool is_mine = lane % (32 / kMany) == 0;
        if (is_mine) role.shared->head_squares[num_heads & 1][warp][lane_idx] = sum;
    }
};

}  // namespace kog
