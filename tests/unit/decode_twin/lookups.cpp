// lookups FOLDER: what the sampling warp drafts for answers that are known. FOLDER holds cases.bin (uint32): of each case PASS_TOKENS, extra, edge, tokens of
// the prompt that passes read, tokens of the prediction, of the prompt and of the answer, initial per_pass, place, start and tokens of the draft, balance and
// idle passes; and these
// tokens with a gap behind the prediction. It gets passes.bin (uint32): tokens of each pass, how many were drafted, how many right, whether predicted.
#include "drafts.cuh"
#include "files.h"

using namespace kog;

struct Case {
    u32 pass_tokens, extra, edge, num_left, num_predicted, num_prompt, num_answer, per_pass, place, start, num, balance, num_idle;
};

// As in sample_drafts.cuh, with the answer in place of what is chosen.
void look_up(const Case& given, u32* tokens, const u32* answer, std::vector<u32>& passes) {
    Shared& shared = *reinterpret_cast<Shared*>(twin::current->block->memory);
    const KogDraftParams params{reinterpret_cast<uintptr_t>(tokens), given.num_predicted, given.pass_tokens, given.extra, given.edge};
    KogDecodeState state{};
    state.pass_tokens = given.per_pass, state.draft_place = given.place, state.draft_start = given.start, state.draft_tokens = given.num;
    state.draft_balance = given.balance, state.draft_idle = given.num_idle;
    const Role role{&shared, 0, 0, given.num_prompt, 0, nullptr};
    Drafter drafter{params, role, state};
    u32 lead = given.per_pass > 1 ? (given.num_left - 1) % given.per_pass : 0;
    for (u32 num = 0; num < given.num_answer;) {
        const u32 per_pass = drafter.per_pass, last = drafter.index_of(given.num_prompt - 1 + num);
        const u32 num_drafted = min(min(drafter.num, per_pass - 1 - lead), given.num_answer - min(given.num_answer, num + 1));
        u32 drafts[kTokens] = {};
        for (u32 i = 0; i < num_drafted; ++i) drafts[i] = drafter.token(i, last);
        drafter.prepare(last, per_pass - lead, drafts);
        u32 num_new = 0, token;
        do {
            token = answer[num++], ++num_new;
            drafter.push(last + num_new, token);
        } while (num_new <= num_drafted && num < given.num_answer && token == drafts[num_new - 1]);
        if (laneid() == 0) passes.insert(passes.end(), {per_pass, num_drafted, num_new - 1, u32{num_drafted > 0 && drafter.is_predicted(drafter.start)}});
        drafter.took(num_new, num_new - 1, last + num_new, token);
        lead = 0;
    }
}

int main(int, char** argv) {
    folder = argv[1];
    const Memory cases = read("cases");
    twin::arena = static_cast<char*>(aligned_alloc(128, sizeof(Shared) + 256));
    std::vector<u32> passes;
    const u32 *at = reinterpret_cast<const u32*>(cases.at), *end = at + cases.size() / 4;
    while (at < end) {
        const Case& given = *reinterpret_cast<const Case*>(at);
        const u32 *tokens = at + sizeof(Case) / 4, *answer = tokens + given.num_predicted + 1 + given.num_prompt;
        std::vector<u32> known(tokens, answer);
        known.resize(known.size() + given.num_answer + kTokens);
        twin::start(1, 32, sizeof(Shared), [&] { look_up(given, known.data(), answer, passes); });
        if (!twin::run(100000000)) return 4;
        at = answer + given.num_answer;
    }
    Memory found(4 * passes.size());
    memcpy(found.at, passes.data(), found.size());
    write("passes", found);
}
