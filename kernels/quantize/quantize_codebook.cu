// quantize_codebook: values [blocks * 32] -> absmax [blocks], bit planes [blocks, BITS], bit for bit as NumPy encodes.
//
// A lane owns eight values, four lanes own a block; a warp quantizes 32 blocks in four passes. A table of bins gives
// the edge to compare a value with; where a bin has several edges, bisection finds it. Comparisons use products with
// exact signs instead of divisions (qgemm/codec/codebook.py). A lane joins its codes to a byte of each plane, and four
// lanes transpose their bytes to planes.
// `refused` gets the least number of a block with NaN or infinity, or whose absmax has no finite code.
// Config: that of planes.cuh, and In (float, half, bf16).
#include "quantize/planes.cuh"

namespace qgemm {

// By the type of a format's absmax: an absmax from limit_of on has no code; encode rounds it.
__device__ inline float limit_of(u8) { return 31.5f; }
__device__ inline float limit_of(half) { return 65520.0f; }
__device__ inline void encode(float absmax, half& code) { code = __float2half_rn(absmax); }
// To nearest, ties to even codes: below 2^-10 a multiple of 2^-14, else the leading bits of a float.
__device__ inline void encode(float absmax, u8& code) {
    const u32 bits = __float_as_uint(absmax);
    const u32 rounded = (bits + 0x3ffff + (bits >> 19 & 1)) >> 19;
    code = absmax < 0x1p-10f ? u8(__float2int_rn(absmax * 0x1p14f)) : u8(rounded - (116 << 4));
}

// Zeros beyond the last block.
template <int LANE_WEIGHTS>
__device__ inline void load_values(float (&to)[LANE_WEIGHTS], const float* from, bool inside) {
    float4 words[LANE_WEIGHTS / 4] = {};
    if (inside)
        for (int i = 0; i < LANE_WEIGHTS / 4; ++i) words[i] = __ldcs(reinterpret_cast<const float4*>(from) + i);
    for (int i = 0; i < LANE_WEIGHTS / 4; ++i) reinterpret_cast<float4*>(to)[i] = words[i];
}
template <int LANE_WEIGHTS, class T>
__device__ inline void load_values(float (&to)[LANE_WEIGHTS], const T* from, bool inside) {
    uint4 words = {};
    if (inside) words = __ldcs(reinterpret_cast<const uint4*>(from));
    const T* values = reinterpret_cast<const T*>(&words);
    for (int j = 0; j < LANE_WEIGHTS; ++j) to[j] = to_float(values[j]);
}

// Config: In, Codebook.
template <class Base>
struct QuantizeConfig : PlanesConfig<Base> {
    using Book = typename Base::Codebook;
    static constexpr int AT_ONCE = 32 / PlanesConfig<Base>::LANES;                      // blocks of a warp
    static constexpr bool SHORT = sizeof(typename Base::In) == 2 && Book::SHORT_EDGES;  // one product decides
    static constexpr float SCALE = SHORT ? 1.0f : Book::SCALE;                          // multiplies values
};

// Edges that values are compared with. Entries lie in different banks of shared memory, so lookups do not conflict.
template <bool SHORT>
struct Edges {
    float edges[32], halves[32];

    // Negative, or -0, where x / d, rounded to a float, is above the edge `offset` bytes from the first; x is scaled.
    __device__ float sign_above(float x, float d, int offset) const {
        const float sign = __fmaf_rn(entry(edges, offset), d, -x);
        return SHORT ? sign : __fmaf_rn(entry(halves, offset), d, sign);
    }
};

// The bin of a value times per_bin (qgemm/codec/codebook.py); NaN gets some bin. The last place of the sum is 1.
template <class Book>
__device__ inline u32 bin_of(float value, float per_bin) {
    return __float_as_uint(__fmaf_rn(value, per_bin, 0x1.8p23f + Book::BINS / 4)) & (Book::BINS - 1);
}

// One byte of each of four words, chosen by the selector.
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
    constexpr int BITS = Config::BITS, LANE_WEIGHTS = Config::LANE_WEIGHTS, LANES = Config::LANES,
                  THREADS = Config::THREADS;
    constexpr int AT_ONCE = Config::AT_ONCE;
    constexpr bool SHORT = Config::SHORT;
    constexpr float SCALE = Config::SCALE;
    __shared__ Edges<SHORT> edges;
    __shared__ signed char before[Book::BINS];  // times 4; NVRTC 13.0 masks every load of unsigned bytes
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
        const int count = int(min(blocks - first, i64(32)));  // blocks from `first` on; may be negative
        const In* from = x + (first * Blocks::WEIGHTS + lane * LANE_WEIGHTS);
        u32* to = planes + (first * BITS + lane);
        u32 own = 0;  // bits of the absmax of pass number `lane`
#pragma unroll
        for (int pass = 0; pass < LANES; ++pass) {
            const int block = pass * AT_ONCE;
            float values[LANE_WEIGHTS];
            load_values(values, from + block * Blocks::WEIGHTS, block < count);

            u32 largest = 0;  // magnitudes compare like their bits, and NaN lies above infinity
#pragma unroll
            for (int j = 0; j < LANE_WEIGHTS; ++j) largest = max(largest, __float_as_uint(values[j]) & 0x7fffffff);
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            if (pass == lane) own = largest;
            const float d = fmaxf(__uint_as_float(largest), Book::MIN_ABSMAX);
            const float per_bin = Book::BINS / 4 / SCALE * reciprocal(d);

            u32 codes[LANE_WEIGHTS / 4];  // in bytes
#pragma unroll
            for (int i = 0; i < LANE_WEIGHTS / 4; ++i) {
                u32 below[4], above[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float value = values[4 * i + j] * SCALE;
                    int offset = Book::APART ? before[bin_of<Book>(value, per_bin)] : 0;  // edges below, in bytes
#pragma unroll
                    for (int half = Book::APART ? 4 : 4 * Book::CODES / 2; half > 4; half /= 2)
                        if (__float_as_int(edges.sign_above(value, d, offset + half - 4)) < 0) offset += half;
                    below[j] = offset;
                    above[j] = __float_as_uint(edges.sign_above(value, d, offset));
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
