// Who stored which word, and who found which word when he looked: a log of all accesses to memories that are watched, each kind of access once.
#pragma once
#include "files.h"

namespace twin {
struct Access {
    u32 memory, offset, cta, rank, is_store, tag;  // the tag as pair words have it, and of others their upper half
    u32 upper, pad = 0;
    auto key() const { return std::tie(memory, offset, cta, rank, is_store, tag, upper); }
    bool operator<(const Access& other) const { return key() < other.key(); }
    bool operator==(const Access& other) const { return key() == other.key(); }
};
struct Watched {
    const u64 *begin, *end;
};
inline std::vector<Watched> watched;  // the number of one is `Access::memory`
inline std::set<Access> accesses;
inline std::vector<Access> newest(1 << 15, Access{~0u});  // of places that share one here: who looks again and again finds the same
inline std::map<const Block*, u32> rank_of_block;  // of those whose accesses are noted

inline void log_word(const u64* at, u64 word, bool is_store) {
    const auto rank = rank_of_block.find(current->block);
    if (rank == rank_of_block.end()) return;
    for (u32 i = 0; i < watched.size(); ++i)
        if (watched[i].begin <= at && at < watched[i].end) {
            const u32 tag = word & 0xff | word >> 32 << 8 & 0xff00;
            const Access access{i, static_cast<u32>(at - watched[i].begin), current->block_idx.x, rank->second, is_store, tag,
                                static_cast<u32>(word >> 32)};
            Access& before = newest[(access.offset * 5 + access.cta) % newest.size()];
            if (before == access) return;
            before = access, accesses.insert(access);
        }
}
inline void watch(const Memory& memory) {
    watched.push_back({reinterpret_cast<const u64*>(memory.at), reinterpret_cast<const u64*>(memory.at + memory.size())});
    on_word = log_word;
}
inline void write_accesses() {
    Memory all(sizeof(Access) * accesses.size());
    size_t i = 0;
    for (const Access& access : accesses) reinterpret_cast<Access*>(all.at)[i++] = access;
    write("accesses", all);
}
}  // namespace twin
