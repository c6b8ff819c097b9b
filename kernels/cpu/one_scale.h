// One scale for all 256 weights of a super-block, a half.
#pragma once

#define SCALES_OF_LANES

INLINE f32x16 scale_of_all(const uint8_t* from) { return all_floats(half_to_float(half_at(from))); }
