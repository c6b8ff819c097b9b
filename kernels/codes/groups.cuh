// Groups of codes of one to eight bits that share a scale, w = d * (q - z): a family whose formats/NAME.cuh are
// generated (qgemm/cuda/jit/codegen.py). Twin of qgemm/formats/groups.py.
//
// Kernels treat the zero of a group as a minimum: -d * z.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/nibbles.cuh"
#include "codes/one_bit.cuh"
#include "codes/overlapping.cuh"
#include "codes/seven_bits.cuh"
#include "codes/signed_bytes.cuh"
#include "codes/two_bits.cuh"

namespace qgemm {

// Scales that are the bits of bfloat16, in a field d.
template <class Fields>
struct Bf16Scales : Fields {
    static constexpr bool HAS_MINIMUM = false;

    __device__ float2 scale(int m16, int g, int index) const {
        const u32 both = *reinterpret_cast<const u32*>(this->d[m16][g][index]);
        return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

// Zeros of rows g and g + 8, halves or integers of eight bits.
__device__ inline half2 zero_pair(const half (&pair)[2]) { return half_pair(pair); }
__device__ inline half2 zero_pair(const u8 (&pair)[2]) {  // 0x6400 is 1024 in half, whose last place is 1
    const u32 both = *reinterpret_cast<const u16*>(pair);
    return __hsub2(as_half2(__byte_perm(both, 0x64646464, 0x4140)), __float2half2_rn(1024));
}

// Scales with a zero for each group, in a field z.
template <class Scales>
struct GroupZeros : Scales {
    static constexpr bool HAS_MINIMUM = true, GROUP_ZERO = true;
    static constexpr bool INTEGER_ZERO = sizeof(Scales::z[0][0][0][0]) == 1;

    __device__ half2 half_zero(int m16, int g, int index) const { return zero_pair(this->z[m16][g][index]); }
    __device__ float2 minimum(int m16, int g, int index) const {
        const float2 d = this->scale(m16, g, index);
        return multiply_rounded({-d.x, -d.y}, __half22float2(half_zero(m16, g, index)));
    }
};

// Codes of eight bits without a sign, in a tile as in a block; levels q - 128.
template <class Fields>
struct CentredBytes : SignedBytes<Fields> {
    static __device__ void to_tile(typename Fields::Codes&) {}
    static __device__ void from_tile(typename Fields::Codes&) {}
};

// Codes of eight bits without a sign, levels q; bytes() are q - 128, which fits a signed byte.
template <class Fields>
struct UnsignedBytes : CentredBytes<Fields> {
    static constexpr int ZERO = -128, CODE_BIAS = 0;

    static __device__ Fragment fragment(const typename Fields::Codes& codes, int step) {
        Fragment f = UnsignedBytes::codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = levels_from<0>(*reinterpret_cast<const u32*>(&pair), 0);
        return f;
    }
};

// The base for codes of BITS bits. OWN_ZERO: each group has a zero; else it is the middle code.
template <class Fields, int BITS, bool OWN_ZERO>
struct GroupCodes : OverlappingCodes<Fields, BITS, OWN_ZERO ? 0 : 1 << (BITS - 1)> {
    static_assert(BITS == 5 || BITS == 6, "others follow");
};
template <class Fields>
struct GroupCodes<Fields, 1, false> : PlusMinusOne<Fields> {};
template <class Fields>
struct GroupCodes<Fields, 1, true> : OneBit<Fields> {};
template <class Fields, bool OWN_ZERO>
struct GroupCodes<Fields, 2, OWN_ZERO> : TwoBits<Fields, OWN_ZERO ? 0 : 2> {};
template <class Fields, bool OWN_ZERO>
struct GroupCodes<Fields, 3, OWN_ZERO> : ThreeBits<Fields, OWN_ZERO ? 0 : 4> {};
template <class Fields, bool OWN_ZERO>
struct GroupCodes<Fields, 4, OWN_ZERO> : Nibbles<Fields, OWN_ZERO ? 0 : 8> {};
template <class Fields, bool OWN_ZERO>
struct GroupCodes<Fields, 7, OWN_ZERO> : SevenBits<Fields, OWN_ZERO ? 0 : 64> {};
template <class Fields>
struct GroupCodes<Fields, 8, false> : CentredBytes<Fields> {};
template <class Fields>
struct GroupCodes<Fields, 8, true> : UnsignedBytes<Fields> {};

template <class Fields, bool BF16>
struct ScalesOf : HalfScales<Fields> {};
template <class Fields>
struct ScalesOf<Fields, true> : Bf16Scales<Fields> {};

template <class Fields, int BITS, bool OWN_ZERO, bool BF16>
struct Groups : GroupCodes<ScalesOf<Fields, BF16>, BITS, false> {};
template <class Fields, int BITS, bool BF16>
struct Groups<Fields, BITS, true, BF16> : GroupCodes<GroupZeros<ScalesOf<Fields, BF16>>, BITS, true> {};

}  // namespace qgemm
