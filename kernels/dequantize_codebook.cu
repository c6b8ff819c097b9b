// dequantize_codebook: absmax [blocks], bit planes [blocks, BITS] -> values [blocks * 32], w = absmax * codebook[q] exact in
// float, rounded once to Out.
//
// A lane owns eight values, four lanes a block: they load a plane each and transpose their bytes.
// Template: Format, Out (float, half, bf16), THREADS.
#include "planes.cuh"

__device__ inline float decode(half code) { return __half2float(code); }
// Exponent and mantissa stand in a float as in the byte, but for the bias; that is exact, as are subnormal ones.
__device__ inline float decode(u8 code) { return __uint_as_float(u32(code) << 19) * 0x1p116f; }

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_codebook(const Absmax* __restrict__ absmax, const u32* __restrict__ planes, Out* __restrict__ values,
                        i64 blocks) {
    __shared__ float levels[32];  // one bank each: no lookup waits for another
    if (threadIdx.x < Book::CODES) levels[threadIdx.x] = Book::level(threadIdx.x);
    __syncthreads();
    for_chunks(blocks, [&](i64 thread, i64 its_block, int lane) {
        const i64 block = min(its_block, blocks - 1);
        const u32 bytes = transpose_bytes(lane < BITS ? planes[block * BITS + lane] : 0, lane);
        const u32 last = BITS == 5 ? planes[block * BITS + 4] >> 8 * lane : 0;
        const float d = decode(absmax[block]);
        alignas(16) Out made[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            // Bits j of the four bytes meet in bits 24 to 27 of the product.
            u32 code = ((bytes >> j & 0x01010101) * 0x01020408) >> 24 & 15;
            if (BITS == 5) code |= (last >> j & 1) << 4;
            made[j] = from_float<Out>(__fmul_rn(levels[code], d));
        }
        if (its_block < blocks) {
#pragma unroll
            for (int i = 0; i < int(sizeof(made) / 16); ++i)
                reinterpret_cast<uint4*>(values + thread * EACH)[i] = reinterpret_cast<const uint4*>(made)[i];
        }
    });
}
