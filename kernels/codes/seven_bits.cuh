// Codes of seven bits, two in a byte with six overlapping bits: per step a lane has a word w of four bytes, and a word
// f with the overlapping bits. Row g is (w ^ f) & 127, row g + 8 is w >> 1 & 127. Twin of
// qgemm/codec/layouts/seven_bits.py.
#pragma once

#include "fragment.cuh"
#include "ptx/lop3.cuh"

namespace qgemm {

// Codes lie in fields of four, two and one bits. The last three words are f of steps 0, 1 and 2 in bits 1 to 6 of every
// byte; their bits 0 and 7 are f of step 3. w = scale * (q - Z) + minimum; bytes() are q.
template <class Fields, int Z>
struct SevenBits : Fields {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(4, 2, 1), "SevenBits: fields of the low four bits, the next two, the highest");
    static constexpr int ZERO = Z, STEPS = 4;
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 1;
    static constexpr u32 EVERY = 0x01010101, REST = 0x7e * EVERY, SPARE = 6 * EVERY;

    static __device__ u32 rest(const Codes& codes, int step) {
        const u32 own[3] = {codes.high[0], codes.high[1], codes.top[0]};
        if (step < 3) return own[step];
        u32 last = 0;
#pragma unroll
        for (int i = 0; i < 3; ++i) last |= __funnelshift_l(own[i], own[i], 2 * i + 2) & SPARE << 2 * i;
        return last;
    }
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        constexpr u32 LOW = 0x007f007f, HIGH = LOW << 1;
        const u32 word = codes.low[step], of_step = rest(codes, step), far = word >> 8;
        return as_fragment(lop3_xor_and<LOW>(word, of_step), word & HIGH, lop3_xor_and<LOW>(far, of_step >> 8),
                           far & HIGH);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const Fragment masked = codes_f16(codes, step);
        const u32* bits = reinterpret_cast<const u32*>(masked.a);
        return {levels_from<0>(bits[0], ZERO), levels_from<1>(bits[1], ZERO), levels_from<0>(bits[2], ZERO),
                levels_from<1>(bits[3], ZERO)};
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return {lop3_xor_and<0x7f * EVERY>(codes.low[step], rest(codes, step)), codes.low[step] >> 1 & 0x7f * EVERY};
    }

    // Words side by side <-> words of a tile.
    static __device__ void to_tile(Codes& codes) {
        u32 needed[STEPS], tiled[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 row = side_by_side(codes, step, 0), row8 = side_by_side(codes, step, 4);
            needed[step] = (row ^ row8 << 1) & REST;
            tiled[step] = row8 << 1 | (row & EVERY);
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const u32 spare = needed[3] & SPARE << 2 * i;
            needed[i] |= __funnelshift_r(spare, spare, 2 * i + 2);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) codes.low[step] = tiled[step] ^ (step < 3 ? needed[step] & EVERY : 0);
        codes.high[0] = needed[0], codes.high[1] = needed[1], codes.top[0] = needed[2];
    }
    static __device__ void from_tile(Codes& codes) {
        u32 nibbles[STEPS], two[2] = {}, top = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const Bytes q = bytes(codes, step);
            nibbles[step] = 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                nibbles[step] |= (q.row[r] & 15 * EVERY) << 4 * r;
                two[step / 2] |= (q.row[r] >> 4 & 3 * EVERY) << (2 * (step % 2) + 4 * r);
                top |= (q.row[r] >> 6 & EVERY) << (step + 4 * r);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) codes.low[step] = nibbles[step];
        codes.high[0] = two[0], codes.high[1] = two[1], codes.top[0] = top;
    }

private:
    // Codes of row g (shift = 0) or g + 8 (shift = 4), one in each byte.
    static __device__ u32 side_by_side(const Codes& codes, int step, int shift) {
        return (codes.low[step] >> shift & 15 * EVERY) |
               (codes.high[step / 2] >> (2 * (step % 2) + shift) & 3 * EVERY) << 4 |
               (codes.top[0] >> (step + shift) & EVERY) << 6;
    }
};

}  // namespace qgemm
