// mma.sync of e4m3 floats (sm_89 and later). sm_90 and sm_100 lack the instruction: ptxas converts both operands to
// halves, which is half as fast as the same product of int8.
#pragma once

#include "mma.cuh"

namespace qgemm {

// c += a (16 x 32) @ b (32 x 8) in float; a: rows g and g + 8 of the first step, then of the second.
__device__ inline void mma_m16n8k32(float (&c)[4], const Bytes& first, const Bytes& second, const uint2& b) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(first.row[0]), "r"(first.row[1]), "r"(second.row[0]), "r"(second.row[1]), "r"(b.x), "r"(b.y));
#else
    host_mma<32, 4>(c, Words<4>{first.row[0], first.row[1], second.row[0], second.row[1]}, Words<2>{b.x, b.y},
                    host_e4m3);
#endif
}

}  // namespace qgemm
