// Threads that compute jobs of kernels: see thread_pool.h. Each thread that calls kernels has a team of its own.
//
// The units that are left of a job and the job's number are one word. Taking units is one exchange of it, which fails
// for a worker that comes too late: what it has read of a job is only used if the job was still unfinished then.

#include "thread_pool.h"

#include <omp.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>

namespace {

using Body = void (*)(const void*, Pieces&);

constexpr int PIECES = 2;            // of the units left, a piece is one part in so many per thread
constexpr int WOKEN = 2;             // sleepers that a thread wakes: they wake the others
constexpr int LOOKS = 16;            // between two looks at the clock
constexpr uint32_t SLEEPS = 1u << 31;  // in `computed`: the owner is to be woken

// Awake a thread sees a new job, or the end of one, within some hundred nanoseconds; to be woken takes some ten
// microseconds, and a multiple on a virtual machine. It stays awake as long as that takes.
constexpr int64_t AWAKE_NS = 50'000;

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `is_over()` within AWAKE_NS from `since` on.
template <typename IsOver>
bool comes_soon(int64_t since, IsOver is_over) {
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (is_over()) return true;
            relax();
        }
    } while (now_ns() - since < AWAKE_NS);
    return false;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

std::atomic<uint32_t> forks{0};  // of this process's ancestors: a child has none of its parent's threads

thread_local bool computes = false;  // within a job

struct Worker {
    Team* team;
    int64_t index;
    pthread_t thread;
    alignas(64) std::atomic<uint32_t> asleep{0};
};

}  // namespace

struct Team {
    // A job, by units: its number, and how many are left. Zero left: there is none.
    alignas(64) std::atomic<uint64_t> left{0};
    // What else a job is; it changes only while none is left and all that were taken are computed.
    std::atomic<int64_t> units{0}, most{0}, threads{1};
    std::atomic<Body> body{nullptr};
    std::atomic<const void*> context{nullptr};
    alignas(64) std::atomic<uint32_t> computed{0};  // units, by workers
    alignas(64) std::atomic<bool> ends{false};
    std::unique_ptr<Worker[]> workers;
    int64_t num_workers = 0, wanted_workers = 0;
    uint32_t born = forks.load();

    ~Team() { end(); }

    void run(int64_t count, int64_t largest, Body job, const void* with, int64_t num_threads) {
        if (num_threads - 1 > wanted_workers || born != forks.load(std::memory_order_relaxed)) start(num_threads - 1);
        units.store(count, std::memory_order_relaxed);
        most.store(largest, std::memory_order_relaxed);
        threads.store(num_threads, std::memory_order_relaxed);
        body.store(job, std::memory_order_relaxed);
        context.store(with, std::memory_order_relaxed);
        computed.store(0, std::memory_order_relaxed);
        const uint64_t number = (left.load(std::memory_order_relaxed) >> UNIT_BITS) + 1;
        left.store(number << UNIT_BITS | count);  // in one order with `asleep`: a worker sees this, or this sees it asleep
        wake_some();
        wait_for(count - compute());
    }

    // Take a piece. Sets `first` and `last`.
    bool take(int64_t& first, int64_t& last) {
        uint64_t seen = left.load(std::memory_order_acquire);
        for (;;) {
            const int64_t there = seen & MOST_UNITS;
            if (there == 0) return false;
            const int64_t parts = PIECES * threads.load(std::memory_order_relaxed);
            const int64_t largest = most.load(std::memory_order_relaxed), all = units.load(std::memory_order_relaxed);
            const int64_t count = std::clamp<int64_t>(there / parts, 1, std::max<int64_t>(1, largest));
            if (left.compare_exchange_weak(seen, seen - count, std::memory_order_acq_rel, std::memory_order_acquire)) {
                first = all - there, last = first + count;
                return true;
            }
        }
    }

    // As much as this thread gets; returns how many units.
    int64_t compute() {
        int64_t first, last;
        if (!take(first, last)) return 0;
        Pieces pieces(*this, first, last);
        computes = true;
        body.load(std::memory_order_relaxed)(context.load(std::memory_order_relaxed), pieces);
        computes = false;
        return pieces.computed_;
    }

    static bool take_next(Pieces& pieces) {
        if (pieces.has_taken_) {
            pieces.has_taken_ = false;
            return true;
        }
        pieces.computed_ += pieces.last - pieces.first;
        pieces.first = pieces.last;
        return pieces.team_->take(pieces.first, pieces.last);
    }

    bool has_work(int64_t index) const {
        return (left.load(std::memory_order_relaxed) & MOST_UNITS) != 0 &&
               index + 1 < threads.load(std::memory_order_relaxed);
    }

    void wake_some() {
        const int64_t count = std::min(num_workers, threads.load(std::memory_order_relaxed) - 1);
        for (int64_t i = 0, woken = 0; i < count && woken < WOKEN; i++)
            if (workers[i].asleep.load() != 0 && workers[i].asleep.exchange(0) != 0) {
                wake(workers[i].asleep);
                woken++;
            }
    }

    // Until workers have computed so many units.
    void wait_for(uint32_t count) {
        const auto is_over = [&] { return computed.load(std::memory_order_acquire) == count; };
        if (is_over()) return;
        const int64_t since = now_ns();
        if (comes_soon(since, is_over)) return;
        for (;;) {
            const uint32_t seen = computed.fetch_or(SLEEPS) | SLEEPS;
            if ((seen & ~SLEEPS) == count) return;
            sleep_on(computed, seen);
        }
    }

    void work(Worker& self) {
        const auto is_needed = [&] { return has_work(self.index) || ends.load(std::memory_order_relaxed); };
        while (!ends.load(std::memory_order_relaxed)) {
            if (const int64_t count = has_work(self.index) ? compute() : 0; count > 0) {
                if (computed.fetch_add(count, std::memory_order_acq_rel) & SLEEPS) wake(computed);
            }
            if (comes_soon(now_ns(), is_needed)) continue;
            self.asleep.store(1);
            if (is_needed()) self.asleep.store(0);
            while (self.asleep.load() != 0) sleep_on(self.asleep, 1);
            if (has_work(self.index)) wake_some();
        }
    }

    static void* enter(void* worker) {
        Worker& self = *static_cast<Worker*>(worker);
        self.team->work(self);
        return nullptr;
    }

    // Fewer than wanted where the system gives no more threads: the others compute what those would have.
    void start(int64_t count) {
        end();
        wanted_workers = count;
        born = forks.load();
        ends.store(false);
        workers.reset(new Worker[count]);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that were there
        for (; num_workers < count; num_workers++) {
            Worker& worker = workers[num_workers];
            worker.team = this, worker.index = num_workers;
            if (pthread_create(&worker.thread, nullptr, enter, &worker) != 0) break;
            char name[16];
            snprintf(name, sizeof name, "kernels-%d", static_cast<int>(num_workers + 1) % 1000);
            pthread_setname_np(worker.thread, name);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void end() {
        if (born != forks.load()) {  // they run in the parent process
            workers.release();
            num_workers = 0;
        }
        ends.store(true);
        for (int64_t i = 0; i < num_workers; i++) {
            if (workers[i].asleep.exchange(0) != 0) wake(workers[i].asleep);
        }
        for (int64_t i = 0; i < num_workers; i++) pthread_join(workers[i].thread, nullptr);
        num_workers = 0;
        workers.reset();
    }
};

namespace {

Team& own_team() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    thread_local Team team;
    return team;
}

int64_t num_threads() { return computes ? 1 : omp_get_max_threads(); }

void run(int64_t units, int64_t most, Body body, const void* context) {
    own_team().run(units, most, body, context, num_threads());
}

bool take(Pieces& pieces) { return Team::take_next(pieces); }

}  // namespace

extern "C" const ThreadPool functions{num_threads, run, take};
