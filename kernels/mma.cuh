// Tensor core instructions of one warp, sm_80 and later. A is the weights' fragment, B the activations', C float sums.
#pragma once

#include "fragment.cuh"

// What a lane holds of a 16 x 8 result: rows g (sum[0], sum[1]) and g + 8 (sum[2], sum[3]), columns 2t and 2t + 1.
struct Sums {
    float sum[4];
};

// c += a (16 x 16) @ b (16 x 8); b: column g, rows (2t, 2t + 1) and (2t + 8, 2t + 9).
template <class T>
__device__ inline void mma_m16n8k16(Sums& c, const Fragment& a, const u32 (&b)[2]);

template <>
__device__ inline void mma_m16n8k16<half>(Sums& c, const Fragment& a, const u32 (&b)[2]) {
    const u32* w = reinterpret_cast<const u32*>(a.a);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.sum[0]), "+f"(c.sum[1]), "+f"(c.sum[2]), "+f"(c.sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(b[0]), "r"(b[1]));
}
