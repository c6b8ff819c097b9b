// dequantize_codebook: absmax [blocks], bit planes [blocks, BITS] -> values [blocks * 32], w = absmax * codebook[q]
// exact in float, rounded once to Out.
//
// A lane owns eight values, four lanes own a block: each loads a plane, and they transpose their bytes. Eight floats
// are 32 bytes, so two neighbours each decode half of both lanes' values: then their stores cover whole sectors.
// Config: that of planes.cuh, and Out (float, half, bf16).
#include "quantize/planes.cuh"

namespace qgemm {

__device__ inline float decode(half code) { return __half2float(code); }
// Exponent and mantissa of the byte become those of a float with another bias: exact, subnormal numbers included.
__device__ inline float decode(u8 code) { return __uint_as_float(u32(code) << 19) * 0x1p116f; }

template <class Config>
__device__ __forceinline__ void dequantize_codebook(const typename Config::Absmax* __restrict__ absmax,
                                                    const u32* __restrict__ planes,
                                                    typename Config::Out* __restrict__ values, i64 blocks) {
    using Book = typename Config::Codebook;
    using Out = typename Config::Out;
    constexpr int BITS = Config::BITS, LANE_WEIGHTS = Config::LANE_WEIGHTS, LANES = Config::LANES,
                  THREADS = Config::THREADS;
    constexpr int AT_ONCE = 16 / sizeof(Out), STORES = LANE_WEIGHTS / AT_ONCE;  // values of a store, stores of a lane
    __shared__ float levels[32];  // levels lie in different banks, so lookups do not conflict
    if (threadIdx.x < Book::CODES) levels[threadIdx.x] = Book::level(threadIdx.x);
    __syncthreads();
    for (i64 first = i64(blockIdx.x) * THREADS; first < blocks * LANES; first += i64(gridDim.x) * THREADS) {
        const i64 thread = first + threadIdx.x, its_block = thread / LANES;
        const int lane = int(threadIdx.x) % LANES;
        const i64 block = min(its_block, blocks - 1);
        const u32 bytes = transpose_bytes(lane < BITS ? planes[block * BITS + lane] : 0, lane);
        const u32 last = BITS == 5 ? planes[block * BITS + 4] : 0;
        const float d = decode(absmax[block]);
#pragma unroll
        for (int store = 0; store < STORES; ++store) {
            // The first of two stores writes values of the even lane.
            const int owner = STORES == 1 ? lane : lane / 2 * 2 + store, first = STORES == 1 ? 0 : lane % 2 * AT_ONCE;
            const u32 own = (STORES == 1 ? bytes : __shfl_sync(~0u, bytes, owner, LANES)) >> first;
            const u32 fifth = last >> (8 * owner + first);
            alignas(16) Out weights[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                // Bits j of the four bytes meet in bits 24 to 27 of the product; shifted, they are an offset in bytes.
                u32 offset = ((own >> j & 0x01010101) * 0x01020408) >> 22;
                if (BITS == 5) offset |= (j < 6 ? fifth << (6 - j) : fifth >> (j - 6)) & 64;
                weights[j] = from_float<Out>(__fmul_rn(entry(levels, offset), d));
            }
            const i64 to = (thread - lane + owner) * LANE_WEIGHTS + first;
            if (its_block < blocks)
                __stcs(reinterpret_cast<uint4*>(values + to), *reinterpret_cast<const uint4*>(weights));
        }
    }
}

using Planes = PlanesConfig<Config>;

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(qgemm::Planes::THREADS)
    dequantize_codebook(const qgemm::Planes::Absmax* __restrict__ absmax, const qgemm::u32* __restrict__ planes,
                        qgemm::Planes::Out* __restrict__ values, qgemm::i64 blocks) {
    qgemm::dequantize_codebook<qgemm::Planes>(absmax, planes, values, blocks);
}
