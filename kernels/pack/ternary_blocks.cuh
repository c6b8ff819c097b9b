// Blocks whose codes are digits to the base 3, in shared memory <-> tiles, for pack and unpack.
// Blocks, generated from qgemm/codec/layouts/ternary.py: DIGIT_BYTES of a block, place(weight): its byte and digit.
#pragma once

#include "codes/ternary.cuh"
#include "pack/grid_blocks.cuh"
#include "pack/panel.cuh"

namespace qgemm {

__device__ inline u32 power_of_3(int i) { return (i & 1 ? 3 : 1) * (i & 2 ? 9 : 1) * (i & 4 ? 81 : 1); }

// The number with five digits, the first the highest -> its byte.
__device__ inline u32 byte_of_digits(u32 number) { return (number * 256 + 242) / 243; }

// Calls visit(pair i, code e of the pair, r: row g + 8 r, place in the block) for the codes of a lane.
template <class Blocks, class Visit>
__device__ inline void for_digits(int k_block, int lane, Visit visit) {
#pragma unroll
    for (int i = 0; i <= OWN_PAIRS; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            visit(i, e, i % 2, Blocks::place(K_BLOCK * k_block + i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2 + e));
}

// A lane's bytes of a k_block and the bytes of its quad -> memory.
template <class Blocks, class KBlock>
__device__ inline void gather_digits(const u8* const (&rows)[2], int k_block, int m16, int lane, KBlock& to) {
    u32 own[6] = {}, of_quad = 0;  // numbers: byte 2 * (pair / OF_BYTE) + e; a number in each half
    for_digits<Blocks>(k_block, lane, [&](int i, int e, int r, DigitPlace place) {
        const u32 digit = (rows[r][place.byte] * power_of_3(place.digit) & 0xff) * 3 >> 8;
        if (i == OWN_PAIRS)
            of_quad += digit * power_of_3(OF_BYTE - 1 - lane % 4) << 16 * e;
        else
            own[i / OF_BYTE * 2 + e] += digit * power_of_3(OF_BYTE - 1 - i % OF_BYTE);
    });
    of_quad += __shfl_xor_sync(~0u, of_quad, 1);
    of_quad += __shfl_xor_sync(~0u, of_quad, 2);
    u32 bytes[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) bytes[i] = byte_of_digits(own[i]);
    to.qs[m16][lane] = bytes[0] | bytes[2] << 8 | bytes[1] << 16 | bytes[3] << 24;
    to.qt[m16][lane] = bytes[4] | bytes[5] << 8;
    if (lane % 4 == 0) to.qh[m16][lane / 4] = byte_of_digits(of_quad & 0xffff) | byte_of_digits(of_quad >> 16) << 8;
}

// The inverse: adds up the number of each byte of a block from its digits.
template <class Blocks, class KBlock>
__device__ inline void scatter_digits(const KBlock& from, int k_block, int m16, int lane, u8* const (&rows)[2]) {
    const TernaryCodes codes = from.codes(m16, lane);
    for_digits<Blocks>(k_block, lane, [&](int i, int e, int r, DigitPlace place) {
        u8* byte = rows[r] + place.byte;
        const int in_word = __cvta_generic_to_shared(byte) % 4;
        const u32 number = (codes.pairs[i] >> (8 + 16 * e) & 3) * power_of_3(OF_BYTE - 1 - place.digit);
        atomicAdd(reinterpret_cast<u32*>(byte - in_word), number << 8 * in_word);
    });
}

// Replaces the complete numbers in a panel by their bytes.
template <class Blocks, class Panel>
__device__ inline void digits_to_bytes(const Panel& panel) {
    const int count = TILE_ROWS * panel.tiles * Blocks::DIGIT_BYTES;
    for (int i = threadIdx.x; i < count; i += Panel::THREADS) {
        u8* byte = panel.row(i % TILE_ROWS, i / TILE_ROWS / Blocks::DIGIT_BYTES) + i / TILE_ROWS % Blocks::DIGIT_BYTES;
        *byte = byte_of_digits(*byte);
    }
}

}  // namespace qgemm
