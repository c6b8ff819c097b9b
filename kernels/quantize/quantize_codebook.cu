// quantize_codebook: values [blocks * 32] -> absmax [blocks], bit planes [blocks, BITS], bit for bit as NumPy encodes.
//
// A lane owns eight values, four lanes a block; a warp takes 32 blocks in four turns. A table tells the edge that a
// value has to be compared with, or halving finds it where edges lie too close together for that. Nothing is divided:
// the comparisons are products whose sign is exact (qgemm/codec/codebook.py). Codes become a byte of each plane in a
// lane, and four lanes transpose their bytes to planes.
// `refused` gets the least number of a block that holds NaN or infinity or whose absmax has no finite code.
// Config: that of planes.cuh, and In (float, half, bf16).
#include "quantize/planes.cuh"

namespace qgemm {

// The type of a format's absmax, by its argument: from limit_of on it has no code; encode rounds it.
__device__ inline float limit_of(u8) { return 31.5f; }
__device__ inline float limit_of(half) { return 65520.0f; }
__device__ inline void encode(float absmax, half& code) { code = __float2half_rn(absmax); }
// To nearest, of two the even code: below 2^-10 a multiple of 2^-14, else the leading bits of a float.
__device__ inline void encode(float absmax, u8& code) {
    const u32 bits = __float_as_uint(absmax);
    const u32 rounded = (bits + 0x3ffff + (bits >> 19 & 1)) >> 19;
    code = absmax < 0x1p-10f ? u8(__float2int_rn(absmax * 0x1p14f)) : u8(rounded - (116 << 4));
}

// Zeros beyond the last block.
template <int EACH>
__device__ inline void load_values(float (&to)[EACH], const float* from, bool inside) {
    float4 words[EACH / 4] = {};
    if (inside)
        for (int i = 0; i < EACH / 4; ++i) words[i] = __ldcs(reinterpret_cast<const float4*>(from) + i);
    for (int i = 0; i < EACH / 4; ++i) reinterpret_cast<float4*>(to)[i] = words[i];
}
template <int EACH, class T>
__device__ inline void load_values(float (&to)[EACH], const T* from, bool inside) {
    uint4 words = {};
    if (inside) words = __ldcs(reinterpret_cast<const uint4*>(from));
    const T* values = reinterpret_cast<const T*>(&words);
    for (int j = 0; j < EACH; ++j) to[j] = to_float(values[j]);
}

// Config: In, Codebook.
template <class Base>
struct QuantizeConfig : PlanesConfig<Base> {
    using Book = typename Base::Codebook;
    static constexpr int AT_ONCE = 32 / PlanesConfig<Base>::LANES;                      // blocks of a warp
    static constexpr bool SHORT = sizeof(typename Base::In) == 2 && Book::SHORT_EDGES;  // one product tells
    static constexpr float SCALE = SHORT ? 1.0f : Book::SCALE;                          // of values
};

// What values are compared with. A bank of shared memory to an entry: no lookup waits for another.
template <bool SHORT>
struct Edges {
    float edges[32], halves[32];

    // Negative, if only -0, where x / d, rounded to a float, is above the edge `at` bytes from the first; x is scaled.
    __device__ float sign_above(float x, float d, int at) const {
        const float sign = __fmaf_rn(entry(edges, at), d, -x);
        return SHORT ? sign : __fmaf_rn(entry(halves, at), d, sign);
    }
};

// The bin of a value times per_bin (qgemm/codec/codebook.py); that of NaN is one too. The sum's last place is 1.
template <class Book>
__device__ inline u32 bin_of(float value, float per_bin) {
    return __float_as_uint(__fmaf_rn(value, per_bin, 0x1.8p23f + Book::BINS / 4)) & (Book::BINS - 1);
}

// One byte of each of four words, the one that the selector says.
__device__ inline u32 gather(const u32 (&words)[4], u32 selector) {
    return __byte_perm(__byte_perm(words[0], words[1], selector), __byte_perm(words[2], words[3], selector), 0x5410);
}

// Bit b of nibble n -> bit n of byte b, the low nibbles of all bytes before the high ones.
__device__ inline u32 transpose_nibbles(u32 word) {
    u32 moved = (word ^ word >> 7) & 0x00aa00aa;
    word ^= moved ^ moved << 7;
    moved = (word ^ word >> 14) & 0x0000cccc;
    return word ^ moved ^ moved << 14;
}

template <class Config>
__device__ __forceinline__ void quantize_codebook(const typename Config::In* __restrict__ x,
                                                  typename Config::Absmax* __restrict__ absmax,
                                                  u32* __restrict__ planes, unsigned long long* refused, i64 blocks) {
    using Absmax = typename Config::Absmax;
    using Book = typename Config::Codebook;
    using Blocks = typename Config::Blocks;
    using In = typename Config::In;
    constexpr int BITS = Config::BITS, EACH = Config::EACH, LANES = Config::LANES, THREADS = Config::THREADS;
    constexpr int AT_ONCE = Config::AT_ONCE;
    constexpr bool SHORT = Config::SHORT;
    constexpr float SCALE = Config::SCALE;
    __shared__ Edges<SHORT> edges;
    __shared__ signed char before[Book::BINS];  // times 4; unsigned, NVRTC 13.0 masks every one that it has loaded
    __shared__ u8 numbers[32];
    static_assert(Book::BINS <= THREADS, "a thread fills a bin");
    if (threadIdx.x < Book::BINS) before[threadIdx.x] = 4 * Book::before(threadIdx.x);
    if (threadIdx.x < Book::CODES) {
        edges.edges[threadIdx.x] = SHORT ? Book::short_edge(threadIdx.x) : Book::edge(threadIdx.x);
        edges.halves[threadIdx.x] = Book::halfway(threadIdx.x);
        numbers[threadIdx.x] = Book::code(threadIdx.x);
    }
    __syncthreads();
    const int lane = threadIdx.x % LANES, in_cta = threadIdx.x / 32 * 32 + threadIdx.x % 32 / LANES;
    for (i64 of_cta = i64(blockIdx.x) * THREADS; of_cta < blocks; of_cta += i64(gridDim.x) * THREADS) {
        const i64 first = of_cta + in_cta;
        const int count = int(min(blocks - first, i64(32)));  // from there on; may be negative
        const In* from = x + (first * Blocks::WEIGHTS + lane * EACH);
        u32* to = planes + (first * BITS + lane);
        u32 own = 0;  // bits of the absmax of the turn that has the lane's number
#pragma unroll
        for (int turn = 0; turn < LANES; ++turn) {
            const int block = turn * AT_ONCE;
            float values[EACH];
            load_values(values, from + block * Blocks::WEIGHTS, block < count);

            u32 most = 0;  // magnitudes order like their bits, and NaN lies above infinity
#pragma unroll
            for (int j = 0; j < EACH; ++j) most = max(most, __float_as_uint(values[j]) & 0x7fffffff);
            most = max(most, __shfl_xor_sync(~0u, most, 1));
            most = max(most, __shfl_xor_sync(~0u, most, 2));
            if (turn == lane) own = most;
            const float d = fmaxf(__uint_as_float(most), Book::LEAST);
            const float per_bin = Book::BINS / 4 / SCALE * reciprocal(d);

            u32 codes[EACH / 4];  // in bytes
#pragma unroll
            for (int i = 0; i < EACH / 4; ++i) {
                u32 below[4], above[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float value = values[4 * i + j] * SCALE;
                    int at = Book::APART ? before[bin_of<Book>(value, per_bin)] : 0;  // edges below, in bytes
#pragma unroll
                    for (int half = Book::APART ? 4 : 4 * Book::CODES / 2; half > 4; half /= 2)
                        if (__float_as_int(edges.sign_above(value, d, at + half - 4)) < 0) at += half;
                    below[j] = at;
                    above[j] = __float_as_uint(edges.sign_above(value, d, at));
                }
                codes[i] = (gather(below, 0x40) >> 2) + (gather(above, 0x73) >> 7 & 0x01010101);
                if (!Book::RANKS) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) below[j] = numbers[codes[i] >> 8 * j & 31];
                    codes[i] = gather(below, 0x40);
                }
            }
            constexpr u32 LOW = BITS < 5 ? ~0u : 0x0f0f0f0f;
            const u32 bytes = transpose_bytes(transpose_nibbles((codes[0] & LOW) | (codes[1] & LOW) << 4), lane);
            u32 last = 0;
            if (BITS == 5) {
                // Bits of values 0 to 3 and 4 to 7, 8 apart, meet in bits 21 to 28 of the product.
                const u32 apart = (codes[0] & 0x10101010) >> 4 | (codes[1] & 0x10101010);
                last = (apart * 0x00204081 >> 21 & 0xff) << 8 * lane;
                last |= __shfl_xor_sync(~0u, last, 1);
                last |= __shfl_xor_sync(~0u, last, 2);
            }
            if (block < count && lane < BITS) to[block * BITS] = bytes;
            if (BITS == 5 && block < count && lane == 0) to[block * BITS + 4] = last;
        }
        const int block = lane * AT_ONCE;
        if (block < count) {
            const float largest = __uint_as_float(own);
            Absmax code;
            encode(largest, code);
            absmax[first + block] = code;
            if (!(largest < limit_of(code))) atomicMin(refused, first + block);
        }
    }
}

using Quantize = QuantizeConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Quantize::THREADS)
    quantize_codebook(const qgemm::Quantize::In* __restrict__ x, qgemm::Quantize::Absmax* __restrict__ absmax,
                      qgemm::u32* __restrict__ planes, unsigned long long* refused, qgemm::i64 blocks) {
    qgemm::quantize_codebook<qgemm::Quantize>(x, absmax, planes, refused, blocks);
}
