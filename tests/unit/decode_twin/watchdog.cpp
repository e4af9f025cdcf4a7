// watchdog LIMIT_US: the watchdog of one thread block whose matrix warps stand still, called every 5 us; first they miss a word, then none.
// Prints for each:  after how many us it left, whether it has raised the abort mirror and stopped the thread block, and the missing words.
#include "ptx.cuh"

#include "peer_wait.cuh"

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
    // A wait for peers, number 6 and then number 5, whose record is written while the note is of number 5.
    const u64 row[] = {make_value_word(1, 9), make_value_word(1, 8)};
    for (const u32 number : {6, 5}) {
        KogWaitRecord record{};
        PeerNote note{};
        begin_note(note, 5, {kCollectOp, 0, 0}, 9, row, number == 6 ? ~0u : 2, 1, kNoRow, 0);
        write_peer_record(note, number, 0, 1, &record);
        printf("%u %llu\n", record.num_missing, record.epoch_wanted);
    }
    // Rank 0 waits for ranks 1, whose words are there, 2, whose second one is late, and 3.
    const u64 rows[] = {0, 0, make_value_word(1, 9), make_value_word(1, 9), make_value_word(1, 9), make_value_word(1, 8), 0, 0};
    KogWaitRecord record{};
    PeerNote note{};
    begin_note(note, 5, {kCollectOp, 0, 0}, 9, rows, 2, 4, 0, 2);
    write_peer_record(note, 5, 0, 1, &record);
    printf("%u %u %llu\n", record.peer, record.num_missing, record.epoch_seen);
}
