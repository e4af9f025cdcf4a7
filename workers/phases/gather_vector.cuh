// Vectors of words: how a matrix warp polls its own columns of one, and writes x into its own part of shared memory, as the B operand of
// its products. No other warp takes part, so nothing has to be handed over.
#pragma once
#include "x_digits.cuh"

namespace kog {

constexpr int kMany = (kMaxPer * 8 + 31) / 32;      // units (four neighbouring values) of a thread

// How x is kept for products with 16-bit weights, of the LM head, of a router of experts, and of the layers.
struct PlainX {
    using Format = WeightFormat;
    static constexpr bool kIsInteger = false;
    static constexpr float kScale = kXScale;
};
#ifdef KOG_HEAD_FORMAT
struct HeadX {
    using Format = KOG_HEAD_FORMAT;
    static constexpr bool kIsInteger = false;
    static constexpr float kScale = kHeadXScale;
};
#else
using HeadX = PlainX;
#endif
#ifdef KOG_CODE
struct RouterX {
    using Format = KOG_CODE_FORMAT;
    static constexpr bool kIsInteger = false;
    static constexpr float kScale = kCodedXScale;
};
#else
using RouterX = PlainX;
#endif
#ifdef KOG_INTEGERS
using LayerX = DigitX;
#else
using LayerX = RouterX;
#endif
#ifdef KOG_PLAIN_ATTENTION
using AttentionX = PlainX;
#else
using AttentionX = LayerX;
#endif

// Of delta nets that have 16 bit beside codes: first and last.
using NetInputX = OneOf<kPlainNetInputs, RouterX, AttentionX>::Type;
using NetOutputX = OneOf<kPlainNetOutputs, RouterX, AttentionX>::Type;

// What a warp knows and holds while it gathers; and vectors whose words it takes one by one (streams, activations).
struct VectorGatherer {
    const KogDecodeParams& params;
    const KogPeers& peers;
    const Role& role;
    u32 warp, lane;          // the warp is also the number of its slice of K
    u32 turn = 0, num_heads = 0;  // of the pass in this launch
    Pass pass = {};
    bool loaded = false;     // `got` holds words that were read for the next vector; perhaps too early
    ulonglong2 got[kTokens * kMany];  // of as many tokens as are gathered at a time, those of a token kMany behind the one's before
    uint2 scale[kMany];      // norm weights, four 16-bit values

    static __device__ __forceinline__ float4 values(const ulonglong2& words) {
        return make_float4(first_of(words.x), second_of(words.x), first_of(words.y), second_of(words.y));
    }
    static __device__ __forceinline__ float4 widen(uint2 packed) {
        return make_float4(WeightFormat::low(packed.x), WeightFormat::high(packed.x), WeightFormat::low(packed.y),
                           WeightFormat::high(packed.y));
    }
    // The same of norms' weights.
    static __device__ __forceinline__ float4 norm_weights(uint2 packed) {
        const float4 v = widen(packed);
        return make_float4(norm_weight(v.x), norm_weight(v.y), norm_weight(v.z), norm_weight(v.w));
    }
    static __device__ __forceinline__ float4 times(const float4& a, const float4& b) {
        return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
    }
    static __device__ __forceinline__ float4 add_scaled(const float4& sum, float factor, const float4& v) {
        return make_float4(sum.x + factor * v.x, sum.y + factor * v.y, sum.z + factor * v.z, sum.w + factor * v.w);
    }
    static __device__ __forceinline__ float square_sum(const float4& v) {
        return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, sum_of_products(v.x, v.x, v.y, v.y)));
    }

    // Where unit `unit` of this warp's slice stands in x.
    __device__ __forceinline__ u32 place_of(u32 unit, u32 token = 0) {
        if constexpr (kTokens > 1)
            return role.base + KOG_OFFSET(x) + (warp * kMaxPer + (unit >> 3)) * kXStepBytes + token * 128 + ((unit & 7) >> 1) * 16 + (unit & 1) * 8;
        return role.base + KOG_OFFSET(x) + (warp * kMaxPer + (unit >> 3)) * 128 + (unit & 1) * 64 + ((unit & 7) >> 1) * 8;
    }
    // x of this warp's units of a token, of which each thread has kLoads: number i * 32 + `lane` is `unit(i)`, if it `is_mine(i)`.
    // kOfVector of them are of one vector.
    template <class X, int kLoads, int kOfVector, class Unit, class Mine>
    __device__ __forceinline__ void write_all(Unit unit, Mine is_mine, u32 token = 0) {
        if constexpr (X::kIsInteger) {
            float4 v[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) v[i] = unit(i);
            X::template write<kOfVector / 32>(lane, role.base + KOG_OFFSET(x) + warp * (kMaxPer * kXStepBytes) + X::of_token(token), v);
        } else {
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                if (is_mine(i)) write_x<X>(place_of(i * 32 + lane, token), unit(i));
        }
    }
    // x of a unit: in two 16-bit parts.
    template <class X>
    __device__ __forceinline__ void write_x(u32 at, const float4& value) {
        using Format = typename X::Format;
        const float4 v = make_float4(value.x * X::kScale, value.y * X::kScale, value.z * X::kScale, value.w * X::kScale);
        const u32 high0 = Format::pack(v.x, v.y), high1 = Format::pack(v.z, v.w);
        const u32 low0 = pack_rest<Format>(v.x, v.y, high0), low1 = pack_rest<Format>(v.z, v.w, high1);
        store_shared(at, make_uint2(high0, high1));
        store_shared(at + (kTokens == 1 ? 32 : 64), make_uint2(low0, low1));
    }

    // What a wait looks at, for the record of one that did not end.
    __device__ __forceinline__ void note_wait(u32 phase, u32 layer, u32 lane_idx, u32 tag, const u64* words, u32 num_words) {
        WaitNote& note = role.shared->note;
        note.phase = phase + 1, note.layer = layer, note.lane = lane_idx;
        note.wanted = tag, note.set_words(words, num_words);
        static_assert(kQueryRows <= WaitNote::kMostWords && kHidden <= WaitNote::kMostWords && kFfn <= WaitNote::kMostWords, "counts");
    }

    __device__ __forceinline__ void begin(u32 turn_, const Pass& pass_) { turn = turn_, pass = pass_, loaded = false; }

    // ---- streams and activations ----
    struct Source {
        const u64* words;
        u32 tag;
    };
    template <int kPhase>
    __device__ __forceinline__ Source source(const Place& at) {
        const u64* words = reinterpret_cast<const u64*>(params.words_ptr);
        const u32 copy = (at.lane() * kReplicas + role.cta % kReplicas) * kTokens;
        const u32 tag = layer_tag(pass.number, at.layer());
        if constexpr (kPhase == kOutPhase) return {words + kAttendedOffset + copy * kAttendedStride, tag};
        if constexpr (kPhase == kDownPhase) return {words + kActivationOffset + copy * kActivationStride, tag};
        const u32 stream_copy = (stream_of(at.lane()) * kReplicas + role.cta % kReplicas) * kTokens;
        if constexpr (kPhase == kGateUpPhase) return {words + kMiddleOffset + stream_copy * kStreamStride, tag};
        return {words + kStreamOffset + stream_copy * kStreamStride, (tag - 1) & 0xffffu};
    }
    // The lane whose last product before this one made the vector: a stream that all lanes share is whole after the last one's.
    template <int kPhase>
    static __device__ __forceinline__ u32 source_lane(u32 lane_idx) {
        return kOneStream && (kPhase == kQkvPhase || kPhase == kGateUpPhase || kPhase == kHeadPhase) ? kLanes - 1 : lane_idx;
    }
    // kTogether vectors of kColumns values, of each of which a warp has kPer times 32 neighbouring ones. kTokenWords: from a token's to the next one's.
    template <int kColumns_, int kPer_, u32 kTokenWords_, int kTogether_ = 1>
    struct Slice {
        static constexpr u32 kTokenWords = kTokenWords_;
        static constexpr int kColumns = kColumns_, kOfVector = kPer_ * 8, kUnits = kTogether_ * kOfVector, kLoads = (kUnits + 31) / 32;
        static constexpr bool kEven = kUnits % 32 == 0 && kOfVector * 4 * kMatrixWarps == kColumns;  // no thread without a unit
        // The i-th unit of a thread: which vector's it is, and which of the warp's units of that vector.
        static __device__ __forceinline__ u32 vector_of(u32 lane, int i) { return kTogether_ == 1 ? 0 : (i * 32 + lane) / kOfVector; }
        static __device__ __forceinline__ u32 unit_of(u32 lane, int i) { return kTogether_ == 1 ? i * 32 + lane : (i * 32 + lane) % kOfVector; }
        // Whether it is the warp's, and whether it is one of the vector's, too.
        static __device__ __forceinline__ bool is_mine(u32 lane, int i) { return kEven || i * 32 + lane < kUnits; }
        static __device__ __forceinline__ bool is_real(u32 warp, u32 lane, int i) {
            return kEven || (is_mine(lane, i) && warp * kOfVector + unit_of(lane, i) < kColumns / 4);
        }
    };
    using HiddenSlice = Slice<kHidden, QkvOp::kPer, kStreamStride>;
    using AttendedSlice = Slice<kQueryRows, OutOp::kPer, kAttendedStride, kGatheredAttended>;
    using FfnSlice = Slice<kFfn, DownOp::kPer, kActivationStride, kGatheredActivations>;
    static_assert(QkvOp::kPer == GateUpOp::kPer && QkvOp::kPer == HeadOp::kPer, "products of the hidden size");

    // `kSystem`: words that peers may write, too. `kApart`: words from one of the vectors to the next. `kMissing`: only those that have
    // another tag than `tag` now.
    template <class S, bool kSystem = false, u32 kApart = 0, bool kMissing = false>
    __device__ __forceinline__ void load_units(const u64* words, u32 tag = 0) { load_units_to<S, kSystem, kApart, kMissing>(got, words, tag); }
    // `kCount` tokens' words, of which those of the first kFrom are there already.
    template <class S, bool kSystem, u32 kApart, bool kMissing, int kCount = 1, int kFrom = 0, int kRoom>
    __device__ __forceinline__ void load_units_to(ulonglong2 (&got)[kRoom], const u64* words, u32 tag) {
        const u64* mine = words + 2 * (warp * S::kOfVector + lane);
#pragma unroll
        for (int token = kFrom; token < kCount; ++token)
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i)
                if (S::is_real(warp, lane, i) && (!kMissing || tag_difference(got[token * kMany + i], tag) != 0)) {
                    const u64* at = mine + 64 * i;
                    if constexpr (kApart != 0) at = words + S::vector_of(lane, i) * kApart + 2 * (warp * S::kOfVector + S::unit_of(lane, i));
                    at += token * S::kTokenWords;
                    got[token * kMany + i] = kSystem ? load_system_x2(at) : load_relaxed_x2(at);
                }
    }
    template <class S>
    __device__ __forceinline__ bool units_ready(u32 tag) { return have_tag<S>(got, tag); }
    template <class S, int kCount = 1, int kRoom>
    __device__ __forceinline__ bool have_tag(const ulonglong2 (&got)[kRoom], u32 tag) {
        u32 wrong = 0;
#pragma unroll
        for (int token = 0; token < kCount; ++token)
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i)
                if (S::is_real(warp, lane, i)) wrong |= tag_difference(got[token * kMany + i], tag);
        return __all_sync(kFullWarp, wrong == 0);
    }
    // Until all of this warp's words have come; `note`: writes down what is missing.
    template <class S, bool kSystem = false, u32 kApart = 0, class Note>
    __device__ __forceinline__ bool wait_for_units(const Source& from, Note note) {
        for (u32 rounds = 1; !units_ready<S>(from.tag); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) note();
            load_units<S, kSystem, kApart, kOneStream>(from.words, from.tag);
        }
        return true;
    }
    template <int kPhase>
    __device__ __forceinline__ void load_norm(const Place& at) {
        const u32 half = 2 * at.layer() + (kPhase >> 1);
        const uint2* norm = reinterpret_cast<const uint2*>(params.norms_ptr) +
                            (half * kNormLanes + (kNormLanes == 1 ? 0 : at.lane())) * (kHidden / 4) + warp * HiddenSlice::kOfVector + lane;
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) scale[i] = norm[32 * i];
    }
    // ---- a stream that is kept here, where both of two ranks send their sums to all who gather it ----
    float4 stream[HiddenSlice::kLoads];  // this thread's values
    __device__ __forceinline__ void begin_stream() {
#pragma unroll
        for (int i = 0; i < HiddenSlice::kLoads; ++i)
            if (HiddenSlice::is_real(warp, lane, i)) stream[i] = values(got[i]);
    }
    // Add the sum of a sublayer (kind 0: attention, 1: MLP) to it; then its values are in `got`, as words of no tag. `note`: writes down
    // whose words are missing.
    template <class Note>
    __device__ __forceinline__ bool gather_sums(u32 kind, u32 tag, Note note) {
        using S = HiddenSlice;
        ulonglong2 other[S::kLoads];
        const u64* words = heap_of(peers, peers.rank) + sum_box(kind).row(kRanks, 0, 0) + role.cta % kSumCopies * (kHidden / 2);
        const u64* other_words = words + sum_box(kind).row_words;
        load_units_to<S, true, 0, false>(got, words, tag), load_units_to<S, true, 0, false>(other, other_words, tag);
        for (u32 rounds = 1;; ++rounds) {
            const bool first = have_tag<S>(got, tag), second = have_tag<S>(other, tag);
            if (first && second) break;
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) note(first ? other_words : words, first ? 1 : 0);
            load_units_to<S, true, 0, true>(got, words, tag), load_units_to<S, true, 0, true>(other, other_words, tag);
        }
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            if (!S::is_real(warp, lane, i)) continue;
            const float4 a = values(got[i]), b = values(other[i]);
            stream[i] = make_float4(stream[i].x + (a.x + b.x), stream[i].y + (a.y + b.y), stream[i].z + (a.z + b.z), stream[i].w + (a.w + b.w));
            got[i] = make_ulonglong2(make_pair_word(stream[i].x, stream[i].y, 0), make_pair_word(stream[i].z, stream[i].w, 0));
        }
        return true;
    }
    // From a lane's vector to the next one's, where a phase takes those of several lanes at a time.
    template <int kPhase>
    static constexpr u32 kLanesApart = kPhase == kOutPhase && kGatheredAttended > 1       ? kReplicas * kTokens * kAttendedStride
                                       : kPhase == kDownPhase && kGatheredActivations > 1 ? kReplicas * kTokens * kActivationStride
                                                                                          : 0;
    template <class S, int kPhase>
    __device__ __forceinline__ void load_vectors(const Source& from) {
        load_units_to<S, false, kLanesApart<kPhase>, false, kAhead<S>>(got, from.words, 0);
    }
    template <class S, int kPhase>
    __device__ __forceinline__ bool gather_units(const Place& at) {
        const Source from = source<kPhase>(at);
        if (!loaded) {
            if (!wait_until_near<kPhase>(role, source_lane<kPhase>(at.lane()), at.index())) return false;
            load_vectors<S, kPhase>(from);
        }
        return wait_for_units<S, false, kLanesApart<kPhase>>(from, [&] {
            note_wait(kPhase, at.layer(), at.lane(), from.tag, from.words, S::kColumns / 2);
        });
    }
    // Of several tokens as many at a time as registers hold; those that follow have come by then.
    static constexpr int kUnitsAtOnce = 8;
    template <class S>
    static constexpr int kAtOnce = kTokens * S::kLoads <= kUnitsAtOnce ? kTokens : kTokens / 2 * S::kLoads <= kUnitsAtOnce ? (kTokens + 1) / 2 : 1;
    // Of how many tokens words are read ahead, in registers that products leave. Of codes they leave fewer: of four tokens, or of floats of four
    // bits, those of half of the tokens.
    static constexpr bool kReadsHalfAhead = LayerWeights::kCoded && (kTokens == 4 || (kTokens == 2 && kFourBits && !kIntegers));
    template <class S>
    static constexpr int kAhead = kAtOnce<S> < kTokens ? 0 : kReadsHalfAhead ? kTokens / 2 : kTokens;
    // The LM head's input lies where the next layer's would.
    template <int kPhase>
    __device__ __forceinline__ Source source_of_pass(const Place& at) {
        if constexpr (kPhase == kHeadPhase) return source<kQkvPhase>(at);
        else return source<kPhase>(at);
    }
    // Each token's words as they come: `write(token, from)` takes those that are in `got` from `from` on.
    template <class S, int kPhase, class Write>
    __device__ __forceinline__ bool take_tokens(const Place& at, Write write) {
        Source from = source_of_pass<kPhase>(at);
        const u64* const words = from.words;
        if (!loaded && !wait_until_near<kPhase == kHeadPhase ? kQkvPhase : kPhase>(role, source_lane<kPhase>(at.lane()), at.index())) return false;
#pragma unroll 1
        for (u32 first = 0; first < kTokens; first += kAtOnce<S>) {
            from.words = words + first * S::kTokenWords;
            if (!loaded || first > 0) load_units_to<S, false, kLanesApart<kPhase>, false, kAtOnce<S>>(got, from.words, 0);
            else if (kAhead<S> < kAtOnce<S>) load_units_to<S, false, kLanesApart<kPhase>, false, kAtOnce<S>, kAhead<S>>(got, from.words, 0);
            for (u32 rounds = 1; !have_tag<S, kAtOnce<S>>(got, from.tag); ++rounds) {
                if (must_leave(role.stopped())) return false;
                if (rounds % 1024 == 0) note_wait(kPhase, kPhase == kHeadPhase ? kNowhere : at.layer(), at.lane(), from.tag, from.words, S::kColumns / 2);
                load_units_to<S, false, kLanesApart<kPhase>, true, kAtOnce<S>>(got, from.words, from.tag);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce<S>; ++i) write(first + i, i * kMany);
        }
        return true;
    }
    template <class S, int kPhase, bool kNormed, class X, bool kForRouter = false>
    __device__ __forceinline__ bool gather_tokens(const Place& at, float (&squares)[kTokens]) {
        return take_tokens<S, kPhase>(at, [&](u32 token, int from) { write_token<S, kNormed, X, kForRouter>(token, squares, from); });
    }
    // x of a token whose words are in `got` from `from` on, and the sum of its squares where it is normed. `kForRouter`: see write_units.
    template <class S, bool kNormed, class X, bool kForRouter = false>
    __device__ __forceinline__ void write_token(u32 token, float (&squares)[kTokens], int from = 0) {
        const u32 lane = opaque(this->lane);  // addresses, and norms' weights as floats, are not kept from token to token: registers are full
        float sum = 0;
        [[maybe_unused]] float4 all[S::kLoads];
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            if (!X::kIsInteger && !S::is_mine(lane, i)) continue;  // whole steps of integers are all this warp's
            float4 v = make_float4(0, 0, 0, 0);
            if (S::is_real(warp, lane, i)) {
                v = values(got[from + i]);
                if (kNormed) {
                    sum += square_sum(v);
                    v = times(v, norm_weights(make_uint2(opaque(scale[i].x), opaque(scale[i].y))));
                }
            }
            if constexpr (kForRouter) write_x<RouterX>(place_of(i * 32 + lane, token) + kRouterX, v);
            if constexpr (X::kIsInteger) all[i] = v;
            else write_x<X>(place_of(i * 32 + lane, token), v);
        }
        if constexpr (X::kIsInteger) {
            static_assert(S::kOfVector % 32 == 0, "whole steps");
            const u32 at = role.base + KOG_OFFSET(x) + warp * (kMaxPer * kXStepBytes) + X::of_token(token);
            X::template write<S::kOfVector / 32>(lane, at, all);
        }
        if constexpr (kNormed) set_of_token(squares, token, sum);
    }
    // `kForRouter`: and once more as a router wants it, kRouterX behind.
    template <class S, bool kNormed, class X = LayerX, bool kForRouter = false>
    __device__ __forceinline__ void write_units(float (&squares)[kTokens]) {
        static_assert(!X::kIsInteger || S::kOfVector % 32 == 0, "whole steps");
        const auto unit = [&](int i) {
            float4 v = make_float4(0, 0, 0, 0);
            if (S::is_real(warp, lane, i)) {
                v = values(got[i]);
                if (kNormed) {
                    squares[0] += square_sum(v);
                    v = times(v, norm_weights(scale[i]));
                }
            }
            if constexpr (kForRouter) write_x<RouterX>(place_of(i * 32 + lane) + kRouterX, v);
            return v;
        };
        write_all<X, S::kLoads, S::kOfVector>(unit, [&](int i) { return S::is_mine(lane, i); });
    }
};

}  // namespace kog
