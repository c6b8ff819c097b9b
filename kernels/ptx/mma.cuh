// mma.sync (sm_80 and later): the matrix product of a warp, c += a @ b. a: weights; b: activations; c: accumulators.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// A lane's share of a 16 x 8 result: rows g (sum[0], sum[1]) and g + 8 (sum[2], sum[3]), columns 2t and 2t + 1.
struct Acc {
    float sum[4];
};

// c += a (16 x 16) @ b (16 x 8); b: column g, rows (2t, 2t + 1) and (2t + 8, 2t + 9).
template <class T>
__device__ inline void mma_m16n8k16(Acc& c, const Fragment& a, const u32 (&b)[2]);

template <>
__device__ inline void mma_m16n8k16<half>(Acc& c, const Fragment& a, const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
    const u32* w = reinterpret_cast<const u32*>(a.a);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.sum[0]), "+f"(c.sum[1]), "+f"(c.sum[2]), "+f"(c.sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(b[0]), "r"(b[1]));
#else
    const u32* w = reinterpret_cast<const u32*>(a.a);
    host_mma<16, 2>(c.sum, Words<4>{w[0], w[1], w[2], w[3]}, Words<2>{b[0], b[1]}, host_half);
#endif
}

template <>
__device__ inline void mma_m16n8k16<bf16>(Acc& c, const Fragment& a, const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
    const u32* w = reinterpret_cast<const u32*>(a.a);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.sum[0]), "+f"(c.sum[1]), "+f"(c.sum[2]), "+f"(c.sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(b[0]), "r"(b[1]));
#else
    const u32* w = reinterpret_cast<const u32*>(a.a);
    host_mma<16, 2>(c.sum, Words<4>{w[0], w[1], w[2], w[3]}, Words<2>{b[0], b[1]}, host_bf16);
#endif
}

// c += a (16 x 8) @ b (8 x 8) of bf16; a: columns 2t and 2t + 1 of rows g and g + 8; b: column g, rows 2t and 2t + 1.
__device__ inline void mma_m16n8k8(Acc& c, const u32 (&a)[2], u32 b) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c.sum[0]), "+f"(c.sum[1]), "+f"(c.sum[2]), "+f"(c.sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#else
    host_mma<8, 2>(c.sum, Words<2>{a[0], a[1]}, Words<1>{b}, host_bf16);
#endif
}

// c += a (16 x 32) @ b (32 x 8) in integers; a: rows g and g + 8 of the first step, then of the second.
__device__ inline void mma_m16n8k32(int (&c)[4], const Bytes& first, const Bytes& second, const uint2& b) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(first.row[0]), "r"(first.row[1]), "r"(second.row[0]), "r"(second.row[1]), "r"(b.x), "r"(b.y));
#else
    host_mma<32, 4>(c, Words<4>{first.row[0], first.row[1], second.row[0], second.row[1]}, Words<2>{b.x, b.y}, host_s8);
#endif
}

// mma_m16n8k32 with unsigned bytes in a.
__device__ inline void mma_m16n8k32_u8(int (&c)[4], const Bytes& first, const Bytes& second, const uint2& b) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(first.row[0]), "r"(first.row[1]), "r"(second.row[0]), "r"(second.row[1]), "r"(b.x), "r"(b.y));
#else
    host_mma<32, 4>(c, Words<4>{first.row[0], first.row[1], second.row[0], second.row[1]}, Words<2>{b.x, b.y}, host_u8,
                    host_s8);
#endif
}

// c += a (16 x 16) @ b (16 x 8) in integers; a: rows g and g + 8 of one step.
__device__ inline void mma_m16n8k16(int (&c)[4], const Bytes& a, u32 b) {
#ifdef __CUDA_ARCH__
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.row[0]), "r"(a.row[1]), "r"(b));
#else
    host_mma<16, 4>(c, Words<2>{a.row[0], a.row[1]}, Words<1>{b}, host_s8);
#endif
}

}  // namespace qgemm
