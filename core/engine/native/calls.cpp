// Makes a list of calls, one after another.
//
// Arguments are integers and pointers of at most 64 bits. The calling conventions of Linux on 64-bit processors pass
// both alike, each in a place of its own, and let the caller clean up: a function may be called with more arguments
// than it has.

#include <cstdint>

constexpr int MOST_ARGUMENTS = 10;

// Mirrored by a ctypes structure.
struct Call {
    void (*function)();
    int64_t arguments[MOST_ARGUMENTS];
};

using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

extern "C" void make_calls(const Call* calls, int64_t count) {
    for (const Call* call = calls; call < calls + count; call++) {
        const int64_t* a = call->arguments;
        reinterpret_cast<Function>(call->function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    }
}
