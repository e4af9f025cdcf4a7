// The finaliser: one warp adds the partial sums of a block of rows, does what the phase asks (norm scale, rotary embedding, SwiGLU,
// residual and delayed sums, best logit), and publishes the rows that this thread block owns. A row of the residual streams has one
// owner for the whole token, so streams and partials never leave its shared memory.
#pragma once
#include "finalize_bias.cuh"
#include "sample.cuh"
#ifdef KOG_PROCESSORS
#include "logits_processors.cuh"
#endif

namespace kog {

// Of sums with delta nets' weights of 16 bit beside codes: these are multiplied by kNetScale, and x is `RouterX`.
constexpr float kNetFactor = PlainX::kScale / (RouterX::kScale * kNetScale);
constexpr bool kSendsDelayed = kRanks > 1 && !kOneStream;
// With one stream the sums of the lanes' first and second half are rounded to words before they are added, on any number of ranks: two
// ranks send each other words.
constexpr bool kRoundsHalves = kOneStream && kModelLanes > 1;

struct Finalizer : BiasedRows {
    SumFromPeers<kRanks, OutOp::kRows> sums;  // of the next product, if `early`
    bool early = false;
    TokenScales shared_scale;                 // of the stream that all lanes share, for their QKV or GATE_UP

    // Scale of the normed vector that a lane's product has. Of a stream that all lanes share, the first one has the squares.
    __device__ __forceinline__ bool norm_scale(u32 lane_idx, TokenScales& scale) {
        if constexpr (!kOneStream) return rms_scale(scale);
        if (lane_idx == 0 && !rms_scale(shared_scale)) return false;
        scale = shared_scale;
        return true;
    }

    // Biases are added here; where heads are normed, attention does that and turns them, since it has whole heads.
    __device__ __forceinline__ bool qkv(u32 layer, u32 lane_idx, u32 tag) {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kQkvOffset + lane_idx * (kTokens * kQkvStride);
        const float2* rope = reinterpret_cast<const float2*>(params.rope_ptr);
        TokenScales scale;
#pragma unroll 1
        for (u32 block = 0; block < QkvOp::kBlocks; ++block) {
            const u32 row = role.cta * QkvOp::kCtaRows + block * QkvOp::kRows + lane;
            const u32 lane_row = kQkvLanes > 1 ? row % kQkvRows : row;
            float2 turns[kTokens];
#pragma unroll
            for (int token = 0; token < kTokens; ++token) {
                turns[token] = make_float2(1.0f, 0.0f);
                if (!kQkNorm && lane_row < kQueryRows + kKvRows && (kRotary == kHeadDim || lane_row % kHeadDim < kRotary))
                    turns[token] = rope[pass.position_of(token) * (kRotary / 2) + (lane_row % kHeadDim) / 2];
            }
            [[maybe_unused]] float bias = 0;
            if (kQkvBias && row < kQkvLanes * kQkvRows)
                bias = WeightFormat::low(reinterpret_cast<const u16*>(params.qkv_bias_ptr)[(layer * kLanes + lane_idx) * kQkvRows + row]);
            float sums[kTokens];
            const float own_scale = row_scale<QkvOp>(block);
            if (block == 0 && !norm_scale(lane_idx, scale)) return false;
            if (!row_sum(sums, QkvOp::kRows)) return false;
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) {
                float sum = of_token(sums, token);
                const float2 turn = of_token(turns, token);
                if constexpr (kRowScales) sum *= own_scale;
                sum *= scale.of(token);
                if constexpr (kQkvBias) sum += bias;
                const float other = __shfl_xor_sync(kFullWarp, sum, 1);
                const float turned = sum_of_products(sum, turn.x, lane & 1 ? other : -other, turn.y);
                const u32 half = make_half_word(turned, lane & 1 ? tag >> 8 : tag), next = __shfl_down_sync(kFullWarp, half, 1);
                if ((lane & 1) == 0 && lane < QkvOp::kRows && row < kQkvLanes * kQkvRows) {
                    u64* to = (kQkvLanes > 1 ? words + row / kQkvRows * (kTokens * kQkvStride) : words) + token * kQkvStride;
                    store_relaxed(to + lane_row / 2, join_halves(half, next));
                }
            }
            end_block();
        }
        count_vector<kQkvLanes>(lane_idx);
        return true;
    }

#ifdef KOG_DELTA
    // Of a row of a lane's matrix that is a term of a factor: the sum of the factor's terms, and its place among the lane's inputs. Called by a full
    // warp; terms of a factor are rows of one block.
    __device__ __forceinline__ void join_terms(float& sum, u32& lane_row) const {
        float whole = sum;
#pragma unroll
        for (int width = 1; width < kFactorTerms; width *= 2) whole += __shfl_xor_sync(kFullWarp, whole, width);
        if (lane_row < kDeltaPlainRows) return;
        sum = whole, lane_row = kDeltaPlainRows + (lane_row - kDeltaPlainRows) / kFactorTerms;
    }
    // All that a delta net projects, as it is.
    __device__ __forceinline__ bool delta_in(u32 lane_idx, u32 tag) {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kDeltaInOffset + lane_idx * (kTokens * kDeltaInStride);
        u32 end = kDeltaInLanes * kDeltaMatrixRows;
        if (DeltaInOp::kLastRows != DeltaInOp::kRows) end = min(end, (role.cta + 1) * DeltaInOp::kCtaRows);
        TokenScales scale;
#pragma unroll 1
        for (u32 block = 0; block < DeltaInOp::kBlocks; ++block) {
            const u32 row = role.cta * DeltaInOp::kCtaRows + block * DeltaInOp::kRows + lane;
            float sums[kTokens];
            const float own_scale = row_scale<DeltaInOp>(block);
            if (block == 0 && !norm_scale(lane_idx, scale)) return false;
            if (!row_sum(sums, DeltaInOp::kRows)) return false;
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) {
                float sum = of_token(sums, token);
                if constexpr (kRowScales) sum *= own_scale;
                if constexpr (kPlainNetInputs) sum *= kNetFactor;
                sum *= scale.of(token);
                if constexpr (kFactorTerms == 1) {
                    const u32 half = make_half_word(sum, lane & 1 ? tag >> 8 : tag), next = __shfl_down_sync(kFullWarp, half, 1);
                    if ((lane & 1) == 0 && lane < DeltaInOp::kRows && row < end)
                        store_relaxed(words + (row / kDeltaRows * kTokens + token) * kDeltaInStride + row % kDeltaRows / 2, join_halves(half, next));
                } else {
                    const u32 matrix_row = row % kDeltaMatrixRows, apart = matrix_row < kDeltaPlainRows ? 1 : kFactorTerms;
                    u32 lane_row = matrix_row;
                    join_terms(sum, lane_row);
                    const u32 half = make_half_word(sum, lane_row & 1 ? tag >> 8 : tag), next = __shfl_sync(kFullWarp, half, (lane + apart) % 32);
                    if (lane % (2 * apart) == 0 && lane < DeltaInOp::kRows && row < end)
                        store_relaxed(words + (row / kDeltaMatrixRows * kTokens + token) * kDeltaInStride + lane_row / 2, join_halves(half, next));
                }
            }
            end_block();
        }
        count_vector<kDeltaInLanes>(lane_idx);
        return true;
    }
#endif

    __device__ __forceinline__ bool gate_up(u32 lane_idx, u32 tag) {
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + kActivationOffset + lane_idx * (kReplicas * kTokens * kActivationStride);
        TokenScales scale;
#pragma unroll 1
        for (u32 block = 0; block < GateUpOp::kBlocks; ++block) {
            float sums[kTokens];
            const float own_scale = row_scale<GateUpOp>(block);
            if (block == 0 && !norm_scale(lane_idx, scale)) return false;
            if (!row_sum(sums, GateUpOp::kRows)) return false;
            u32 end = kGateUpLanes * kFfn;
            if (GateUpOp::kLastRows != GateUpOp::kRows) end = min(end, (role.cta + 1) * GateUpOp::kCtaRows / 2);
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) {
                float sum = of_token(sums, token);
                if constexpr (kRowScales) sum *= own_scale;
                sum *= scale.of(token);
                const float up = __shfl_down_sync(kFullWarp, sum, 1);
                const float activation = swiglu(sum, up);
                publish<GateUpOp::kRows / 2, 2, kGateUpLanes == 1 ? 0 : kFfn, GateUpOp::kCtaRows / 2>(
                    words + token * kActivationStride, kTokens * kActivationStride, (role.cta * GateUpOp::kCtaRows + block * GateUpOp::kRows) / 2, end,
                    activation, tag);
            }
            end_block();
        }
        count_vector<kGateUpLanes>(lane_idx);
        return true;
    }

    // Binary tree over the lanes' partials of one row.
    __device__ __forceinline__ float lane_sum(const float (&partials)[kLanes][OutOp::kCtaRows], u32 row) {
        float sum[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) sum[i] = partials[i][row];
#pragma unroll
        for (int width = 1; width < kLanes; width *= 2)
#pragma unroll
            for (int i = 0; i + width < kLanes; i += 2 * width)
                sum[i] = kRoundsHalves && kRanks == 1 && 2 * width == kLanes ? rounded_half(sum[i]) + rounded_half(sum[i + width]) : sum[i] + sum[i + width];
        return sum[0];
    }

    // Rows of a lane's stream, for this rank's thread blocks; the last ones for those of all ranks that read them for the LM head.
    __device__ __forceinline__ void publish_stream(u32 kind, u32 layer, u32 lane_idx, u32 first_row, float stream, u32 tag, u32 token = 0) {
        if (kStreamsToAll && kind == 1 && layer == kLayers - 1) {
            const u64 at = stream_box().row(kRanks, 0, peers.rank) + lane_idx * kReplicas * kStreamCopyWords;
            publish_vector_to_all<kRanks, OutOp::kRows, kReplicas>(peers, at, kStreamCopyWords, first_row, kHidden, stream, tag);
            return;
        }
        u64* words = reinterpret_cast<u64*>(params.words_ptr) + (kind == 0 ? kMiddleOffset : kStreamOffset) + token * kStreamStride;
        publish<OutOp::kRows, 1>(words + lane_idx * (kReplicas * kTokens * kStreamStride), kTokens * kStreamStride, first_row, kHidden, stream, tag);
    }
    // Push the own lanes' sum of these rows to the peers; does not wait. Sums of a pass's tokens lie one behind the other.
    __device__ __forceinline__ void publish_sum(u32 kind, u32 layer, u32 first_row, float own_sum, u32 token = 0) {
        const u32 slot = sum_slot(kind, layer);
        publish_sum_to_peers<kRanks, OutOp::kRows>(peers, sum_box(kind).behind(token * kHidden), slot, first_row, kHidden, own_sum,
                                                   sum_tag(kind, pass.number + 1, slot));
    }
    // Sum over all ranks of what they have published for a layer, from a `SumFromPeers` that may have been loaded already. False: leave.
    __device__ __forceinline__ bool total_of_ranks(SumFromPeers<kRanks, OutOp::kRows>& from, bool loaded, u32 kind, u32 layer, u32 first_row,
                                                   float& sum) {
        const u32 slot = sum_slot(kind, layer);
        if (loaded) from.locate(peers, sum_box(kind), slot, first_row, kHidden);
        else from.load(peers, sum_box(kind), slot, first_row, kHidden);
        return from.template total<kRoundsHalves>(peers, sum_box(kind), sum, sum_tag(kind, pass.number + 1, slot), role.stopped(),
                          role.shared->peer_notes[0], sum);
    }
    // The same of all tokens of a pass, from and to `sums`.
    __device__ __forceinline__ bool totals_of_ranks(u32 kind, u32 layer, u32 first_row, float (&sums)[kTokens]) {
        const u32 slot = sum_slot(kind, layer);
        return collect_totals<kRanks, OutOp::kRows, kRoundsHalves>(peers, sum_box(kind), slot, kHidden, first_row, kHidden, sums,
                                                                   sum_tag(kind, pass.number + 1, slot), role.stopped(), role.shared->peer_notes[0]);
    }
    // Read what peers have sent for the product after number `product` while that one is being multiplied; usually it is there. From
    // here to that product nothing else may touch `sums`.
    __device__ __forceinline__ void look_ahead(u32 product) {
        if constexpr (!kSendsDelayed) return;
        const Place next(product + 1);
        const u32 kind = next.phase() >> 1;
        early = (next.phase() & 1) && delayed_layers(kind).has(next.layer());  // none behind the last
        if (early)
            sums.load(peers, sum_box(kind), sum_slot(kind, next.layer() - kDelay), role.cta * OutOp::kCtaRows, kHidden);
    }

    // The output of a block (kind 0: attention, 1: MLP) into the residual streams. The last hosted lane is the last to finish a block.
    __device__ __forceinline__ bool residual(u32 kind, u32 layer, u32 lane_idx, u32 tag, u32 product) {
        const bool blocking = blocking_layers(kind).has(layer);
        const bool delayed = delayed_layers(kind).has(layer);
        Shared& shared = *role.shared;
        const bool summed = kRanks > 1 && lane_idx == kLanes - 1 && summed_mask(kind).has(layer);
        auto& now = shared.history[0][kind][layer % kHistory];
        auto& then = shared.history[0][kind][(layer + 1) % kHistory];  // of layer - kDelay
        const bool mine = lane < OutOp::kRows;
#pragma unroll 1
        for (u32 block = 0; block < OutOp::kBlocks; ++block) {
            const u32 row = block * OutOp::kRows + (mine ? lane : 0), first_row = role.cta * OutOp::kCtaRows + block * OutOp::kRows;
            float others = 0, sum;
            if (delayed) {
                others = lane_sum(then, row);
                if (kSendsDelayed && !total_of_ranks(sums, block == 0 && early, kind, layer - kDelay, first_row, others)) return false;
                others -= then[lane_idx][row];
            }
            if (block == OutOp::kBlocks - 1) look_ahead(product);
            float stream = load_shared_f32(role.base + KOG_OFFSET(residual[0][lane_idx][row]));
            const float own_scale = row_scale<OutOp>(block);
            if (!row_sum(sum, OutOp::kRows)) return false;
            if constexpr (kRowScales) sum *= own_scale;
            sum *= kInverseXScale;
            if (!blocking) {  // the usual way, with as little as possible between the sum and its publication
                stream += (delayed ? sum : sum * kLocalScale) + others;
                publish_stream(kind, layer, lane_idx, first_row, stream, tag);
                if (mine) now[lane_idx][row] = sum, shared.residual[0][lane_idx][row] = stream;
                end_block();
                if (block == OutOp::kBlocks - 1) count_vector(lane_idx);  // nobody here waits for what goes to the peers
                if (kSendsDelayed && summed) publish_sum(kind, layer, first_row, lane_sum(now, row));
                continue;
            }
            if (mine) now[lane_idx][row] = sum;
            // A blocking sum goes to all lanes' streams once the last lane's partial is there.
            u32 from = lane_idx == kLanes - 1 ? 0 : kLanes;
            if (from == 0) {
                sum = lane_sum(now, row);
                if (summed) publish_sum(kind, layer, first_row, sum);
                SumFromPeers<kRanks, OutOp::kRows> from;
                if (!total_of_ranks(from, false, kind, layer, first_row, sum)) return false;
            }
#pragma unroll 1
            for (; from < kLanes; ++from) {
                stream = shared.residual[0][from][row] + sum;
                if (mine) shared.residual[0][from][row] = stream;
                publish_stream(kind, layer, from, first_row, stream, tag);
            }
            end_block();
            if (block == OutOp::kBlocks - 1) count_vector(lane_idx);
        }
        return true;
    }

    // The same where all lanes share one stream: every sum is awaited, and goes to it once the last lane's partial is there. What peers
    // wait for is sent before anything is awaited.
    __device__ __forceinline__ bool shared_residual(u32 kind, u32 layer, u32 lane_idx, u32 tag) {
        Shared& shared = *role.shared;
        const bool mine = lane < OutOp::kRows, is_last = lane_idx == kLanes - 1;
#pragma unroll 1
        for (u32 block = 0; block < OutOp::kBlocks; ++block) {
            const u32 row = block * OutOp::kRows + (mine ? lane : 0);
            float sums[kTokens];
            const float own_scale = row_scale<OutOp>(block), bias = residual_bias(kind, layer, lane_idx, role.cta * OutOp::kCtaRows + row);
            [[maybe_unused]] float biases[kTokens] = {bias};
            if constexpr (kBiasOfTokens)
#pragma unroll 1
                for (u32 token = 1; token < kTokens; ++token)
                    set_of_token(biases, token, residual_bias(kind, layer, lane_idx, role.cta * OutOp::kCtaRows + row, token));
            if (!row_sum(sums, OutOp::kRows)) return false;
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) {
                float sum = of_token(sums, token);
                if constexpr (kRowScales) sum *= own_scale;
                if (kPlainNetOutputs && kind == 0 && has_delta_net(layer)) sum *= kNetFactor;
                sum *= kInverseXScale;
                if constexpr (kHasResidualBias) sum += kBiasOfTokens ? of_token(biases, token) : bias;
                if (mine) shared.history[token][kind][0][lane_idx][row] = sum;
            }
            end_block();
            if (kDirectSums && is_last) {
                publish_vector_to_all<kRanks, OutOp::kRows, kSumCopies>(peers, sum_box(kind).row(kRanks, 0, peers.rank), kHidden / 2,
                                                                       role.cta * OutOp::kCtaRows + block * OutOp::kRows, kHidden,
                                                                       lane_sum(shared.history[0][kind][0], row), tag);
            } else if (kRanks > 1 && is_last) {
#pragma unroll 1
                for (u32 token = 0; token < kTokens; ++token)
                    publish_sum(kind, layer, role.cta * OutOp::kCtaRows + block * OutOp::kRows, lane_sum(shared.history[token][kind][0], row), token);
            }
        }
#pragma unroll 1
        for (u32 block = is_last && !kDirectSums ? 0 : OutOp::kBlocks; block < OutOp::kBlocks; ++block) {
            const u32 row = block * OutOp::kRows + (mine ? lane : 0), first_row = role.cta * OutOp::kCtaRows + block * OutOp::kRows;
            [[maybe_unused]] float totals[kTokens];  // of all ranks, which are asked for all tokens' at once
            if constexpr (kRanks > 1 && kTokens > 1) {
#pragma unroll
                for (int token = 0; token < kTokens; ++token) totals[token] = lane_sum(shared.history[token][kind][0], row);
                if (!totals_of_ranks(kind, layer, first_row, totals)) return false;
            }
#pragma unroll
            for (u32 token = 0; token < kTokens; ++token) {
                float sum;
                if constexpr (kRanks > 1 && kTokens > 1) {
                    sum = of_token(totals, token);
                } else {
                    sum = lane_sum(shared.history[token][kind][0], row);
                    SumFromPeers<kRanks, OutOp::kRows> from;
                    if (!total_of_ranks(from, false, kind, layer, first_row, sum)) return false;
                }
                const float stream = shared.residual[token][0][row] + sum;
                if (mine) shared.residual[token][0][row] = stream;
                publish_stream(kind, layer, 0, first_row, stream, tag, token);
            }
        }
        count_vector(lane_idx);
        return true;
    }

    // Thread `lane`'s row of a block of the LM head's rows, among this rank's; and whether there is such a row.
    __device__ __forceinline__ u32 vocab_row(u32 block) const { return first_vocab_row(role.cta) + block * HeadOp::kRows + lane; }
    __device__ __forceinline__ bool is_own_row(u32 block) const { return lane < HeadOp::kRows && vocab_row(block) < end_vocab_row(role.cta); }

    // What sums of row `lane` of a block are multiplied by in that product, where the head is quantised.
    __device__ __forceinline__ float head_row_scale(u32 product, u32 block) const {
#ifdef KOG_HEAD_FORMAT
        const float* scales = reinterpret_cast<const float*>(params.tape_ptr + kHeadScalesOffset) + (product * kNumCtas + role.cta) * HeadOp::kCtaRows;
        if (lane < HeadOp::kRows) return scales[block * HeadOp::kRows + lane] * kHeadFactor;
#endif
        return 1.0f;
    }

    // Product number `product` of the LM head. Those of several streams are summed in `logits`, in the order of the model's lanes; the last
    // one's are the logits that are chosen from. Of several tokens their logits lie one behind the other.
    __device__ __forceinline__ bool head(u32 product, Candidate (&best)[kTokens]) {
        float* logits = reinterpret_cast<float*>(params.logits_ptr);
        [[maybe_unused]] const float inverse_temperature = __uint_as_float(params.inverse_temperature_bits);
        [[maybe_unused]] TokenScales scale{kInverseXScale};
#pragma unroll 1
        for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
            float sums[kTokens];
            [[maybe_unused]] float before = 0;
            if constexpr (kStreamHead) {
                if (product > 0 && is_own_row(block)) before = logits[vocab_row(block)];
                if (block == 0 && !rms_scale(scale)) return false;
            }
            const float own_scale = head_row_scale(product, block);
            if (!row_sum(sums, HeadOp::kRows)) return false;
            end_block();
#pragma unroll 1
            for (u32 token = 0; token < kTokens; ++token) {
                float logit = of_token(sums, token);
                if constexpr (HeadOp::kCoded) logit *= own_scale;
                logit *= scale.of(token);
                const u32 row = vocab_row(block);
                if constexpr (kStreamHead) {
                    logit += before;
                    if (product + 1 < kHeadProducts) {
                        if (is_own_row(block)) logits[row] = logit;
                        continue;
                    }
                }
#ifdef KOG_PROCESSORS
                if constexpr (kTokens == 1) hand_logits(role, block, row, logit, logits);
                else if (is_own_row(block)) logits[token * kVocabRows + row] = logit;
                continue;
#endif
                if (is_own_row(block)) {
                    const u32 id = params.vocab_first + row;
                    logits[token * kVocabRows + row] = logit;
                    float score = logit;
#ifdef KOG_COMPANY
                    const u32 seat = pass.seat_of(token);
                    const float inverse_temperature = __uint_as_float(role.company.inverse_temperature_bits[seat]);
                    const u64 seed = role.company.seed[seat];
#else
                    const u64 seed = params.seed;
#endif
                    if (inverse_temperature > 0)
                        score = __fadd_rn(__fmul_rn(logit, inverse_temperature), gumbel(id, pass.noise_position(token), seed));
                    const bool finite = fabsf(logit) < INFINITY;
                    set_of_token(best, token, better(of_token(best, token), {finite ? score : -INFINITY, finite ? id : id | kNotFinite}));
                }
            }
        }
        ++num_vectors;
        return true;
    }

    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
            const u16* row = reinterpret_cast<const u16*>(params.embedding_ptr) + static_cast<u64>(of_token(pass.tokens, token)) * kHidden;
#pragma unroll 1
            for (u32 i = lane; i < OutOp::kCtaRows; i += 32) {
                const u32 column = role.cta * OutOp::kCtaRows + i;
                const float value = column < kHidden ? WeightFormat::low(row[column]) : 0.0f;
#pragma unroll 1
                for (u32 stream = 0; stream < kStreams; ++stream) role.shared->residual[token][stream][i] = value;
            }
        }
        __syncwarp();
    }

    // Every thread block publishes a candidate in every pass, an empty one if it has none: the end of a pass is an exchange
    // of all with all, which is also what makes the words' slots safe to write again.
    __device__ __forceinline__ void end(Candidate (&candidates)[kTokens]) {
#ifdef KOG_PROCESSORS  // the sampler does it
        if constexpr (kTokens > 1) __syncwarp();  // all threads' logits are there
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
        return;
#endif
        const u32 tag = pass.number + 1;
        const bool hears_host = role.cta == 0 && (kRanks == 1 || peers.rank == 0);
#ifdef KOG_COMPANY
        const u32 cancelled = hears_host ? role.shared->cancelled : 0;  // seats
#else
        const bool is_cancelled = hears_host && role.shared->cancelled;
#endif
#if defined KOG_DRAFTS || defined KOG_COMPANY
        const u32 of_host = hears_host && role.shared->others_wait ? kOthersWait : 0;
#else
        constexpr u32 of_host = 0;
#endif
#pragma unroll 1
        for (u32 token = 0; token < kTokens; ++token) {
        Candidate best = best_of_warp(of_token(candidates, token));
#ifdef KOG_COMPANY
        const bool is_cancelled = cancelled >> token & 1;
#endif
        if (is_cancelled) best.id |= kCancelled;
        best.id |= of_host;
        if constexpr (kRanks > 1) {
            publish_candidate<kRanks, kReplicas>(peers, candidate_box().behind(token * kCandidateCopyWords), tag & 1, kTokens * kCandidateCopyWords,
                                                 role.cta, __float_as_uint(best.score), best.id, tag);
        } else {
            u64* words = reinterpret_cast<u64*>(params.words_ptr) + kCandidateOffset;
            if (lane < kReplicas)
                store_relaxed_x2(words + (lane * kTokens + token) * kCandidateStride + 2 * role.cta, make_value_word(__float_as_uint(best.score), tag),
                                 make_value_word(best.id, tag));
        }
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
    }
};

__device__ __forceinline__ void finalize(const KogDecodeParams& params, const KogPeers& peers, const Role& role) {
    Finalizer finalizer{params, peers, role, laneid()};
    for (u32 turn = 0; begin_pass(role, turn, finalizer.pass); ++turn) {
        finalizer.turn = turn, finalizer.first_vector = finalizer.num_vectors;
        if (!kHeadOnly) finalizer.begin();
#pragma unroll 1
        for (u32 number = first_product(); number < kNumProducts; ++number) {
            const Place at(number);
            const u32 tag = layer_tag(finalizer.pass.number, at.layer());
            if (kRanks > 1) finalizer.lane = opaque(laneid());  // addresses are computed anew instead of being kept
            if (kRowScales) finalizer.product = number;
            if (!(at.phase() & 1)) finalizer.look_ahead(number);
            bool ok;
#ifdef KOG_DELTA
            if (at.phase() == kQkvPhase && has_delta_net(at.layer())) ok = finalizer.delta_in(at.lane(), tag);
            else
#endif
            if (at.phase() == kQkvPhase) ok = finalizer.qkv(at.layer(), at.lane(), tag);
#ifdef KOG_UNION
            else if (at.phase() == kGateUpPhase) ok = finalizer.gate_up_of_union(at.layer(), tag);
#elif defined KOG_EXPERTS
            else if (at.phase() == kGateUpPhase) ok = kTokens == 1 ? finalizer.gate_up_of_experts(at.layer(), tag) : finalizer.gate_up_of_pass(at.layer(), tag);
#else
            else if (at.phase() == kGateUpPhase) ok = finalizer.gate_up(at.lane(), tag);
#endif
            else if (kOneStream) ok = finalizer.shared_residual(at.phase() >> 1, at.layer(), at.lane(), tag);
            else ok = finalizer.residual(at.phase() >> 1, at.layer(), at.lane(), tag, number);
            if (!ok) return;
        }
        Candidate best[kTokens];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) best[token] = {-INFINITY, kIdMask};
        if (has_head(role, turn)) {
#pragma unroll 1
            for (u32 product = 0; product < kHeadProducts; ++product)
                if (!finalizer.head(product, best)) return;
        }
        finalizer.end(best);
    }
}

}  // namespace kog
