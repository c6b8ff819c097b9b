// Broadcasts per-block scalars to lanes, for formats whose lanes keep one block in all four vectors of codes.
//
// Macro: LANE_BLOCK(lane), the block of a lane.
#pragma once

#define LANE_SCALES

INLINE f32x16 broadcast_to_lanes(f32x8 v) {
#define FOUR_LANE_BLOCKS(lane) LANE_BLOCK(lane), LANE_BLOCK(lane + 1), LANE_BLOCK(lane + 2), LANE_BLOCK(lane + 3)
    static const int32_t BLOCK[16] = {FOUR_LANE_BLOCKS(0), FOUR_LANE_BLOCKS(4), FOUR_LANE_BLOCKS(8),
                                      FOUR_LANE_BLOCKS(12)};
    return permute(zero_extend(v), load_ints(BLOCK));
}
