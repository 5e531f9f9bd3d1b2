// The memory that the ranks share: who is there, what each one shows to its groups, and messages between two of them.
//
// It lies in a file without a name, of which only pages that were written take memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t MAGIC = 0x31306d6873676e65;
constexpr int64_t LINE = 64;  // bytes that processors hand to each other at once
constexpr int MOST_RANKS = 64, MOST_GROUPS = 16, MOST_CPUS = 1024;
constexpr int64_t PIECE = 512 << 10;     // bytes of a tensor that a rank shows at once
constexpr uint32_t RING_LINES = 8192;    // of messages on their way from one rank to another: 512 KiB
constexpr uint32_t FIRST = 0u - 1000;    // where rounds and lines are counted from: every longer run goes through 0
constexpr int WHY = 640, NAME = 40;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// A number that one rank raises and others wait for. It wraps around.
struct Word {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;  // who may have to be woken

    // At least `target`, and so is everything that was written before.
    bool reached(uint32_t target) const {
        return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
    }
};

// What one rank shows to the others of one group. In round n it has written data[n % 2] before `rounds` becomes n.
// Others read it until they enter round n + 1, which it waits for before it writes data[n % 2] again, in round n + 2.
struct Lane {
    alignas(LINE) Word rounds;
    uint64_t calls[2];  // what the round belongs to
    alignas(LINE) char data[2][PIECE];
};

// Messages from one rank to another, each a line that says how long it is and as many lines as it needs.
struct Ring {
    alignas(LINE) Word written;  // lines
    alignas(LINE) Word read;
    alignas(LINE) char lines[RING_LINES][LINE];
};

enum State : uint32_t { EXPECTED = 0, HERE = 1, CLOSED = 2 };

struct Rank {
    alignas(LINE) std::atomic<uint64_t> begun;  // calls
    alignas(LINE) std::atomic<uint32_t> state;
    int32_t pid;
    uint64_t born;  // when its process was started, in ticks of the kernel: pids are used again
    int32_t num_groups;
    uint64_t groups[MOST_GROUPS];  // keys, in the order of its lanes
    uint64_t cpus[MOST_CPUS / 64];  // on which its process may run
};

struct Header {
    uint64_t magic;
    unsigned char token[16];
    int64_t size;
    alignas(LINE) Word come;  // how many ranks
    alignas(LINE) std::atomic<uint32_t> failed;  // 1 + the rank that failed first
    std::atomic<uint32_t> told;                  // what follows was written
    uint64_t missing;                            // ranks, as bits
    char why[WHY];
    Rank ranks[MOST_RANKS];
};

constexpr int64_t lanes_at() { return (sizeof(Header) + LINE - 1) / LINE * LINE; }

constexpr int64_t segment_bytes(int64_t size) {
    return lanes_at() + size * MOST_GROUPS * static_cast<int64_t>(sizeof(Lane)) +
           size * size * static_cast<int64_t>(sizeof(Ring));
}

inline Lane* lane(Header* header, int64_t rank, int64_t group) {
    char* lanes = reinterpret_cast<char*>(header) + lanes_at();
    return reinterpret_cast<Lane*>(lanes) + rank * MOST_GROUPS + group;
}

inline Ring* ring(Header* header, int64_t source, int64_t to) {
    return reinterpret_cast<Ring*>(lane(header, header->size, 0)) + source * header->size + to;
}

}  // namespace
