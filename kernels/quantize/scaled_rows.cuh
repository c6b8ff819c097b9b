// ScaledRows: x [m, k] as halves, each row times a power of two that brings its largest magnitude to at least 2^14 and
// below 2^15. A row of pitch(k) halves holds k values, then the inverse of its power of two as a float.
//
// Values of bf16 become halves exactly, unless they are below 2^-32 of their row's largest: these are rounded to
// multiples of 2^-40 of it. So the kernels of half multiply x of bf16, with weights that are more exact than bf16.
// qgemm/cuda/layout/scaled_rows.py has the same layout.
#pragma once

#include "ptx/redux_sync.cuh"

namespace qgemm {

struct ScaledRows {
    static constexpr int LINE = 64;  // halves of a cache line; boxes of x that straddle lines load at half the speed
    static constexpr int TOP = 14;   // exponent of a row's largest magnitude
    void* rows;
    i64 k;

    __device__ static i64 pitch(i64 k) { return (k + 2 + LINE - 1) / LINE * LINE; }
    __device__ half* row(i64 number) const { return static_cast<half*>(rows) + number * pitch(k); }
    // The float after the values of a row.
    __device__ float& factor(i64 number) const { return *reinterpret_cast<float*>(row(number) + k); }

    // x: a row of k bf16. THREADS threads call it, each with its `thread`. They hold the first AT_ONCE chunks of 16
    // bytes each in registers; of a longer row they read the rest twice. largest_of: a function that returns the
    // largest value over all threads.
    template <int THREADS, int AT_ONCE, class Largest>
    __device__ __forceinline__ void scale(const uint4* x, i64 number, int thread, Largest largest_of) const {
        const int count = int(k / CHUNK);
        uint4 chunks[AT_ONCE];
        u32 pair = 0;  // the largest magnitudes of values of even and of odd columns, as bits
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int chunk = i * THREADS + thread;
            chunks[i] = chunk < count ? x[chunk] : uint4{};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) pair = larger(pair, chunks[i]);
        for (int chunk = AT_ONCE * THREADS + thread; chunk < count; chunk += THREADS) pair = larger(pair, x[chunk]);
        const int exponent = exponent_of(largest_of(max(pair & 0xffff, pair >> 16)));
        uint4* to = reinterpret_cast<uint4*>(row(number));
        const float power = two_to(-exponent);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (const int chunk = i * THREADS + thread; chunk < count) to[chunk] = scaled(chunks[i], power);
        for (int chunk = AT_ONCE * THREADS + thread; chunk < count; chunk += THREADS)
            to[chunk] = scaled(x[chunk], power);
        if (thread == 0) factor(number) = two_to(exponent);
    }

private:
    static constexpr int CHUNK = 8;  // values of 16 bytes

    // Halves are values times 2^-exponent. bits: the largest of a row's values, without sign. The bounds keep both
    // powers of two within normal floats; infinities and NaN stay as they are.
    __device__ static int exponent_of(u32 bits) { return min(max(int(bits >> 7), TOP + 1), 254) - 127 - TOP; }
    __device__ static u32 larger(u32 pair, u32 values) { return __vmaxu2(pair, values & 0x7fff7fff); }
    __device__ static u32 larger(u32 pair, const uint4& chunk) {
        return larger(larger(larger(larger(pair, chunk.x), chunk.y), chunk.z), chunk.w);
    }
    __device__ static u32 scaled(u32 values, float power) {
        const half2 pair =
            __floats2half2_rn(__uint_as_float(values << 16) * power, __uint_as_float(values & 0xffff0000) * power);
        return *reinterpret_cast<const u32*>(&pair);
    }
    __device__ static uint4 scaled(const uint4& chunk, float power) {
        return {scaled(chunk.x, power), scaled(chunk.y, power), scaled(chunk.z, power), scaled(chunk.w, power)};
    }
};

}  // namespace qgemm
