// For formats with one scale, a half, for all 256 weights of a super-block.
#pragma once

#define LANE_SCALES

INLINE f32x16 broadcast_half(const uint8_t* from) { return all_floats(half_to_float(load_half(from))); }
