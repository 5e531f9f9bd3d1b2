// Collectives through memory that all ranks of one machine share.
//
// A call is one round or more: a rank writes what it has to show, says so, and waits until all others have. Sums of few
// bytes are made by every rank for itself, those of many in two rounds for each piece: every rank adds up its share,
// then all fetch the shares of the others. A call that fails returns at once, and so do all that follow.

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "streaming.h"
#include "sums.h"
#include "waiting.h"

namespace {

constexpr int64_t ONE_SHOT = 32 << 10;  // bytes up to which every rank adds up everything

enum Kind : uint64_t { ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST };
constexpr const char* NAMES[] = {"nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"};
enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, ANY = 3 };
constexpr const char* DTYPES[] = {"float32", "bfloat16", "float16", "any dtype"};
constexpr int64_t BYTES[] = {4, 2, 2};

// What all ranks must agree on. `detail`: 8 bits.
uint64_t signature(Kind kind, Dtype dtype, int64_t bytes, uint64_t detail = 0) {
    return kind << 60 | static_cast<uint64_t>(dtype) << 56 | (detail & 0xff) << 48 | (bytes & 0xffffffffffff);
}

void spell(uint64_t call, char* text, int64_t room) {
    const uint64_t kind = std::min<uint64_t>(call >> 60, BROADCAST);
    const unsigned long long bytes = call & 0xffffffffffff;
    snprintf(text, room, "%s of %llu bytes of %s", NAMES[kind], bytes, DTYPES[call >> 56 & 3]);
}

bool begin(Communicator& self, const char* call, const Group* group, int peer) {
    if (self.failed.load(std::memory_order_relaxed) != 0) return false;
    self.call = call;
    self.group = group;
    self.peer = peer;
    if (self.header == nullptr) return fail(self, 0, "rank %d: %s of a communicator that is closed", self.rank, call);
    std::atomic<uint64_t>& begun = self.header->ranks[self.rank].begun;
    begun.store(begun.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    self.deadline = now_ns() + self.timeout_ns;
    return self.header->failed.load(std::memory_order_relaxed) == 0 || all_well(self);
}

// What this rank shows in the round that comes next.
char* to_show(Group& group) { return group.lanes[group.index]->data[(group.round + 1) & 1]; }

// What a rank shows in the round that all have entered.
const char* shown_by(const Group& group, int index) { return group.lanes[index]->data[group.round & 1]; }

// Enter a round, and wait until all ranks of the group have.
bool enter_round(Communicator& self, Group& group, uint64_t call) {
    const uint32_t round = ++group.round;
    Lane& own = *group.lanes[group.index];
    own.calls[round & 1] = call;
    raise_to(own.rounds, round);
    const auto missing = [&] {
        uint64_t ranks = 0;
        for (int i = 0; i < group.count; i++)
            if (!group.lanes[i]->rounds.reached(round)) ranks |= uint64_t(1) << group.ranks[i];
        return ranks;
    };
    for (int i = 0; i < group.count; i++) {
        Lane& other = *group.lanes[i];
        if (i == group.index) continue;
        if (!wait_for(self, other.rounds, round, group.ranks[i], missing)) return false;
        const uint64_t theirs = other.calls[round & 1];
        if (theirs != call) {
            char mine[80], his[80];
            spell(call, mine, sizeof mine);
            spell(theirs, his, sizeof his);
            return fail(self, 0, "%s with %s, and rank %d another call: %s", entered(self).text, mine, group.ranks[i],
                        his);
        }
    }
    return true;
}

struct Range {
    int64_t first, end;

    int64_t length() const { return std::max<int64_t>(end - first, 0); }
};

Range overlap(Range a, Range b) { return {std::max(a.first, b.first), std::min(a.end, b.end)}; }

// The elements that the index-th of count ranks adds up: whole lines.
template <typename T>
Range share(int64_t length, int index, int count) {
    constexpr int64_t UNIT = 2 * LINE / sizeof(T);
    const int64_t units = (length + UNIT - 1) / UNIT, each = (units + count - 1) / count * UNIT;
    return {std::min(index * each, length), std::min((index + 1) * each, length)};
}

template <typename T>
void parts_of(const Group& group, const T* own, int64_t shown_from, const T** parts) {
    for (int i = 0; i < group.count; i++)
        parts[i] = i == group.index ? own : reinterpret_cast<const T*>(shown_by(group, i)) + shown_from;
}

// Elements of x at their places in what this rank shows next.
template <typename T>
void show(Group& group, const T* x, Range range) {
    put(to_show(group) + range.first * sizeof(T), reinterpret_cast<const char*>(x + range.first),
        range.length() * sizeof(T));
}

template <typename T>
bool all_reduce(Communicator& self, Group& group, uint64_t call, T* x, int64_t length) {
    constexpr int64_t STEP = PIECE / sizeof(T);
    const T* parts[MOST_RANKS];
    if (length * static_cast<int64_t>(sizeof(T)) <= ONE_SHOT) {
        put(to_show(group), reinterpret_cast<const char*>(x), length * sizeof(T));
        if (!enter_round(self, group, call)) return false;
        parts_of(group, static_cast<const T*>(x), 0, parts);
        add_up<T>(parts, group.count, length, x);
        return true;
    }
    for (int64_t done = 0; done < length; done += STEP, x += STEP) {
        const int64_t now = std::min(STEP, length - done);
        const Range own = share<T>(now, group.index, group.count);
        show<T>(group, x, {0, own.first});
        show<T>(group, x, {own.end, now});
        if (!enter_round(self, group, call)) return false;
        parts_of(group, static_cast<const T*>(x + own.first), own.first, parts);
        add_up<T>(parts, group.count, own.length(), x + own.first);
        show<T>(group, x, own);
        if (!enter_round(self, group, call)) return false;
        for (int i = 0; i < group.count; i++) {
            const Range theirs = share<T>(now, i, group.count);
            const T* shown = reinterpret_cast<const T*>(shown_by(group, i));
            if (i != group.index) std::memcpy(x + theirs.first, shown + theirs.first, theirs.length() * sizeof(T));
        }
    }
    return true;
}

template <typename T>
bool reduce_scatter(Communicator& self, Group& group, uint64_t call, const T* x, int64_t length, Range own, T* out) {
    constexpr int64_t STEP = PIECE / sizeof(T);
    const T* parts[MOST_RANKS];
    for (int64_t done = 0; done == 0 || done < length; done += STEP) {
        const Range now{done, std::min(done + STEP, length)}, mine = overlap(now, own);
        put(to_show(group), reinterpret_cast<const char*>(x + done), now.length() * sizeof(T));
        if (!enter_round(self, group, call)) return false;
        if (mine.length() == 0) continue;
        parts_of(group, x + mine.first, mine.first - done, parts);
        add_up<T>(parts, group.count, mine.length(), out + (mine.first - own.first));
    }
    return true;
}

// A rank's tensors one after the other, in front of them their sizes: what it shows piece by piece.
struct Stream {
    const int64_t* sizes;  // [count], in bytes
    const char* const* parts;
    int count;

    int64_t head() const { return count * sizeof(int64_t); }
    int64_t start(int index) const {
        int64_t at = head();
        for (int i = 0; i < index; i++) at += sizes[i];
        return at;
    }
    int64_t end() const { return start(count); }

    void copy(Range piece, char* to) const {
        for (int i = -1; i < count; i++) {
            const int64_t first = i < 0 ? 0 : start(i), size = i < 0 ? head() : sizes[i];
            const char* from = i < 0 ? reinterpret_cast<const char*>(sizes) : parts[i];
            const Range found = overlap(piece, {first, first + size});
            if (found.length() == 0) continue;
            put(to + (found.first - piece.first), from + (found.first - first), found.length());
        }
    }
};

bool all_to_all(Communicator& self, Group& group, const Stream& mine, char* const* received, const int64_t* expected) {
    const uint64_t call = signature(ALL_TO_ALL, ANY, 0);
    Range sections[MOST_RANKS];  // of the others' streams
    int64_t longest = mine.end();
    for (int64_t done = 0; done == 0 || done < longest; done += PIECE) {
        const Range piece{done, done + PIECE};
        mine.copy(piece, to_show(group));
        if (!enter_round(self, group, call)) return false;
        for (int i = 0; i < group.count; i++) {
            if (i == group.index) continue;
            const char* shown = shown_by(group, i);
            if (done == 0) {
                int64_t sizes[MOST_RANKS];
                std::memcpy(sizes, shown, group.count * sizeof *sizes);
                const Stream theirs{sizes, nullptr, group.count};
                sections[i] = {theirs.start(group.index), theirs.start(group.index) + sizes[group.index]};
                longest = std::max(longest, theirs.end());
                if (sections[i].length() != expected[i])
                    return fail(self, 0, "%s: rank %d sends %lld bytes, expected %lld", entered(self).text,
                                group.ranks[i], static_cast<long long>(sections[i].length()),
                                static_cast<long long>(expected[i]));
            }
            const Range found = overlap(piece, sections[i]);
            if (found.length() == 0) continue;
            std::memcpy(received[i] + (found.first - sections[i].first), shown + (found.first - done), found.length());
        }
    }
    return true;
}

constexpr uint32_t MOST_AT_ONCE = RING_LINES / 4;  // so that one rank writes while the other reads

uint32_t lines_of(int64_t bytes) { return std::min<int64_t>((bytes + LINE - 1) / LINE, MOST_AT_ONCE); }

// Bytes of a message into its ring, or out of it: in parts that lie after one another there. `others`: the word that
// says how far the other rank is; `ahead`: how far it must be ahead of `at` for one line.
template <typename Move>
bool through_ring(Communicator& self, int peer, Word& others, uint32_t ahead, Word& own, uint32_t& at, int64_t bytes,
                  Move move) {
    const auto missing = [&] { return uint64_t(1) << peer; };
    for (int64_t done = 0; done < bytes;) {
        const uint32_t slot = at % RING_LINES;
        const uint32_t lines = std::min(lines_of(bytes - done), RING_LINES - slot);
        if (!wait_for(self, others, at + ahead + lines, peer, missing)) return false;
        const int64_t now = std::min<int64_t>(bytes - done, lines * LINE);
        move(slot, done, now);
        at += lines;
        raise_to(own, at);
        done += now;
    }
    return true;
}

struct Head {
    uint64_t bytes;
};

Group& group_at(Communicator* self, int64_t index) { return self->groups[index]; }

template <typename Call>
void by_dtype(int64_t dtype, Call call) {
    if (dtype == FLOAT32) call(float{});
    else if (dtype == BFLOAT16) call(bfloat16{});
    else call(float16{});
}

}  // namespace

extern "C" {

void shm_bytes(int64_t size, int64_t* bytes) { *bytes = segment_bytes(size); }

void shm_create(int64_t rank, int64_t timeout_ns, Communicator** made) {
    Communicator* self = new Communicator();
    self->rank = static_cast<int32_t>(rank);
    self->timeout_ns = timeout_ns;
    *made = self;
}

void shm_add_group(Communicator* self, uint64_t key, const char* name, const int32_t* ranks, int64_t count) {
    Group& group = self->groups[self->num_groups++];
    snprintf(group.name, NAME, "%s", name);
    group.key = key;
    group.count = static_cast<int>(count);
    for (int i = 0; i < group.count; i++) {
        group.ranks[i] = ranks[i];
        if (ranks[i] == self->rank) group.index = i;
    }
}

// A new segment in an empty file.
void shm_format(int64_t file, int64_t size, const unsigned char* token, int64_t* error) {
    *error = ftruncate(file, segment_bytes(size)) == 0 ? 0 : errno;
    void* memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) *error = errno;
    if (*error != 0) return;
    Header* header = static_cast<Header*>(memory);
    header->size = size;
    std::memcpy(header->token, token, sizeof header->token);
    header->magic = MAGIC;
    munmap(memory, sizeof(Header));
}

// Take part in a segment, and wait until all ranks do.
void shm_start(Communicator* self, int64_t file, int64_t size, const unsigned char* token) {
    struct stat status;
    if (fstat(file, &status) != 0 || status.st_size != segment_bytes(size)) {
        fail(*self, 0, "rank %d was invited to a run of another number of ranks than %lld", self->rank,
             static_cast<long long>(size));
        return;
    }
    void* memory = mmap(nullptr, segment_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        fail(*self, 0, "rank %d cannot map the memory of the ranks: %s", self->rank, strerror(errno));
        return;
    }
    Header* header = static_cast<Header*>(memory);
    if (header->magic != MAGIC || std::memcmp(header->token, token, sizeof header->token) != 0) {
        munmap(memory, segment_bytes(size));
        fail(*self, 0, "rank %d was invited to memory of something else", self->rank);
        return;
    }
    Rank& own = header->ranks[self->rank];
    own.pid = getpid();
    process_state(own.pid, &own.born);
    cpu_set_t cpus;
    static_assert(sizeof cpus == sizeof own.cpus);
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) std::memcpy(own.cpus, &cpus, sizeof cpus);
    own.num_groups = self->num_groups;
    for (int i = 0; i < self->num_groups; i++) own.groups[i] = self->groups[i].key;
    self->header = header;
    for (int i = 0; i < self->num_groups; i++) {
        self->groups[i].round = FIRST;
        lane(header, self->rank, i)->rounds.value.store(FIRST);
    }
    for (int64_t other = 0; other < size; other++) {
        self->sent[other] = self->received[other] = FIRST;
        ring(header, self->rank, other)->written.value.store(FIRST);
        ring(header, other, self->rank)->read.value.store(FIRST);
    }
    own.state.store(HERE);
    header->come.value.fetch_add(1);
    wake(header->come);

    self->call = "start";
    self->deadline = now_ns() + self->timeout_ns;
    while (!header->come.reached(static_cast<uint32_t>(size))) {
        const uint32_t seen = header->come.value.load();
        if (!all_well(*self)) return;
        const int64_t left = self->deadline - now_ns();
        if (left <= 0) {
            char named[WHY - 200] = "";
            uint64_t missing = 0;
            for (int rank = 0; rank < size; rank++) {
                if (header->ranks[rank].state.load() != EXPECTED) continue;
                missing |= uint64_t(1) << rank;
                const int64_t length = strlen(named);
                snprintf(named + length, sizeof named - length, "%srank %d", length == 0 ? "" : ", ", rank);
            }
            if (missing == 0) continue;
            fail(*self, missing, "rank %d waited %g s: %s did not come", self->rank, self->timeout_ns * 1e-9, named);
            return;
        }
        if (seen < size) sleep_on(header->come, seen, std::min(left, SLEEP_NS));
    }
    uint64_t cpus_of_all[MOST_CPUS / 64] = {};
    for (int rank = 0; rank < size; rank++)
        for (int i = 0; i < MOST_CPUS / 64; i++) cpus_of_all[i] |= header->ranks[rank].cpus[i];
    int64_t num_cpus = 0;
    for (const uint64_t word : cpus_of_all) num_cpus += __builtin_popcountll(word);
    self->yields = num_cpus < size;
    for (int i = 0; i < self->num_groups; i++) {
        Group& group = self->groups[i];
        for (int j = 0; j < group.count; j++) {
            const Rank& other = header->ranks[group.ranks[j]];
            const uint64_t* end = other.groups + other.num_groups;
            const uint64_t* found = std::find(other.groups, end, group.key);
            if (found == end) {
                fail(*self, 0, "rank %d knows no group %s of the same ranks as rank %d", group.ranks[j], group.name,
                     self->rank);
                return;
            }
            group.lanes[j] = lane(header, group.ranks[j], found - other.groups);
        }
    }
}

void shm_all_reduce(Communicator* self, int64_t group, void* x, int64_t length, int64_t dtype) {
    Group& in = group_at(self, group);
    if (!begin(*self, "all_reduce", &in, -1)) return;
    const uint64_t call = signature(ALL_REDUCE, static_cast<Dtype>(dtype), length * BYTES[dtype]);
    by_dtype(dtype, [&](auto zero) { all_reduce(*self, in, call, static_cast<decltype(zero)*>(x), length); });
}

void shm_reduce_scatter(Communicator* self, int64_t group, const void* x, const int64_t* counts, int64_t dtype,
                        void* out) {
    Group& in = group_at(self, group);
    if (!begin(*self, "reduce_scatter", &in, -1)) return;
    Range own{0, 0};
    int64_t length = 0;
    uint64_t detail = 0;
    for (int i = 0; i < in.count; length += counts[i], i++) {
        if (i == in.index) own = {length, length + counts[i]};
        detail = detail * 31 + static_cast<uint64_t>(counts[i]);
    }
    const uint64_t call = signature(REDUCE_SCATTER, static_cast<Dtype>(dtype), length * BYTES[dtype], detail);
    by_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        reduce_scatter(*self, in, call, static_cast<const T*>(x), length, own, static_cast<T*>(out));
    });
}

void shm_all_gather(Communicator* self, int64_t group, const char* x, char* const* parts, const int64_t* sizes) {
    Group& in = group_at(self, group);
    if (!begin(*self, "all_gather", &in, -1)) return;
    int64_t longest = 0, all = 0;
    for (int i = 0; i < in.count; i++) {
        longest = std::max(longest, sizes[i]);
        all += sizes[i];
    }
    const uint64_t call = signature(ALL_GATHER, ANY, all);
    if (parts[in.index] != x) std::memmove(parts[in.index], x, sizes[in.index]);
    for (int64_t done = 0; done == 0 || done < longest; done += PIECE) {
        const auto now = [&](int i) { return std::clamp<int64_t>(sizes[i] - done, 0, PIECE); };
        put(to_show(in), x + done, now(in.index));
        if (!enter_round(*self, in, call)) return;
        for (int i = 0; i < in.count; i++)
            if (i != in.index) std::memcpy(parts[i] + done, shown_by(in, i), now(i));
    }
}

void shm_all_to_all(Communicator* self, int64_t group, const char* const* parts, const int64_t* sizes,
                    char* const* received, const int64_t* expected) {
    Group& in = group_at(self, group);
    if (!begin(*self, "all_to_all", &in, -1)) return;
    if (sizes[in.index] != expected[in.index]) {
        fail(*self, 0, "%s: it keeps %lld bytes, expected %lld", entered(*self).text,
             static_cast<long long>(sizes[in.index]), static_cast<long long>(expected[in.index]));
        return;
    }
    std::memmove(received[in.index], parts[in.index], sizes[in.index]);
    int64_t sent[MOST_RANKS];
    std::copy(sizes, sizes + in.count, sent);
    sent[in.index] = 0;
    all_to_all(*self, in, {sent, parts, in.count}, received, expected);
}

void shm_broadcast(Communicator* self, int64_t group, char* x, int64_t bytes, int64_t source) {
    Group& in = group_at(self, group);
    if (!begin(*self, "broadcast", &in, -1)) return;
    const uint64_t call = signature(BROADCAST, ANY, bytes, static_cast<uint64_t>(source));
    for (int64_t done = 0; done == 0 || done < bytes; done += PIECE) {
        const int64_t now = std::min(PIECE, bytes - done);
        if (source == in.index) put(to_show(in), x + done, now);
        if (!enter_round(*self, in, call)) return;
        if (source != in.index) std::memcpy(x + done, shown_by(in, static_cast<int>(source)), now);
    }
}

void shm_send(Communicator* self, const char* x, int64_t bytes, int64_t to) {
    const int peer = static_cast<int>(to);
    if (!begin(*self, "send to", nullptr, peer)) return;
    Ring& messages = *ring(self->header, self->rank, to);
    uint32_t& at = self->sent[to];
    const Head head{static_cast<uint64_t>(bytes)};
    const auto write = [&](const char* from) {
        return [&messages, from](uint32_t slot, int64_t done, int64_t now) {
            put(messages.lines[slot], from + done, now);
        };
    };
    constexpr uint32_t FREE = 0u - RING_LINES;  // what was read that long ago may be overwritten
    const char* first = reinterpret_cast<const char*>(&head);
    if (through_ring(*self, peer, messages.read, FREE, messages.written, at, sizeof head, write(first)))
        through_ring(*self, peer, messages.read, FREE, messages.written, at, bytes, write(x));
}

void shm_recv(Communicator* self, char* x, int64_t bytes, int64_t source) {
    const int peer = static_cast<int>(source);
    if (!begin(*self, "recv from", nullptr, peer)) return;
    Ring& messages = *ring(self->header, source, self->rank);
    uint32_t& at = self->received[source];
    Head head{};
    const auto read = [&](char* to) {
        return [&messages, to](uint32_t slot, int64_t done, int64_t now) {
            std::memcpy(to + done, messages.lines[slot], now);
        };
    };
    char* first = reinterpret_cast<char*>(&head);
    if (!through_ring(*self, peer, messages.written, 0, messages.read, at, sizeof head, read(first))) return;
    if (head.bytes != static_cast<uint64_t>(bytes)) {
        fail(*self, 0, "%s and got %llu bytes, expected %lld", entered(*self).text,
             static_cast<unsigned long long>(head.bytes), static_cast<long long>(bytes));
        return;
    }
    through_ring(*self, peer, messages.written, 0, messages.read, at, bytes, read(x));
}

// From any thread but one that closes.
void shm_abort(Communicator* self, const char* why) {
    Header* header = self->header;
    uint32_t nobody = 0;
    if (header == nullptr || !header->failed.compare_exchange_strong(nobody, self->rank + 1)) return;
    snprintf(header->why, WHY, "rank %d was stopped: %s", self->rank, why);
    header->told.store(1);
}

void shm_begun(const Communicator* self, int64_t* begun) {
    *begun = self->header == nullptr ? 0 : static_cast<int64_t>(self->header->ranks[self->rank].begun.load());
}

// What failed, and which ranks were missing, as bits.
void shm_failure(const Communicator* self, char* text, int64_t room, uint64_t* missing) {
    snprintf(text, room, "%s", self->why);
    *missing = self->missing;
}

// What programs point at stays: calls of it do nothing.
void shm_close(Communicator* self) {
    Header* header = self->header;
    if (header == nullptr) return;
    header->ranks[self->rank].state.store(CLOSED);
    for (int64_t group = 0; group < self->num_groups; group++) wake(lane(header, self->rank, group)->rounds);
    for (int64_t other = 0; other < header->size; other++) {
        wake(ring(header, self->rank, other)->written);
        wake(ring(header, other, self->rank)->read);
    }
    self->header = nullptr;
    munmap(header, segment_bytes(header->size));
}

}  // extern "C"
