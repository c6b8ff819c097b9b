// Codes of five and six bits, two of which overlap in a byte: per step a lane has a word whose bytes hold the codes for
// rows g and g + 8, and a part of a word with the bits where they overlap. Twin of
// qgemm/codec/layouts/overlapping.py.
#pragma once

#include "fragment.cuh"
#include "host.cuh"
#include "ptx/lop3.cuh"

namespace qgemm {

template <int BITS>
struct Overlapping {
    static constexpr int ABOVE = BITS - 4, SHIFT = 8 - BITS, OVERLAP = 2 * ABOVE;
    static constexpr int WORDS = K_BLOCK / 16,
                         STEPS = WORDS / ABOVE;  // steps of a k_block; steps of a word of the rest
    static constexpr u32 CODE = (1 << BITS) - 1, BYTES = 0x01010101, HALVES = 0x00010001;

    // The word of the rest, rotated to a step and then by bytes.
    static __device__ u32 rotated(u32 rest, int step, int bytes = 0) {
        return __funnelshift_r(rest, rest, OVERLAP * (step % STEPS) + 8 * bytes);
    }

    static __device__ Fragment codes_f16(u32 word, u32 rest, int step) {
        constexpr u32 LOW = CODE * HALVES, HIGH = LOW << SHIFT;
        const u32 far = word >> 8;
        return as_fragment(lop3_xor_and<LOW>(word, rotated(rest, step)), word & HIGH,
                           lop3_xor_and<LOW>(far, rotated(rest, step, 1)), far & HIGH);
    }
    static __device__ Fragment levels(u32 word, u32 rest, int step, int zero) {
        const Fragment codes = codes_f16(word, rest, step);
        const u32* bits = reinterpret_cast<const u32*>(codes.a);
        return {levels_from<0>(bits[0], zero), levels_from<SHIFT>(bits[1], zero), levels_from<0>(bits[2], zero),
                levels_from<SHIFT>(bits[3], zero)};
    }
    static __device__ Bytes bytes(u32 word, u32 rest, int step) {
        return {lop3_xor_and<CODE * BYTES>(word, rotated(rest, step)), word >> SHIFT & CODE * BYTES};
    }

    // Words of nibbles and of the bits above them <-> words of a tile.
    static __device__ void to_tile(u32 (&words)[WORDS], u32 (&rests)[ABOVE]) {
        constexpr u32 UPPER = ((1 << ABOVE) - 1) * BYTES;
        u32 rows[WORDS], overlaps[ABOVE] = {};
#pragma unroll
        for (int step = 0; step < WORDS; ++step) {
            const u32 upper = rests[step / STEPS] >> ABOVE * (step % STEPS), nibbles = words[step];
            const u32 row = (nibbles & 0x0f0f0f0f) | (upper & UPPER) << 4;
            const u32 row8 = (nibbles >> 4 & 0x0f0f0f0f) | (upper >> 4 & UPPER) << 4;
            const u32 needed = ((row >> SHIFT ^ row8) & ((1 << OVERLAP) - 1) * BYTES) << SHIFT;
            overlaps[step / STEPS] |= __funnelshift_l(needed, needed, OVERLAP * (step % STEPS));
            words[step] = row8 << SHIFT, rows[step] = row;
        }
#pragma unroll
        for (int step = 0; step < WORDS; ++step) {
            rests[step / STEPS] = overlaps[step / STEPS];
            words[step] |= (rows[step] ^ rotated(overlaps[step / STEPS], step)) & ((1 << SHIFT) - 1) * BYTES;
        }
    }
    static __device__ void from_tile(u32 (&words)[WORDS], u32 (&rests)[ABOVE]) {
        constexpr u32 UPPER = ((1 << ABOVE) - 1) * BYTES;
        u32 uppers[ABOVE] = {};
#pragma unroll
        for (int step = 0; step < WORDS; ++step) {
            const Bytes codes = bytes(words[step], rests[step / STEPS], step);
            words[step] = (codes.row[0] & 0x0f0f0f0f) | (codes.row[1] & 0x0f0f0f0f) << 4;
            const u32 upper = (codes.row[0] >> 4 & UPPER) | (codes.row[1] >> 4 & UPPER) << 4;
            uppers[step / STEPS] |= upper << ABOVE * (step % STEPS);
        }
#pragma unroll
        for (int i = 0; i < ABOVE; ++i) rests[i] = uppers[i];
    }
};

// w = scale * (q - Z) + minimum, q of BITS bits, the low four in a field of their own; bytes() are q.
template <class Fields, int BITS, int Z>
struct OverlappingCodes : Fields {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(4, BITS - 4),
                  "OverlappingCodes: a field of the low four bits, then of the rest");
    static constexpr int ZERO = Z;
    using Words = Overlapping<BITS>;
    static __device__ void to_tile(Codes& codes) { Words::to_tile(codes.low, codes.high); }
    static __device__ void from_tile(Codes& codes) { Words::from_tile(codes.low, codes.high); }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        return Words::levels(codes.low[step], codes.high[step / Words::STEPS], step, ZERO);
    }
    // (level + CODE_BIAS) * 2^-CODE_EXPONENT as halves.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = Words::SHIFT;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        return Words::codes_f16(codes.low[step], codes.high[step / Words::STEPS], step);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return Words::bytes(codes.low[step], codes.high[step / Words::STEPS], step);
    }
};

}  // namespace qgemm
