// Stands in for what coded_products.cu uses of CUDA, on a CPU: each thread of a program is a fiber, which runs until it waits
// for others, and one program follows the other. The product of matrices is that of PTX's tables: which thread's register
// holds what.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(n)
inline int min(int a, int b) { return a < b ? a : b; }

struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Place { unsigned x; };
static Place threadIdx, blockIdx;

const int STACK_BYTES = 1 << 17;
struct Meeting { int arrived, rounds; };
struct Warp {
    Meeting meeting;
    unsigned words[32][6];
};
static Warp warps[WARPS];
static Meeting everyone;
static ucontext_t scheduler, fibers[WARPS * 32];
static bool ended[WARPS * 32];
static char stacks[WARPS * 32][STACK_BYTES];

inline void meet(Meeting &meeting, int count) {
    const int round = meeting.rounds, thread = threadIdx.x;
    if (++meeting.arrived == count) {
        meeting.arrived = 0;
        meeting.rounds++;
        return;
    }
    while (meeting.rounds == round) {
        swapcontext(&fibers[thread], &scheduler);
        threadIdx.x = thread;
    }
}
inline void __syncthreads() { meet(everyone, WARPS * 32); }
inline void meet_warp() { meet(warps[threadIdx.x / 32].meeting, 32); }

inline float __uint_as_float(unsigned bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
template <class T> T __shfl_sync(unsigned, T value, int lane) {
    Warp &warp = warps[threadIdx.x / 32];
    std::memcpy(&warp.words[threadIdx.x % 32][0], &value, 4);
    meet_warp();
    T out;
    std::memcpy(&out, &warp.words[lane & 31][0], 4);
    meet_warp();
    return out;
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int by) { return __shfl_sync(mask, value, (threadIdx.x % 32) ^ by); }

// Halves.
inline float half_to_float(uint16_t h) {
#if F16
    _Float16 x;
    std::memcpy(&x, &h, 2);
    return (float)x;
#else
    return __uint_as_float((uint32_t)h << 16);
#endif
}
inline uint16_t float_to_half(float f) {
#if F16
    _Float16 x = (_Float16)f;
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
#else
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define VECTORS
static uint4 vectors[1 << 16];

inline float of_f16(u16 half) {
    _Float16 number;
    std::memcpy(&number, &half, 2);
    return (float)number;
}
inline u16 narrow(float number) { return float_to_half(number); }
inline u32 fma2(u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) {
        auto at = [i](u32 word) { return half_to_float((u16)(word >> (16 * i))); };
        out |= (u32)float_to_half((float)((double)at(a) * at(b) + at(c))) << (16 * i);
    }
    return out;
}
inline u32 chosen(u32 word, u32 mask, u32 bits) { return (word & mask) | bits; }
inline uint4 streamed(const char *from) {
    uint4 out;
    std::memcpy(&out, from, 16);
    return out;
}
inline void wait_for_earlier(bool) {}
// PTX's tables of m16n8k16: which thread's register holds what.
inline void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Warp &warp = warps[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.words[lane], mine, sizeof mine);
    meet_warp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        float total = sum[i];
        for (int k = 0; k < 16; k++) {
            const u32 a = warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const u32 b = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
            total += half_to_float((u16)(a >> (16 * (k % 2)))) * half_to_float((u16)(b >> (16 * (k % 2))));
        }
        sum[i] = total;
    }
    meet_warp();
}

#define EMULATED
#include SOURCE

static const Work *current;
static void fiber() {
    coded_products(*current);
    ended[threadIdx.x] = true;
}

extern "C" void run(const Work *work, int programs) {
    current = work;
    for (int program = 0; program < programs; program++) {
        blockIdx.x = program;
        for (int thread = 0; thread < THREADS; thread++) {
            ended[thread] = false;
            getcontext(&fibers[thread]);
            fibers[thread].uc_stack.ss_sp = stacks[thread];
            fibers[thread].uc_stack.ss_size = STACK_BYTES;
            fibers[thread].uc_link = &scheduler;
            makecontext(&fibers[thread], fiber, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (int thread = 0; thread < THREADS; thread++)
                if (!ended[thread]) {
                    any = true;
                    threadIdx.x = thread;
                    swapcontext(&scheduler, &fibers[thread]);
                }
        }
    }
}
