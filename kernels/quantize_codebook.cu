// quantize_codebook: values [blocks * 32] -> absmax [blocks], bit planes [blocks, BITS], bit for bit as NumPy encodes.
//
// A lane owns eight values, four lanes a block. The number of edges below x / absmax is found by halving or, where edges lie
// far enough apart, from a table and one comparison; what stands for it, bit b of its code in byte b, gathers a byte of
// each plane in a lane, and four lanes transpose their bytes to planes.
// `refused` gets the least number of a block that holds NaN or infinity or whose absmax has no finite code.
// Template: Format, In (float, half, bf16), THREADS.
#include "planes.cuh"

// What a format's absmax becomes, and from where on it has no code.
__device__ inline float limit_of(u8) { return 31.5f; }
__device__ inline float limit_of(half) { return 65520.0f; }
__device__ inline void encode(float absmax, half& code) { code = __float2half_rn(absmax); }
// To nearest, of two the even code: below 2^-10 a multiple of 2^-14, else the leading bits of a float.
__device__ inline void encode(float absmax, u8& code) {
    const u32 bits = __float_as_uint(absmax);
    const u32 rounded = (bits + 0x3ffff + (bits >> 19 & 1)) >> 19;
    code = absmax < 0x1p-10f ? u8(__float2int_rn(absmax * 0x1p14f)) : u8(rounded - (116 << 4));
}

constexpr float LEAST_DIVISOR = 1e-8f;
template <class T>
constexpr bool TINY = true;  // whether a number can be below 2^-90
template <>
constexpr bool TINY<half> = false;

// Values / d, rounded correctly: products with the rounded reciprocal, corrected by their remainders (Markstein, 1990),
// twice, or once where both have at most 11 bits: such quotients do not come so close to the middle between two floats
// that they could be rounded to the wrong one. The remainders of the smallest values have no place in a float.
__device__ inline void divide(float (&values)[EACH], float d) {
    constexpr bool SHORT = sizeof(In) == 2;
    if (TINY<In>) {
        u32 least = ~0u;  // magnitude but for zero, less one
#pragma unroll
        for (int j = 0; j < EACH; ++j) least = min(least, (__float_as_uint(values[j]) & 0x7fffffff) - 1);
        if (least < __float_as_uint(0x1p-90f) || (SHORT && d == LEAST_DIVISOR)) {
            for (float& value : values) value = __fdiv_rn(value, d);
            return;
        }
    }
    const float reciprocal = __frcp_rn(d);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        float q = values[j] * reciprocal;
#pragma unroll
        for (int i = 0; i < (SHORT ? 1 : 2); ++i) q = __fmaf_rn(__fmaf_rn(-q, d, values[j]), reciprocal, q);
        values[j] = q;
    }
}

constexpr bool BINNED = Book::APART && BITS > 2;  // of four levels halving is as fast

// The bin of a value in -1..1 (qgemm/formats/codebook.py), in bytes; that of NaN is one too. The sum's last place is 1.
__device__ inline u32 bin_of(float value) {
    return __float_as_uint(__fmaf_rn(value, 128.0f, 0x1.8p23f + 128.0f)) & 4 * (Book::BINS - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_codebook(const In* __restrict__ x, Absmax* __restrict__ absmax, u32* __restrict__ planes,
                      unsigned long long* refused, i64 blocks) {
    __shared__ float edges[32];  // one bank each: no lookup waits for another
    __shared__ u32 spread[32], fifth[32], before[Book::BINS];
    static_assert(Book::BINS <= THREADS, "a thread fills a bin");
    if (BINNED && threadIdx.x < Book::BINS) before[threadIdx.x] = 4 * Book::before(threadIdx.x);
    if (threadIdx.x < Book::CODES) {
        const u32 code = Book::code(threadIdx.x);
        edges[threadIdx.x] = Book::edge(threadIdx.x);
        spread[threadIdx.x] = (code & 1) | (code & 2) << 7 | (code & 4) << 14 | (code & 8) << 21;
        fifth[threadIdx.x] = code >> 4;
    }
    __syncthreads();
    for_chunks(blocks, [&](i64 thread, i64 block, int lane) {
        const bool inside = block < blocks;
        float values[EACH] = {};
        if (inside) load_values(values, x + thread * EACH);

        u32 most = 0;  // magnitudes order like their bits, and NaN lies above infinity
#pragma unroll
        for (int j = 0; j < EACH; ++j) most = max(most, __float_as_uint(values[j]) & 0x7fffffff);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const float largest = __uint_as_float(most);
        divide(values, fmaxf(largest, LEAST_DIVISOR));

        u32 bytes = 0, last = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            u32 below = BINNED ? entry(before, bin_of(values[j])) : 0;  // edges, in bytes
#pragma unroll
            for (int half = BINNED ? 4 : 4 * Book::CODES / 2; half >= 4; half /= 2)
                if (values[j] > entry(edges, below + half - 4)) below += half;
            bytes += entry(spread, below) << j;
            if (BITS == 5) last += entry(fifth, below) << j;
        }
        bytes = transpose_bytes(bytes, lane);
        if (BITS == 5) {
            last <<= 8 * lane;
            last |= __shfl_xor_sync(~0u, last, 1);
            last |= __shfl_xor_sync(~0u, last, 2);
        }
        if (!inside) return;
        if (lane < BITS) planes[block * BITS + lane] = bytes;
        if (lane == 0) {
            if (BITS == 5) planes[block * BITS + 4] = last;
            Absmax code;
            encode(largest, code);
            absmax[block] = code;
            if (!(largest < limit_of(code))) atomicMin(refused, block);
        }
    });
}
