// Layout of blocks of 64 to 256 weights whose fields are stored by quarters: codes of the QUARTER weights of a quarter
// are adjacent. Vector v holds quarter v of each block, so a lane has the same block in all four vectors.
#pragma once

#include "block_scales.h"

#define QUARTER (BLOCK_WEIGHTS / 4)  // 8, 16, 32 or 64
#define ACCS (QUARTER >= 32 ? 4 : QUARTER / 8)
#define ACC_OF(vector) ((vector) * ACCS / 4)
#define RUN (QUARTER < 16 ? QUARTER : 16)
#define WEIGHT_OF(v, i) (BLOCK_WEIGHTS * ((i) / QUARTER) + QUARTER * (v) + (i) % QUARTER)
#define LANE_BLOCK(lane) (4 * (lane) / QUARTER)

// QUARTER bytes at `offset` of each block.
INLINE u8x64 quarters(const uint8_t* blocks, int offset) {
    const uint8_t* field = blocks + offset;
    if (QUARTER == 64) return join_halves(field, field + 32);  // one load of 64 bytes would often cross a cache line
    if (QUARTER == 32) return join_halves(field, field + BLOCK_BYTES);
    if (QUARTER == 16)
        return join(load16(field), load16(field + BLOCK_BYTES), load16(field + 2 * BLOCK_BYTES),
                    load16(field + 3 * BLOCK_BYTES));
    uint64_t eight[8];
    for (int i = 0; i < 8; ++i) memcpy(&eight[i], field + i * BLOCK_BYTES, sizeof eight[i]);
    return join(join_words(eight[0], eight[1]), join_words(eight[2], eight[3]), join_words(eight[4], eight[5]),
                join_words(eight[6], eight[7]));
}

// QUARTER bits of each block: quarter v of the one-bit field at `offset`.
INLINE uint64_t gather_quarter_bits(const uint8_t* blocks, int offset, int v) {
    const uint8_t* field = blocks + offset + QUARTER / 8 * v;
    uint64_t result = 0;
    if (QUARTER == 16) return gather_pairs(field, BLOCK_BYTES);
    for (int i = 0; i < BLOCKS; ++i) {
        uint64_t bits = 0;
        memcpy(&bits, field + i * BLOCK_BYTES, QUARTER / 8);
        result |= bits << QUARTER % 64 * i;
    }
    return result;
}

// Sets bit `place` of the codes whose bit is set in the one-bit field at `offset`. The codes are below 2^place before.
INLINE void add_bits(u8x64 codes[4], const uint8_t* blocks, int offset, int place) {
    for (int v = 0; v < 4; ++v)
        codes[v] = or_where_set(codes[v], gather_quarter_bits(blocks, offset, v), (uint8_t)(1 << place));
}
#include "broadcast_lanes.h"
