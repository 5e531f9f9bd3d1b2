// Threads that compute jobs of kernels: see thread_pool.h. Each thread that calls kernels has a team of its own.
//
// The units that are left of a job and the job's number are one word. Taking units is one exchange of it, which fails
// for a worker that comes too late: what it has read of a job is only used if the job was still unfinished then.

#include "thread_pool.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <utility>

namespace {

using Body = void (*)(const void*, Pieces&);

constexpr int PIECES = 2;              // of the units left, a piece is one part in so many per thread
constexpr int WOKEN = 2;               // sleepers that a thread wakes: they wake the others
constexpr int LOOKS = 16;              // between two looks at the clock
constexpr uint32_t SLEEPS = 1u << 31;  // in `computed`: the owner is to be woken

// Awake a thread sees a new job, or the end of one, within some hundred nanoseconds; to be woken takes some ten
// microseconds, and a multiple on a virtual machine. Where others want the cores it stays awake about as long as that
// takes, else from one step of a model to the next.
constexpr int64_t SOON_NS = 20'000, AWAKE_NS = 50'000, LONG_AWAKE_NS = 2'000'000;

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

// Whether `is_over()` within so many ns. After AWAKE_NS whoever else wants this core may have it.
template <typename IsOver>
bool comes_within(int64_t ns, IsOver is_over) {
    const int64_t since = now_ns();
    for (int64_t now = since; now - since <= ns; now = now_ns()) {
        for (int i = 0; i < LOOKS; i++) {
            if (is_over()) return true;
            relax();
        }
        if (now - since > AWAKE_NS) sched_yield();
    }
    return false;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// How long jobs took with so many threads.
class Times {
public:
    void add(uint64_t kind, int64_t threads, int64_t ns) {
        Entry& entry = at(kind, threads);
        if (entry.kind != kind || entry.threads != threads) entry = {kind, threads, 0, 0.0f};
        entry.count = std::min(entry.count + 1, MOST);
        entry.mean += (ns - entry.mean) * std::max(1.0f / entry.count, std::min(entry.mean / WINDOW, 1.0f / FEWEST));
    }

    // Negative: not known.
    float expected(uint64_t kind, int64_t threads) {
        const Entry& entry = at(kind, threads);
        return entry.kind == kind && entry.threads == threads ? entry.mean : -1.0f;
    }

private:
    // The mean is that of the latest jobs: of about WINDOW ns, for few of them take long while others use a core.
    static constexpr float WINDOW = 8e6f;
    static constexpr int FEWEST = 16, MOST = 1024;
    static constexpr int64_t KINDS = 64, SETTINGS = 4;

    struct Entry {
        uint64_t kind = 0;
        int64_t threads = 0;
        int count = 0;
        float mean = 0.0f;
    };

    // Neighbouring numbers of threads never share an entry.
    Entry& at(uint64_t kind, int64_t threads) { return entries_[kind % KINDS][threads % SETTINGS]; }

    Entry entries_[KINDS][SETTINGS];
};

// How many threads to use while others take cores: one more or one fewer is tried for some milliseconds, and kept where
// the same jobs take less time. Fewer are tried after time was lost: for which the owner of a team waited for a worker
// longer than a piece takes, or had no core itself. More are tried now and then.
class Share {
public:
    int64_t threads(int64_t wanted) {
        if (wanted != wanted_) {
            *this = {};
            wanted_ = uses_ = wanted;
        }
        return uses_ + step_;
    }

    int64_t uses() const { return uses_; }

    // Whether nothing was lost lately.
    bool is_undisturbed() const { return uses_ == wanted_ && step_ == 0 && lost_ < MOST_LOST / 2; }

    // After a job. Times in ns.
    void count(uint64_t kind, int64_t took, int64_t lost) {
        times_.add(kind, uses_ + step_, took);
        computed_ += took;
        if (step_ != 0) return go_on(kind, took);
        since_look_ += took;
        if (since_look_ >= LOOK) {
            since_look_ = 0;
            lost += without_core();
        }
        lost_ = std::max<int64_t>(0, lost_ + std::min(lost, MOST_LOST / 2) - took / TOLERATED);
        if (lost_ > MOST_LOST && uses_ > 1 && computed_ >= fewer_from_) begin(-1);
        else if (uses_ < wanted_ && computed_ >= more_from_) begin(1);
    }

private:
    static constexpr int64_t TOLERATED = 16;         // one part in so many of a job's time may be lost
    static constexpr int64_t MOST_LOST = 4'000'000;  // and so much at once, but not by one event: two are no accident
    static constexpr int64_t LOOK = 4'000'000, TRIAL = 20'000'000;
    static constexpr int64_t SHORTEST_REST = 100'000'000, LONG_REST = 200'000'000, LONGEST_REST = 1'600'000'000;

    void begin(int64_t step) { step_ = step, tried_ = expected_ = 0; }

    void go_on(uint64_t kind, int64_t took) {
        const float expected = times_.expected(kind, uses_);
        tried_ += took;
        if (expected >= 0.0f) expected_ += static_cast<int64_t>(expected) - took;
        if (tried_ < TRIAL && expected_ > -MOST_LOST / 2) return;
        const bool better = expected_ > 0;
        int64_t& rest = step_ < 0 ? fewer_rest_ : more_rest_;
        rest = better ? SHORTEST_REST : std::min(2 * rest, step_ < 0 ? LONG_REST : LONGEST_REST);
        if (better) uses_ += step_;
        (step_ < 0 && !better ? fewer_from_ : more_from_) = computed_ + rest;
        step_ = lost_ = 0;
        without_core();
    }

    // For how long this thread was ready to run and did not since the last call. 0 where the kernel does not say.
    int64_t without_core() {
        const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        if (file < 0) return 0;
        char text[64];
        const ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        text[std::max<ssize_t>(0, length)] = 0;
        long long ran, waited = waited_;
        sscanf(text, "%lld %lld", &ran, &waited);
        return waited - std::exchange(waited_, waited);
    }

    int64_t wanted_ = 0, uses_ = 0;
    int64_t computed_ = 0;  // for how long, in jobs
    int64_t step_ = 0;      // more threads on trial
    int64_t tried_ = 0;     // for how long
    int64_t expected_ = 0;  // how much longer the same jobs would have taken without
    int64_t lost_ = 0;      // and not yet made up for
    int64_t fewer_rest_ = SHORTEST_REST, more_rest_ = SHORTEST_REST, fewer_from_ = 0, more_from_ = 0;
    int64_t since_look_ = 0, waited_ = 0;
    Times times_;
};

std::atomic<uint32_t> forks{0};  // up to this process: a child has none of its parent's threads

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
    std::atomic<int64_t> awake_ns{AWAKE_NS};
    alignas(64) std::atomic<uint32_t> computed{0};  // units, by workers
    alignas(64) std::atomic<bool> ends{false};
    std::unique_ptr<Worker[]> workers;
    int64_t num_workers = 0, wanted_workers = 0, wanted_threads = 0, torch_threads = 0;
    Share share;
    uint32_t born = forks.load();

    ~Team() { end(); }

    // As many threads as torch was set to. While fewer are of use torch computes with those, too: the threads of its
    // OpenMP library wait for each other.
    int64_t wanted() {
        const int64_t now = omp_get_max_threads();
        if (now != torch_threads) wanted_threads = torch_threads = now;
        return wanted_threads;
    }

    void tell_torch(int64_t count) {
        if (count == torch_threads) return;
        torch_threads = count;
        omp_set_num_threads(static_cast<int>(count));
    }

    void run(int64_t count, int64_t largest, uint64_t kind, Body job, const void* with) {
        const int64_t wanted = this->wanted();
        if (wanted - 1 > wanted_workers || born != forks.load(std::memory_order_relaxed)) start(wanted - 1);
        const int64_t began = now_ns(), num_threads = share.threads(wanted);
        units.store(count, std::memory_order_relaxed);
        most.store(largest, std::memory_order_relaxed);
        threads.store(num_threads, std::memory_order_relaxed);
        body.store(job, std::memory_order_relaxed);
        context.store(with, std::memory_order_relaxed);
        computed.store(0, std::memory_order_relaxed);
        const uint64_t number = (left.load(std::memory_order_relaxed) >> UNIT_BITS) + 1;
        // In one order with `asleep`: either a worker sees this, or this thread sees it asleep.
        left.store(number << UNIT_BITS | count);
        wake_some();
        const Pieces mine = compute();
        wait_for(count - mine.computed_, kind, began, mine.taken_);
    }

    // Take a piece.
    bool take(Pieces& pieces) {
        uint64_t seen = left.load(std::memory_order_acquire);
        for (;;) {
            const int64_t there = seen & MOST_UNITS;
            if (there == 0) return false;
            const int64_t parts = PIECES * threads.load(std::memory_order_relaxed);
            const int64_t largest = most.load(std::memory_order_relaxed), all = units.load(std::memory_order_relaxed);
            const int64_t count = std::clamp<int64_t>(there / parts, 1, std::max<int64_t>(1, largest));
            if (left.compare_exchange_weak(seen, seen - count, std::memory_order_acq_rel, std::memory_order_acquire)) {
                pieces.first = all - there, pieces.last = pieces.first + count;
                pieces.taken_++;
                return true;
            }
        }
    }

    // As much as this thread gets.
    Pieces compute() {
        Pieces pieces(*this);
        if (take(pieces)) {
            computes = true;
            body.load(std::memory_order_relaxed)(context.load(std::memory_order_relaxed), pieces);
            computes = false;
        }
        return pieces;
    }

    static bool take_next(Pieces& pieces) {
        if (std::exchange(pieces.is_new_, false)) return true;
        pieces.computed_ += pieces.last - pieces.first;
        pieces.first = pieces.last;
        return pieces.team_->take(pieces);
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

    // Until workers have computed so many units. Of the job: when it began, and how many pieces this thread had.
    void wait_for(uint32_t count, uint64_t kind, int64_t began, int64_t pieces) {
        const auto is_over = [&] { return computed.load(std::memory_order_acquire) == count; };
        const int64_t since = now_ns(), piece = (since - began) / std::max<int64_t>(1, pieces);
        int64_t ended = since;
        if (!is_over()) {
            if (!comes_within(piece + AWAKE_NS, is_over)) sleep_until(count);
            ended = now_ns();
        }
        share.count(kind, ended - began, std::max<int64_t>(0, ended - since - piece - SOON_NS));
        tell_torch(share.uses());
        awake_ns.store(share.is_undisturbed() ? LONG_AWAKE_NS : AWAKE_NS, std::memory_order_relaxed);
    }

    void sleep_until(uint32_t count) {
        for (;;) {
            const uint32_t seen = computed.fetch_or(SLEEPS) | SLEEPS;
            if ((seen & ~SLEEPS) == count) return;
            sleep_on(computed, seen);
        }
    }

    void work(Worker& self) {
        const auto is_needed = [&] { return has_work(self.index) || ends.load(std::memory_order_relaxed); };
        while (!ends.load(std::memory_order_relaxed)) {
            if (const int64_t count = has_work(self.index) ? compute().computed_ : 0; count > 0) {
                if (computed.fetch_add(count, std::memory_order_acq_rel) & SLEEPS) wake(computed);
            }
            if (comes_within(awake_ns.load(std::memory_order_relaxed), is_needed)) continue;
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

int64_t num_threads() { return computes ? 1 : own_team().wanted(); }

// Of jobs that take about as long. Work counts by eighths of a power of two: that of attention grows with each token.
uint64_t kind_of(Body body, uint64_t work) {
    const int exponent = 63 - __builtin_clzll(work | 8);
    const uint64_t rounded = work >> (exponent - 3) | static_cast<uint64_t>(exponent) << 4;
    return (reinterpret_cast<uint64_t>(body) + rounded) * 0x9E3779B97F4A7C15u >> 8;
}

void run(int64_t units, int64_t most, int64_t work, Body body, const void* context) {
    own_team().run(units, most, kind_of(body, work), body, context);
}

bool take(Pieces& pieces) { return Team::take_next(pieces); }

}  // namespace

extern "C" const ThreadPool functions{num_threads, run, take};
