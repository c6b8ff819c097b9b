// q6_k:  w = d * sc * (q - 32),  q in 0..63, sc in -128..127 a group of 16.       Twin of qgemm/formats/q6_k.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/k_quant_encoder.cuh"
#include "codes/overlapping.cuh"
#include "codes/signed_bytes.cuh"
#include "tiles/q6_k.cuh"

namespace qgemm {

template <int M16_TILES>
struct q6_k_scales : q6_k_fields<M16_TILES> {
    using Codes = q6_k_codes;
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        // sc + 128 of two groups of row g, then of row g + 8
        const u32 sc = signed_bytes(reinterpret_cast<const u32*>(this->scales[m16][g][0])[index >> 1]);
        return numbers_from(sc >> 8 * (index & 1) & 0x00ff00ff, 128, unit);
    }
};

template <int M16_TILES>
struct q6_k : OverlappingCodes<SuperScales<q6_k_scales<M16_TILES>>, 6, 32> {
    template <bool WEIGHTED>
    using GroupEncoder = SymmetricGroups<Q6KKind, WEIGHTED>;
    using Codes = q6_k_codes;
    static constexpr int ZERO = 0;  // bytes() are levels: groups of 16 have no sum of their own in q8_1

    static __device__ Bytes bytes(const Codes& codes, int step) {
        const Bytes q = q6_k::Words::bytes(codes.low[step], codes.high[step / 2], step);
        return {centred<32>(q.row[0]), centred<32>(q.row[1])};
    }
};

}  // namespace qgemm
