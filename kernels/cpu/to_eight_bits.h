// 256 columns of a row of W as codes of eight bits of one scale: qgemm/codec/eight_bits.py, bit for bit.
#pragma once

// The largest magnitude that a weight could have, by scales and minimums and any code; NaN where one of them is.
INLINE float largest_by_scales(const unpacked* found) {
    float bounds[2][16];
    int32_t bits[2][16], most = 0;
    const f32x16 minimum = MINIMUM ? found->minimum : all_floats(0);
    put_floats(bounds[0], add_floats(rounded_first(mul_all(found->scale, LEAST_LEVEL)), minimum));
    put_floats(bounds[1], add_floats(rounded_first(mul_all(found->scale, GREATEST_LEVEL)), minimum));
    memcpy(bits, bounds, sizeof bits);
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < GROUPS; ++j) {
            const int32_t magnitude = bits[i][j] & 0x7fffffff;  // compares like the number; NaN is above all
            most = magnitude > most ? magnitude : most;
        }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    return largest;
}

static void row_to_eight_bits(eight_bits* to, const uint8_t* blocks, const levels* table) {
    f32x16 w[16];
    const unpacked found = unpack(blocks);
    const float largest = largest_by_scales(&found);
    const int finite = largest < __builtin_inff();
    to->scale = !finite ? __builtin_nanf("") : largest < LEAST_EIGHT_BITS ? 0 : largest / 127;
    if (!finite || largest < LEAST_EIGHT_BITS) {
        memset(to->q, 128, sizeof to->q);
        return;
    }
    const float inverse = 127 / largest;
    weights_of_unpacked(w, &found, table);
    for (int j = 0; j < 16; ++j) {
        const f32x16 scaled = rounded_first(mul_all(w[j], inverse));
        store_low_bytes(to->q + 16 * j, add_ints(rounded_away(scaled), all_ints(128)));
    }
}

// Rows first .. last - 1.
void qgemm_eight_bits(const void* argument, int64_t first, int64_t last) {
    const eight_bits_job* job = argument;
    const product of_w = {.w = job->w, .w_row = job->w_row, .k = job->k};
    const levels table = levels_of(&of_w);
    const uint64_t mode = ieee_mode();
    uint8_t padded[SUPER_BYTES];
    for (int64_t row = first; row < last; ++row)
        row_to_eight_bits(&job->to[row - first], super_of(&of_w, row, job->i, padded), &table);
    restore_mode(mode);
}
