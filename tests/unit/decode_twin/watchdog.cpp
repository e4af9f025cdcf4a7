// watchdog LIMIT_US: the watchdog of one thread block whose matrix warps stand still, called every 5 us; first they miss a word, then none.
// Prints for each, after how many us it left, whether it has raised the abort mirror and stopped the thread block, and the missing words.
#include "ptx.cuh"

#include "wait.cuh"

using namespace kog;

int main(int, char** argv) {
    const u64 limit_us = atoll(argv[1]);
    twin::Fiber thread;
    twin::current = &thread;
    for (const u32 tag : {6, 7}) {
        const u64 words[] = {make_pair_word(1, 2, 7), make_pair_word(3, 4, tag)};
        u32 mirror = 0;
        KogWaitRecord record{};
        WaitNote note{};
        note.phase = 10, note.wanted = 7, note.set_words(words, 2);
        Watchdog watchdog{note, &mirror, &record, limit_us * 1000};
        const u64 from = ++twin::turns;
        const auto passed_us = [&] { return (twin::turns - from) / 100; };
        while (passed_us() < 4 * limit_us && watchdog.look()) twin::turns += 500;
        printf("%llu %u %u %u\n", passed_us(), mirror, note.stopped, record.num_missing);
    }
}
