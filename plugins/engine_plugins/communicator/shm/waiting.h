// Waiting for other ranks: awake for a while, then asleep; never beyond the deadline, nor for those that have ended.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "segment.h"

namespace {

constexpr int64_t AWAKE_NS = 100'000;     // as long as a sleeper takes to be woken, some times over
constexpr int64_t SLEEP_NS = 20'000'000;  // how often a sleeper looks whether the others are still there

struct Group {
    char name[NAME];
    uint64_t key;
    int count, index;  // this rank is the index-th of count
    int ranks[MOST_RANKS];
    Lane* lanes[MOST_RANKS];
    uint32_t round;
};

// One rank's side.
struct Communicator {
    std::atomic<int32_t> failed;  // first: Python reads it
    int32_t rank;
    int64_t timeout_ns;
    Header* header;  // null once closed
    bool yields;     // there are fewer processors than ranks: who waits awake keeps others from coming
    int num_groups;
    Group groups[MOST_GROUPS];
    uint32_t sent[MOST_RANKS], received[MOST_RANKS];  // lines of rings
    char why[WHY + 100];
    uint64_t missing;
    // Of the call in hand.
    const char* call;
    const Group* group;  // null: of a message
    int peer;            // of a message
    int64_t deadline;
};

struct Text {
    char text[NAME + 100];
};

// `rank 0 entered all_reduce of group tp (call 5)`
Text entered(const Communicator& self) {
    Text result;
    const unsigned long long number = self.header->ranks[self.rank].begun.load();
    if (self.group != nullptr)
        snprintf(result.text, sizeof result.text, "rank %d entered %s of group %s (call %llu)", self.rank, self.call,
                 self.group->name, number);
    else
        snprintf(result.text, sizeof result.text, "rank %d entered %s rank %d (call %llu)", self.rank, self.call,
                 self.peer, number);
    return result;
}

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_on(Word& word, uint32_t seen, int64_t ns) {
    const timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
    word.sleepers.fetch_add(1);
    syscall(SYS_futex, &word.value, FUTEX_WAIT, seen, &time, nullptr, 0);
    word.sleepers.fetch_sub(1);
}

void wake(Word& word) { syscall(SYS_futex, &word.value, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

// Raise a word of this rank. What was written before is seen by whoever sees the new number.
void raise_to(Word& word, uint32_t value) {
    word.value.store(value);  // in one order with the sleepers' number: either they see this, or this sees them
    if (word.sleepers.load() != 0) wake(word);
}

// State of a process (`T`: stopped) and when it was started; 0 where there is none.
char process_state(int pid, uint64_t* born) {
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    const char* at = strrchr(text, ')');  // a name may hold anything
    if (at == nullptr) return 0;
    const char state = at[2];
    at += 2;
    for (int field = 3; field < 22 && at != nullptr; field++) at = strchr(at + 1, ' ');
    *born = at == nullptr ? 0 : strtoull(at + 1, nullptr, 10);
    return state;
}

bool has_ended(const Rank& rank, char* state) {
    uint64_t born = 0;
    *state = process_state(rank.pid, &born);
    return *state == 0 || *state == 'Z' || *state == 'X' || born != rank.born;
}

// The first failure of this rank is the one it reports; the first of all ranks is told to all.
__attribute__((format(printf, 3, 4))) bool fail(Communicator& self, uint64_t missing, const char* format, ...) {
    if (self.failed.load() != 0) return false;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(self.why, sizeof self.why, format, arguments);
    va_end(arguments);
    self.missing = missing;
    Header* header = self.header;
    uint32_t nobody = 0;
    if (header != nullptr && header->failed.compare_exchange_strong(nobody, self.rank + 1)) {
        snprintf(header->why, WHY, "%.*s", WHY - 1, self.why);
        header->missing = missing;
        header->told.store(1);
    }
    self.failed.store(1);
    return false;
}

// Whether no rank has failed.
bool all_well(Communicator& self) {
    const uint32_t by = self.header->failed.load();
    if (by == 0) return true;
    if (by == static_cast<uint32_t>(self.rank) + 1) {  // aborted, from another thread
        for (int i = 0; i < 1000 && self.header->told.load() == 0; i++) sched_yield();
        return fail(self, self.header->missing, "%s", self.header->why);
    }
    for (int i = 0; i < 1000 && self.header->told.load() == 0; i++) sched_yield();
    return fail(self, self.header->missing, "rank %u gave up: %s", by - 1, self.header->why);
}

// Where the ranks of a set are, for a message.
void describe(const Communicator& self, uint64_t missing, char* text, int64_t room) {
    *text = 0;
    const char* between = ": ";
    for (int rank = 0; rank < self.header->size; rank++) {
        if (!(missing >> rank & 1)) continue;
        const Rank& other = self.header->ranks[rank];
        const uint64_t begun = other.begun.load();
        char state, place[80], process[60] = "";
        if (begun != 0) snprintf(place, sizeof place, "is at call %llu", static_cast<unsigned long long>(begun));
        else snprintf(place, sizeof place, "has begun no call");
        const bool ended = has_ended(other, &state), stopped = state == 'T' || state == 't';
        const char* how = ended ? "has ended" : stopped ? "is stopped" : nullptr;
        if (how != nullptr) snprintf(process, sizeof process, ", its process %d %s", other.pid, how);
        const int64_t length = strlen(text);
        snprintf(text + length, room - length, "%srank %d %s%s", between, rank, place, process);
        between = "; ";
    }
}

bool is_late(Communicator& self, uint64_t missing) {
    char seen[WHY - 200];
    describe(self, missing, seen, sizeof seen);
    return fail(self, missing, "%s and waited %g s%s", entered(self).text, self.timeout_ns * 1e-9, seen);
}

// Until a rank's word has reached `target`. `missing()`: the ranks to name if it never does.
template <typename Missing>
bool wait_for(Communicator& self, Word& word, uint32_t target, int owner, Missing missing) {
    if (word.reached(target)) return true;
    const int64_t asleep_from = now_ns() + AWAKE_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (self.yields) sched_yield();
            else relax();
            if (word.reached(target)) return true;
        }
    } while (now_ns() < asleep_from);
    for (bool looks = false;; looks = true) {
        const uint32_t seen = word.value.load();
        if (word.reached(target)) return true;
        if (!all_well(self)) return false;
        const Rank& other = self.header->ranks[owner];
        char state;
        const bool is_closed = other.state.load() == CLOSED;
        if (is_closed || (looks && has_ended(other, &state))) {
            if (word.reached(target)) return true;  // just before
            const uint64_t bit = uint64_t(1) << owner;
            const Text here = entered(self);
            if (is_closed) return fail(self, bit, "%s, and rank %d has ended", here.text, owner);
            return fail(self, bit, "%s, and rank %d has ended: its process was %d", here.text, owner, other.pid);
        }
        const int64_t left = self.deadline - now_ns();
        if (left <= 0) return is_late(self, missing());
        sleep_on(word, seen, std::min(left, SLEEP_NS));
    }
}

}  // namespace
