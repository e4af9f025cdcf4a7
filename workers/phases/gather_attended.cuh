// OUT's input: the attention's output, merged from its splits, whose words four neighbouring threads read.
#pragma once
#include "gather_vector.cuh"

namespace kog {

struct AttendedGatherer : VectorGatherer {
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
                words + kLogSumOffset + copy * kLogSumStride + reader * (kPartitions * kLogSumWords) + head * kSplits + first,
                layer_tag(role.first_epoch + step, at.layer())};
    }
    // The partitions' words are read in turn into one half of `got` and the other.
    static __device__ __forceinline__ Splits behind(const Splits& from) {
        return {from.outputs + kAttendedPartition, from.log_sums + kLogSumWords, from.tag};
    }
    template <int kHalf = 0>
    __device__ __forceinline__ void load_splits(const Splits& from) {
        constexpr int kOutputs = kHalf * kPartitionLoads, kLogSums = kOutputs + kSplitsOfThread;
#pragma unroll
        for (int i = 0; i < kSplitsOfThread; ++i) got[kOutputs + i] = load_relaxed_x2(from.outputs + i * kHeadUnits * 2);
#pragma unroll
        for (int i = 0; i < kSplitsOfThread / 2; ++i) got[kLogSums + i] = load_relaxed_x2(from.log_sums + 2 * i);
    }
    template <int kHalf>
    __device__ __forceinline__ bool splits_ready(const Splits& from) {
        constexpr int kOutputs = kHalf * kPartitionLoads, kLogSums = kOutputs + kSplitsOfThread;
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
        const ulonglong2& pair = got[kHalf * kPartitionLoads + kSplitsOfThread + i / 2];
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
            mixture.sum = add_scaled(mixture.sum, weight, values(got[kHalf * kPartitionLoads + i]));
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
    template <int kHalf>
    __device__ __forceinline__ bool wait_for_splits(const Place& at, const Splits& from, u32 number) {
        for (u32 rounds = 1; !splits_ready<kHalf>(from); ++rounds) {
            if (must_leave(role.stopped())) return false;
            if (rounds % 1024 == 0) {
                const u64* all = reinterpret_cast<const u64*>(params.words_ptr) + kAttendedOffset +
                                 (at.lane() * kReplicas + role.cta % kReplicas) * kAttendedStride + number * kAttendedPartition;
                note_wait(kOutPhase, at.layer(), at.lane(), from.tag, all, kSplits * kQueryRows / 2);
            }
            load_splits<kHalf>(from);
        }
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
            const u32 partitions = num_partitions(at.layer(), role.first_position + step);
            Splits next = behind(from);
            if (partitions > 1) load_splits<kPartitionsLoaded - 1>(next);
            if (!wait_for_splits<0>(at, from, 0)) return false;
            Mixture mixture{peak_of_splits<0>()};
            add_splits<0>(mixture);
            for (u32 number = 1; number < partitions; number += 2) {
                from = behind(next);
                if (number + 1 < partitions) load_splits<0>(from);
                if (!add_part<kPartitionsLoaded - 1>(at, next, number, mixture)) return false;
                if (number + 1 == partitions) break;
                next = behind(from);
                if (number + 2 < partitions) load_splits<kPartitionsLoaded - 1>(next);
                if (!add_part<0>(at, from, number + 1, mixture)) return false;
            }
            write_mixture(group, mixture);
        }
        return true;
    }
};

}  // namespace kog
