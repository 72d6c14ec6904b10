// Products of up to 16 vectors with weights that are codes (weights/kinds.py), on tensor cores: compute capability 8.0 and
// up.
//
//   a program    16 rows of the weights (with GATED: 16 rows of both matrices), all columns
//   a warp       some of the columns, 128 at a time; its sums meet those of the other warps in shared memory
//   a thread     32 columns of row `lane / 4` and of the row 8 further down: eight steps of m16n8k16
//
//   lane % 4              0            1            2             3
//   int4, columns      0 .. 31      32 .. 63     64 .. 95     96 .. 127       of the 128
//   bytes, columns     0 .. 15      16 .. 31     32 .. 47     48 .. 63        and as many 64 further on
//
// Which column is which `k` of a step does not matter, as long as codes and vectors agree: both come from memory as they
// are. Codes become halves without rounding (integers up to 255, and e4m3), so each product is exact; sums and scales are
// in float32. The order of a token's sums depends on the matrix alone, so a token has the same bits alone and among others.
//
// Codes and scales are constant. So the first of them are read before the kernel waits for the one before it.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define INT4 0
#define INT8 1
#define FP8 2
// Given by the compiler's options: CODES, SCALES (0 bf16, 1 f16, 2 f32), ZEROS, GROUP_STEPS (steps of 128 columns that share
// a scale; 0: whole rows do), F16, WARPS, DEPTH (1, 2 or 4), TILES (of eight tokens), GATED, NORMED, STAGED (the vectors are
// copied to shared memory first; always with NORMED).

#define THREADS (WARPS * 32)
#define MATRICES (GATED ? 2 : 1)
#define LOADS (CODES == INT4 ? 1 : 2)
#define COLUMNS 128
#define GROUPED (GROUP_STEPS > 0)
#define PADDING 32  // halves between two vectors in shared memory, so that they lie in other banks

struct Matrix {
    const char *codes;
    const char *scales;
    const signed char *zeros;
    const u16 *bias;
    int rows;
    int padding;
};

struct Work {
    Matrix matrices[3];
    const u16 *x;
    const u16 *norm;
    const u16 *residual;
    char *out;
    int columns;
    int groups;        // scales in a row
    int scale_rows;    // rows that share a scale
    int tokens;
    int row_stride;    // of the output
    float eps;
    float offset;
    int out_is_float;
    int gelu;
    int early;         // Hopper and later
    int lets_next;     // whether the next kernel may be launched while this one runs
};

#ifndef EMULATED  // Tests run the rest on a CPU, with these instructions in C++.
#define VECTORS extern __shared__ uint4 vectors[]

__device__ __forceinline__ float of_f16(u16 half) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
    return out;
}

__device__ __forceinline__ u16 narrow(float number) {
    u16 out;
#if F16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(number));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(number));
#endif
    return out;
}

// a * b + c of two halves each.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 out;
#if F16
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
    return out;
}

// (word & mask) | bits in one instruction, which the compiler does not find.
__device__ __forceinline__ u32 chosen(u32 word, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
    return out;
}

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if F16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Volatile, so that it stays before the wait.
__device__ __forceinline__ uint4 streamed(const char *from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

// Waits for the kernel before this one; with `lets_next`, the next may be launched from now on.
__device__ __forceinline__ void wait_for_earlier(bool lets_next) {
#if __CUDA_ARCH__ >= 900
    if (lets_next) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

__device__ __forceinline__ float of_bf16(u16 half) { return __uint_as_float((u32)half << 16); }

__device__ __forceinline__ float wide(u16 half) { return F16 ? of_f16(half) : of_bf16(half); }

#if F16
#define ONE 0x3c003c00u
#define NIBBLE 0x64006400u      // 1024, whose lowest bit counts one
#define NIBBLE_BASE 1024.0f
#define MINUS_MIDDLE 0xe408e408u  // -1032
#else
#define ONE 0x3f803f80u
#define NIBBLE 0x43004300u      // 128
#define NIBBLE_BASE 128.0f
#define MINUS_MIDDLE 0xc308c308u  // -136
#endif

__device__ __forceinline__ u32 both(float number) {
    u32 half = narrow(number);
    return half | (half << 16);
}

// Two int4 codes, bits `4 lane` and `4 lane + 16` of the word. `minus` is what to add to both.
__device__ __forceinline__ u32 nibbles(u32 word, int lane, u32 minus) {
    return fma2(chosen(word >> (4 * lane), 0x000f000fu, NIBBLE), ONE, minus);
}

// The codes in bytes 0 and 2 of a word, or in bytes 1 and 3, without zeros.
__device__ __forceinline__ u32 bytes(u32 word, bool odd) {
#if CODES == INT8
    if (odd) word >>= 8;
#if F16
    return fma2(chosen(word ^ 0x00800080u, 0x00ff00ffu, 0x64006400u), ONE, 0xe480e480u);  // -1152
#else
    // The low seven bits, minus 128 if the highest is set: 128 + low - (128 or 256).
    u32 low = chosen(word, 0x007f007fu, 0x43004300u);
    u32 base = chosen(word, 0x00800080u, 0xc300c300u);
    return fma2(low, ONE, base);
#endif
#else
    // Exponent and mantissa to where halves have theirs; the difference of the exponents' middles is multiplied in.
    if (!odd) word <<= 8;
#if F16
    return fma2(chosen(word, 0x80008000u, (word & 0x7f007f00u) >> 1), 0x5c005c00u, 0x80008000u);  // 2^8
#else
    return fma2(chosen(word, 0x80008000u, (word & 0x7f007f00u) >> 4), 0x7b807b80u, 0x80008000u);  // 2^120
#endif
#endif
}

__device__ __forceinline__ float scale_at(const char *scales, int place) {
#if SCALES == 2
    return ((const float *)scales)[place];
#else
    const u16 half = ((const u16 *)scales)[place];
    return SCALES == 1 ? of_f16(half) : of_bf16(half);
#endif
}

struct Step {
    uint4 codes[MATRICES][2][LOADS];
};

struct Rows {
    const char *codes[MATRICES][2];
    const char *scales[MATRICES];
    const signed char *zeros[MATRICES];
    int scale_places[MATRICES][2];  // of the rows' first scales
};

__device__ __forceinline__ void fetch(Step &step, const Rows &rows, int index) {
    const int width = CODES == INT4 ? COLUMNS / 2 : COLUMNS;
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int l = 0; l < LOADS; l++)
                step.codes[m][r][l] = streamed(rows.codes[m][r] + index * width + 64 * l);
}

// Scales and zeros of `DEPTH` steps: each of four threads that share rows holds those of one of them.
struct Held {
    float scales[MATRICES][2];
#if ZEROS
    int zeros[MATRICES][2];
#endif
};

__device__ __forceinline__ void hold(Held &held, const Rows &rows, int step) {
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int place = rows.scale_places[m][r] + (GROUPED ? step / (GROUPED ? GROUP_STEPS : 1) : 0);
            held.scales[m][r] = scale_at(rows.scales[m], place);
#if ZEROS
            held.zeros[m][r] = rows.zeros[m][place];
#endif
        }
}

__device__ __forceinline__ u32 word_of(const uint4 (&loads)[LOADS], int index) {
    const uint4 &load = loads[index / 4];
    return index % 4 == 0 ? load.x : index % 4 == 1 ? load.y : index % 4 == 2 ? load.z : load.w;
}

// Where the eighth `index` of a vector lies in shared memory: those that the four threads of a row read at once, side by side.
__device__ __forceinline__ int staged_place(int index) {
    const int step = index & ~15, within = index & 15;
#if CODES == INT4
    return step | ((within & 3) << 2) | (within >> 2);
#else
    return step | ((within & 8 | (within & 1) << 2)) | ((within >> 1) & 3);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) coded_products(const Work work) {
    VECTORS;
    __shared__ float sums[WARPS][MATRICES][16][8 * TILES];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int group = lane / 4, quarter = lane % 4;
    const int columns = work.columns, steps = columns / COLUMNS;

    // This program's rows.
    int block = blockIdx.x, base = 0, which = 0;
    if (!GATED) {
        while (which < 2 && block >= (work.matrices[which].rows + 15) / 16) {
            block -= (work.matrices[which].rows + 15) / 16;
            base += work.matrices[which].rows;
            which++;
        }
    }
    const int first_row = block * 16, rows_there = work.matrices[which].rows;
    const long long row_bytes = CODES == INT4 ? columns / 2 : columns;
    Rows rows;
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
        const Matrix &matrix = work.matrices[GATED ? m : which];
        rows.scales[m] = matrix.scales;
        rows.zeros[m] = matrix.zeros;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = min(first_row + group + 8 * r, rows_there - 1);
            rows.codes[m][r] = matrix.codes + row * row_bytes + quarter * 16;
            rows.scale_places[m][r] = row / work.scale_rows * work.groups;
        }
    }

    // This warp's columns.
    const int each = (steps + WARPS - 1) / WARPS;
    const int begin = min(warp * each, steps), end = min(begin + each, steps);
    Step ahead[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (begin + d < end) fetch(ahead[d], rows, begin + d);
    Held held;
    hold(held, rows, min(begin + quarter % DEPTH, steps - 1));

    if (work.early) wait_for_earlier(work.lets_next);

#if NORMED
    {
        // One vector. It is rounded once, as a norm of its own would round it.
        __shared__ float squares[WARPS];
        float sum = 0.0f;
        for (int at = thread; at < columns / 8; at += THREADS) {
            uint4 eight = *(const uint4 *)(work.x + 8 * at);
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float low = wide((u16)words[w]), high = wide((u16)(words[w] >> 16));
                sum += low * low + high * high;
            }
        }
#pragma unroll
        for (int far = 16; far; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
        if (lane == 0) squares[warp] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += squares[w];
        const float scale = rsqrtf(sum / columns + work.eps);
        for (int at = thread; at < columns / 8; at += THREADS) {
            uint4 eight = *(const uint4 *)(work.x + 8 * at), weight = *(const uint4 *)(work.norm + 8 * at);
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w}, by[4] = {weight.x, weight.y, weight.z, weight.w};
            u32 out[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 low = narrow(wide((u16)words[w]) * scale * (wide((u16)by[w]) + work.offset));
                u32 high = narrow(wide((u16)(words[w] >> 16)) * scale * (wide((u16)(by[w] >> 16)) + work.offset));
                out[w] = low | (high << 16);
            }
            vectors[staged_place(at)] = make_uint4(out[0], out[1], out[2], out[3]);
        }
        __syncthreads();
    }
#elif STAGED
    for (int token = 0; token < work.tokens; token++) {
        const uint4 *from = (const uint4 *)(work.x + (long long)token * columns);
        uint4 *to = vectors + token * (columns + PADDING) / 8;
        for (int at = thread; at < columns / 8; at += THREADS) to[staged_place(at)] = from[at];
    }
    __syncthreads();
#endif

    float total[MATRICES][TILES][4];
#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[m][n][i] = 0.0f;

    for (int start = begin; start < end; start += DEPTH) {
#if GROUPED
        Held after;
        hold(after, rows, min(start + DEPTH + quarter % DEPTH, steps - 1));
#endif
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = start + d;
            if (step >= end) break;
            // The vectors' 32 columns, two in a word.
            u32 xs[TILES][16];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const int token = n * 8 + group;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint4 some = make_uint4(0, 0, 0, 0);
                    if (token < work.tokens) {
#if STAGED
                        some = vectors[token * (columns + PADDING) / 8 + step * 16 + 4 * i + quarter];
#else
                        const int first = CODES == INT4 ? quarter * 32 + 8 * i : i / 2 * 64 + quarter * 16 + i % 2 * 8;
                        some = *(const uint4 *)(work.x + (long long)token * columns + step * COLUMNS + first);
#endif
                    }
                    xs[n][4 * i] = some.x, xs[n][4 * i + 1] = some.y, xs[n][4 * i + 2] = some.z, xs[n][4 * i + 3] = some.w;
                }
            }
            float part[MATRICES][TILES][4];
#pragma unroll
            for (int m = 0; m < MATRICES; m++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) part[m][n][i] = GROUPED ? 0.0f : total[m][n][i];
            u32 minus[MATRICES][2];
            float scales[MATRICES][2];
#pragma unroll
            for (int m = 0; m < MATRICES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int holder = GROUPED ? (lane & ~3) | d : lane;
                    scales[m][r] = GROUPED ? __shfl_sync(0xffffffffu, held.scales[m][r], holder) : 1.0f;
#if ZEROS
                    const float zero = (float)__shfl_sync(0xffffffffu, held.zeros[m][r], holder);
                    minus[m][r] = CODES == INT4 ? both(-NIBBLE_BASE - zero) : both(-zero);
#else
                    minus[m][r] = MINUS_MIDDLE;
#endif
                }
#pragma unroll
            for (int s = 0; s < 8; s++) {
                u32 b[TILES][2];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    // int4: columns c and c + 16; bytes: columns c and c + 2.
                    u32 one = CODES == INT4 ? xs[n][s] : xs[n][2 * s], other = CODES == INT4 ? xs[n][s + 8] : xs[n][2 * s + 1];
                    b[n][0] = __byte_perm(one, other, 0x5410);
                    b[n][1] = __byte_perm(one, other, 0x7632);
                }
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    u32 a[2][2];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
#if CODES == INT4
                        // Columns 4 lane + word: words 2 (s % 2) and the next, lane s / 2.
                        a[r][0] = nibbles(word_of(ahead[d].codes[m][r], 2 * (s % 2)), s / 2, minus[m][r]);
                        a[r][1] = nibbles(word_of(ahead[d].codes[m][r], 2 * (s % 2) + 1), s / 2, minus[m][r]);
#else
                        u32 word = word_of(ahead[d].codes[m][r], s);
                        a[r][0] = bytes(word, false);
                        a[r][1] = bytes(word, true);
#if ZEROS
                        a[r][0] = fma2(a[r][0], ONE, minus[m][r]);
                        a[r][1] = fma2(a[r][1], ONE, minus[m][r]);
#endif
#endif
                    }
#pragma unroll
                    for (int n = 0; n < TILES; n++)
                        mma(part[m][n], a[0][0], a[1][0], a[0][1], a[1][1], b[n][0], b[n][1]);
                }
            }
#pragma unroll
            for (int m = 0; m < MATRICES; m++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#if GROUPED
                        total[m][n][i] += part[m][n][i] * scales[m][i / 2];
#else
                        total[m][n][i] = part[m][n][i];
#endif
                    }
            if (step + DEPTH < end) fetch(ahead[d], rows, step + DEPTH);
        }
#if GROUPED
        held = after;
#endif
    }

#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][m][group + 8 * (i / 2)][8 * n + 2 * quarter + i % 2] = total[m][n][i];
    __syncthreads();

    for (int at = thread; at < 16 * work.tokens; at += THREADS) {
        const int token = at / 16, place = at % 16, row = first_row + place;
        if (row >= rows_there) continue;
        float y[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            y[m] = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) y[m] += sums[w][m][place][token];
#if !GROUPED
            y[m] *= scale_at(rows.scales[m], row / work.scale_rows * work.groups);
#endif
        }
        const long long target = (long long)token * work.row_stride + base + row;
#if GATED
        // The tanh approximation of GELU is x sigmoid(2 u).
        const float gate = wide(narrow(y[0])), up = wide(narrow(y[1]));
        const float turned = work.gelu ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
        const float act = wide(narrow(gate / (1.0f + expf(-turned))));
        ((u16 *)work.out)[target] = narrow(act * up);
#else
        float out = y[0];
        if (work.matrices[which].bias) out += wide(work.matrices[which].bias[row]);
        if (work.residual) out = wide(narrow(out)) + wide(work.residual[target]);
        const u16 rounded = narrow(out);
        if (work.out_is_float)
            ((float *)work.out)[target] = wide(rounded);
        else
            ((u16 *)work.out)[target] = rounded;
#endif
    }
}
