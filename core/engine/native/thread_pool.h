// Work of kernels on several threads: `parallel` and `parallel_for`.
//
// A job is a number of units, which threads take in pieces as they come: the calling thread and the workers of its pool
// (thread_pool.cpp). Large pieces at first, small ones at the end, so that all end together. The caller waits for pieces
// that a worker has taken, never for a worker that has taken none: it could compute everything alone, and what a worker
// costs that is kept from its core is one piece. Who computes a unit differs from run to run: a unit must have the same
// result whoever computes it.
#pragma once

#include <algorithm>
#include <cstdint>

struct Team;

// Elements that are computed or multiplied. To share a job costs about a microsecond: with less to do one thread is
// faster.
constexpr int64_t LEAST_WORK = 1 << 15;
constexpr int UNIT_BITS = 28;
constexpr int64_t MOST_UNITS = (int64_t{1} << UNIT_BITS) - 1;  // of a job

// What a thread computes of a job: `while (pieces.take())` units first .. last - 1.
class Pieces {
public:
    int64_t first = 0, last = 0;

    // All units, one piece after another, for the thread that calls.
    Pieces(int64_t units, int64_t most) : most_(most), units_(units) {}
    // Of a team's job. Whoever computes it has taken the first piece already.
    explicit Pieces(Team& team) : team_(&team) {}

    bool take();

private:
    friend struct Team;

    int64_t most_ = 0, units_ = 0;
    Team* team_ = nullptr;
    bool is_new_ = true;
    int64_t taken_ = 0, computed_ = 0;  // pieces; units, but for those of the piece in hand
};

// Functions of thread_pool.cpp.
struct ThreadPool {
    // Of the calling thread: as many as torch has there. 1 within a job.
    int64_t (*threads)();
    // body(context, pieces) on each thread that gets a piece, of `most` units at most. Returns when all are computed.
    void (*run)(int64_t units, int64_t most, int64_t work, void (*body)(const void*, Pieces&), const void* context);
    bool (*take)(Pieces&);
};

// One pool serves all libraries of a process: whoever loads one sets this.
extern "C" {
__attribute__((weak)) const ThreadPool* thread_pool = nullptr;
}

inline bool Pieces::take() {
    if (team_ != nullptr) return thread_pool->take(*this);
    first = last;
    last = std::min(units_, first + most_);
    return first < last;
}

// body(pieces), once on each thread that has taken a piece of at most `most` units. `work`: of all units, see LEAST_WORK;
// jobs of the same body and work take about as long.
template <typename Body>
void parallel(int64_t units, int64_t most, int64_t work, const Body& body) {
    if (work < LEAST_WORK || units < 2 || units > MOST_UNITS || thread_pool->threads() == 1) {
        Pieces pieces(units, most);
        body(pieces);
        return;
    }
    const auto call = [](const void* body, Pieces& pieces) { (*static_cast<const Body*>(body))(pieces); };
    thread_pool->run(units, most, work, call, &body);
}

// body(unit), of which a thread takes at most `most` at a time: 1 where some take much longer than others.
template <typename Body>
void parallel_for(int64_t units, int64_t work, const Body& body, int64_t most = int64_t{1} << 62) {
    parallel(units, std::min(units, most), work, [&](Pieces& pieces) {
        while (pieces.take())
            for (int64_t unit = pieces.first; unit < pieces.last; unit++) body(unit);
    });
}
