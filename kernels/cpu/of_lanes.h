// Of numbers of the blocks those of each lane. BLOCK_OF_LANE: the block of a lane, the same in all four vectors of
// codes.
#pragma once

#define SCALES_OF_LANES

INLINE f32x16 of_lanes(f32x8 v) {
#define BLOCK_OF_FOUR(lane) \
    BLOCK_OF_LANE(lane), BLOCK_OF_LANE(lane + 1), BLOCK_OF_LANE(lane + 2), BLOCK_OF_LANE(lane + 3)
    static const int32_t BLOCK[16] = {BLOCK_OF_FOUR(0), BLOCK_OF_FOUR(4), BLOCK_OF_FOUR(8), BLOCK_OF_FOUR(12)};
    return spread(with_zeros(v), load_ints(BLOCK));
}
