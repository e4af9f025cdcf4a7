// waits: each wait for words, as one warp meets it, with the order to leave: it ends well if all words have their tags, else it leaves. So it
// is asked whether all are there, with all of them, and with one that has a tag of an earlier time, which differs in one bit. Then waits for what
// is counted in shared memory, one short of what is waited for, and with that.
// At last a wait is asked whether it notes that something is missing when nothing is.
// Prints for each:  its name, whether it ends well with all that it waits for, how often it was asked with less, how often it ended well then.
#define KOG_PROCESSORS 1
#include "ptx.cuh"

inline void __threadfence_block() {}
// Of what is not run here.
float __fdiv_rn(float, float);
unsigned long long __float2ull_rz(float), __umul64hi(unsigned long long, unsigned long long);
unsigned __reduce_add_sync(unsigned, unsigned), __reduce_min_sync(unsigned, unsigned), __reduce_or_sync(unsigned, unsigned);
int __ffs(unsigned);
namespace kog {
void store_relaxed_u32(u32*, u32);
}

#include "finalize_experts.cuh"
#include "gather_experts.cuh"
#include "attend.cuh"
#include "sample_processors.cuh"

using namespace kog;

// Bits of a tag that are asked about, by the kind of a word: a pair word's tag has 16, a byte in each half; a value word's 32, a quad word's 8.
enum Kind { kPair, kValue, kQuad };
const std::vector<u32> kBits[] = {{0, 7, 8, 15}, {0, 15, 16, 31}, {0, 7}};
u64 word_of(Kind kind, u32 tag) {
    return kind == kPair ? make_pair_word(1.5f, -2.5f, tag) : kind == kValue ? make_value_word(3, tag) : make_quad_word(3, tag & 0xff);
}
struct Word {
    u64* at;
    Kind kind;
};
void add(std::vector<Word>& words, const u64* first, u32 count, Kind kind = kPair) {
    for (u32 i = 0; i < count; ++i) words.push_back({const_cast<u64*>(first) + i, kind});
}
// Called by a full warp, like the waits.
void put(u64* at, u64 word) {
    __syncwarp();
    if (laneid() == 0) *at = word;
    __syncwarp();
}
template <class Wait>
void ask(const char* name, const std::vector<Word>& words, u32 tag, Wait wait) {
    u32 asked = 0, ended_well = 0;
    for (const Word& word : words) put(word.at, word_of(word.kind, tag));
    const bool is_complete = wait();
    for (const Word& word : words) {
        for (const u32 bit : kBits[word.kind]) {
            put(word.at, word_of(word.kind, tag ^ 1u << bit));
            ++asked, ended_well += wait();
        }
        put(word.at, word_of(word.kind, tag));
    }
    if (laneid() == 0) printf("%s %d %u %u\n", name, is_complete, asked, ended_well);
}

struct Counted {  // what a wait for a count has been asked
    bool is_complete = true;
    u32 asked = 0, ended_well = 0;
    void print(const char* name) const {
        if (laneid() == 0) printf("%s %d %u %u\n", name, is_complete, asked, ended_well);
    }
    void less(bool ends_well) { ++asked, ended_well += ends_well; }
    void enough(bool ends_well) { is_complete &= ends_well; }
};
// Blocks of logits as the finaliser hands them to the sampler, in a launch whose first two tokens have none; and the products before them.
void ask_about_blocks(const OwnRows& rows, float* logits) {
    const Role& role = rows.role;
    Counted blocks, products;
    u32 num_products = 0;
    const auto count_product = [&] {
        __syncwarp();
        role.shared->num_finalized = ++num_products;
        __syncwarp();
    };
    for (u32 step = 0; step < 5; ++step) {
        for (u32 product = 0; product < kNumProducts; ++product) {
            if (has_head(role, step)) products.less(rows.wait_for_products(step, product + 1));
            count_product();
            if (has_head(role, step)) products.enough(rows.wait_for_products(step, product + 1));
        }
        if (has_head(role, step)) {
            for (u32 block = 0; block < HeadOp::kBlocks; ++block) {
                blocks.less(rows.wait_for_block(step, block));
                hand_logits(role, block, first_vocab_row(role.cta) + block * HeadOp::kRows + laneid(), 1.0f, logits);
                __syncwarp();
                if (block == kCountedBlocks && laneid() == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
                __syncwarp();
                blocks.enough(rows.wait_for_block(step, block));
            }
            num_products += kHeadProducts;
        } else {
            if (laneid() == 0) mbar_arrive(role.base + KOG_OFFSET(pass_ended));
            __syncwarp();
        }
    }
    blocks.print("blocks"), products.print("products");
}
void ask_counters(const Role& role) {
    Counted counts, parities;
    const u32 counter = role.base + KOG_OFFSET(num_handed), bar = role.base + KOG_OFFSET(pass_full);
    for (const u32 wanted : {1u, 2u, 1000u, 0u, 0x80000000u}) {  // counters go round
        for (const u32 by : {0u, 1u, 1000u}) {
            store_shared(counter, wanted + by);
            counts.enough(counter_wait<1>(role.stopped(), counter, wanted));
            store_shared(counter, wanted - by - 1);
            counts.less(counter_wait<1>(role.stopped(), counter, wanted));
        }
    }
    for (u32 phase = 0; phase < 3; ++phase) {
        parities.less(mbar_wait(role.stopped(), bar, phase & 1));
        __syncwarp();
        if (laneid() == 0) mbar_arrive(bar);
        __syncwarp();
        parities.enough(mbar_wait(role.stopped(), bar, phase & 1));
    }
    store_shared(counter, 0u);
    counts.print("counter"), parities.print("barrier");
}

// The last logit comes while its wait looks for what to note for the watchdog: there is nothing to be noted any more.
void ask_about_a_late_logit(const KogDecodeParams& params, const KogPeers& peers) {
    constexpr u64 kBefore = 2 * 1022 + 1;  // two operations a round; it notes in the 1024th, and has looked in vain in the 1023rd
    twin::start(1, 64, sizeof(Shared), [=] {
        Shared& shared = *reinterpret_cast<Shared*>(twin::current->block->memory);
        const u32 tag = 0x1234;
        const Role role{&shared, shared_address(&shared), 1, 3, 2, nullptr};
        const FinalizedRows rows{params, peers, role, laneid()};
        u64* const words = logit_words(rows) + role.cta % kReplicas * kRouterLogitsStride;
        if (threadIdx.x == 0) {
            shared.note.stopped = 0, shared.note.phase = 0, shared.note.lane = 0;
            for (u32 i = 0; i < kNumExperts; ++i) words[i] = word_of(kPair, i == 0 ? tag ^ 1 : tag);
        }
        __syncwarp();
        if (threadIdx.x >= 32) {
            while (!__any_sync(kFullWarp, twin::fibers[0].num_operations > kBefore)) {}
            return put(words, word_of(kPair, tag));
        }
        float found[kLogits];
        const bool is_complete = collect_logits(rows, 0, 0, tag, found);
        if (threadIdx.x == 0) printf("late logit %d 1 %d\n", is_complete, shared.note.phase != 0);
    });
}

int main(int, char** argv) {
    twin::arena = static_cast<char*>(aligned_alloc(128, sizeof(Shared) + 512));
    std::vector<ulonglong2> local(atoll(argv[1]) / 2 + 8192), heap(atoll(argv[2]) / 2 + 64);
    std::vector<float> logits(kVocabRows);
    u64* const words = reinterpret_cast<u64*>(local.data());
    KogDecodeParams params{};
    params.words_ptr = reinterpret_cast<uintptr_t>(words);
    KogProcessorParams processors{};
    processors.raw_ptr = reinterpret_cast<uintptr_t>(logits.data());
    processors.mask_ptr = params.words_ptr, processors.mask_epoch = 0x1233;
    KogPeers peers{};
    peers.num_ranks = kRanks, peers.rank = 0;
    for (u32 i = 0; i < kRanks; ++i) peers.heap_ptr[i] = reinterpret_cast<uintptr_t>(heap.data());
    twin::start(1, 32, sizeof(Shared), [&] {
        Shared& shared = *reinterpret_cast<Shared*>(twin::current->block->memory);
        const u32 lane = laneid(), tag = 0x1234;
        const Role role{&shared, shared_address(&shared), 1, 3, 2, nullptr};
        if (lane == 0) {
            shared.note.stopped = 1, shared.num_finalized = 1000, shared.num_handed = 0;
            mbar_init(role.base + KOG_OFFSET(pass_full), 1), mbar_init(role.base + KOG_OFFSET(pass_ended), 1);
        }
        __syncwarp();
        ask_counters(role);

        // ---- the matrix warps' vectors: each warp waits for its own part ----
        Gatherer gatherer{params, peers, role, 0, lane};
        const auto of_all_warps = [&](auto wait) {
            bool all = true;
            for (gatherer.warp = 0; gatherer.warp < kMatrixWarps; ++gatherer.warp) all &= wait();
            return all;
        };
        const auto no_note = [](auto...) {};
        const auto ask_vector = [&]<class S>(const char* name, S) {
            std::vector<Word> vector;
            add(vector, words, S::kColumns / 2);
            const Source from{words, tag};
            ask(name, vector, tag, [&] {
                return of_all_warps([&] {
                    gatherer.load_units<S>(words);
                    return gatherer.wait_for_units<S>(from, no_note);
                });
            });
        };
        ask_vector("hidden", HiddenSlice{});
        ask_vector("attended", AttendedSlice{});
        std::vector<Word> sums;
        for (u32 rank = 0; rank < kRanks; ++rank)
            add(sums, heap_of(peers, 0) + sum_box(1).row(kRanks, 0, rank) + role.cta % kSumCopies * (kHidden / 2), kHidden / 2);
        ask("sums", sums, tag, [&] { return of_all_warps([&] { return gatherer.gather_sums(1, tag, no_note); }); });

        std::vector<Word> streams;
        for (u32 k = 0; k < kTogether; ++k) add(streams, last_stream(gatherer, k), kHidden / 2);
        ask("streams", streams, tag, [&] {
            return of_all_warps([&] {
                LastStreams found;
                return wait_for_streams(gatherer, 0, tag, found);
            });
        });

        // ---- sums of peers ----
        std::vector<Word> of_peers;
        for (const u32 rank : {0, 2, 3}) add(of_peers, words + 32 * rank, 28, kValue);
        ask("peers", of_peers, tag, [&] {
            PeerWords<4> found;
            if (lane < 28) found.load(words + lane, 32, 1);
            return wait_for_peers<4>(found, words, 32, 1, 28, tag, role.stopped(), shared.peer_notes[0], {kCollectOp, 0, 0});
        });

        // ---- experts ----
        const Place down(3);
        std::vector<Word> activations, router_logits;
        const auto from = gatherer.source<kDownPhase>(down);
        add(activations, from.words, kChosen * kFfn / 2);
        ask("activations", activations, from.tag, [&] {
            return of_all_warps([&] {
                load_activations<false>(gatherer, down), gatherer.loaded = true;
                return gather_activations(gatherer, down);
            });
        });
        const FinalizedRows rows{params, peers, role, lane};
        add(router_logits, logit_words(rows) + role.cta % kReplicas * kRouterLogitsStride, kNumExperts);
        ask("router", router_logits, tag, [&] {
            float found[kLogits];
            return collect_logits(rows, 0, 0, tag, found);
        });

        // ---- attention ----
        const AttendWarp attend_warp{params, role, 0, lane};
        std::vector<Word> part, query;
        add(part, words, 64), add(part, words + 64, 32, kValue);
        ask("part", part, tag, [&] {
            SplitPart got[1];
            return wait_for_parts(attend_warp, words + 2 * lane, words + 64 + lane, 1, tag, got);
        });
        // Of two splits: their values lie `apart`, their log-sums next to each other for so many threads as share a unit.
        constexpr u32 threads = kMixThreads, apart = threads * kHeadUnits * 2, log_sums = apart + 64;
        static_assert(apart >= 64, "the values of both splits");
        std::vector<Word> parts;
        add(parts, words, 64), add(parts, words + apart, 64), add(parts, words + log_sums, 64, kValue);
        ask("parts", parts, tag, [&] {
            SplitPart got[2];
            const u64* of_lane = words + log_sums + lane / threads * 2 * threads + lane % threads;
            return wait_for_parts(attend_warp, words + 2 * lane, of_lane, 2, tag, got);
        });
        add(query, words, kGroup * kHeadDim / 2);
        for (const u32 first_row : {kQueryRows, kQueryRows + kKvRows}) add(query, words + first_row / 2, kHeadDim / 2);  // of K and V
        ask("query", query, tag, [&] {
            Query got[1][kWarpSets];
            const u32 positions[1] = {0};
            return wait_for_query(attend_warp, words, words, 0, 0, 0, positions, 0, true, tag, got);
        });

        // ---- choosing a token ----
        const OwnRows own_rows{params, peers, processors, role};
        if (lane == 0) shared.num_finalized = 0;
        ask_about_blocks(own_rows, logits.data());
        std::vector<Word> mask;
        const u32 first_mask = own_rows.first_row() / 32, last_mask = (own_rows.first_row() + own_rows.num_rows() - 1) / 32;
        add(mask, words + first_mask, last_mask - first_mask + 1, kValue);
        ask("mask", mask, tag, [&] {
            u32 flags = 0;
            return own_rows.fetch_mask(4, 0, flags);
        });
        for (const u32 half : {0, 1}) {
            std::vector<Word> quads;
            for (u32 rank = 0; rank < kRanks; ++rank) add(quads, own_rows.quads().pairs(role.cta, tag, rank, half), 2 * kNumCtas, kQuad);
            ask(half ? "second pairs" : "first pairs", quads, tag, [&] {
                return own_rows.quads().collect(role.cta, tag, half, role.stopped(), shared.peer_notes[1], no_note);
            });
        }
        std::vector<Word> largest, pairs, pair;
        for (u32 rank = 0; rank < kRanks; ++rank) add(largest, own_rows.quads().aside(0, tag & 1, rank, 0), kNumCtas, kValue);
        ask("largest logits", largest, tag, [&] {
            LargestLogits found;
            return found.load(own_rows, tag);
        });
        add(pairs, words, 2 * kNumCtas, kValue);
        ask("report", pairs, tag, [&] {
            ulonglong2 found[kCtasOfThread];
            return wait_for_pairs(role.stopped(), words + 2 * lane, 2, tag, found);
        });
        add(pair, words, 64, kValue);
        const Reporter reporter{own_rows, processors, role};
        ask("list", pair, tag, [&] {
            ulonglong2 found;
            return reporter.wait_pair(words + 2 * lane, true, tag, found);
        });
        std::vector<Word> candidates;
        const u32 copy = role.cta % kReplicas;
        for (u32 rank = 0; rank < kRanks; ++rank)
            add(candidates, heap_of(peers, 0) + candidate_box().row(kRanks, tag & 1, rank) + copy * kCandidateCopyWords, 2 * kNumCtas, kValue);
        ask("candidates", candidates, tag, [&] {
            Candidate best;
            return collect_best(params, peers, role, tag, 0, best);
        });
    });
    if (!twin::run(100000000)) return 4;
    ask_about_a_late_logit(params, peers);
    if (!twin::run(100000000)) return 4;
}
