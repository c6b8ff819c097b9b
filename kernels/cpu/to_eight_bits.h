// Quantizes 256 columns of a row of W to eight-bit codes with one scale, for "a8_g256": the bytes of
// qgemm/codec/eight_bits.py.
//
// Macros: LEAST_LEVEL and GREATEST_LEVEL, the range of a code's levels; LEAST_EIGHT_BITS, the magnitude below which a
// row of 256 becomes zeros (qgemm/cpu/native/libraries.py).
#pragma once

// The largest magnitude that any code could have with these scales and minimums; NaN if a scale or minimum is NaN.
INLINE float largest_possible(const unpacked* w_codes) {
    float bounds[2][16];
    int32_t bits[2][16], max_bits = 0;
    const f32x16 minimum = MINIMUM ? w_codes->minimum : all_floats(0);
    store_floats(bounds[0], add_floats(no_contraction(mul_all(w_codes->scale, LEAST_LEVEL)), minimum));
    store_floats(bounds[1], add_floats(no_contraction(mul_all(w_codes->scale, GREATEST_LEVEL)), minimum));
    memcpy(bits, bounds, sizeof bits);
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < GROUPS; ++j) {
            const int32_t magnitude = bits[i][j] & 0x7fffffff;  // integers compare like magnitudes, with NaN above all
            max_bits = magnitude > max_bits ? magnitude : max_bits;
        }
    float largest;
    memcpy(&largest, &max_bits, sizeof largest);
    return largest;
}

static void quantize_row(eight_bits* to, const uint8_t* blocks, const levels* table) {
    f32x16 w[16];
    const unpacked w_codes = unpack(blocks);
    const float largest = largest_possible(&w_codes);
    const int finite = largest < __builtin_inff();
    to->scale = !finite ? __builtin_nanf("") : largest < LEAST_EIGHT_BITS ? 0 : largest / 127;
    if (!finite || largest < LEAST_EIGHT_BITS) {
        memset(to->q, 128, sizeof to->q);
        return;
    }
    const float inverse = 127 / largest;
    decode_unpacked(w, &w_codes, table);
    for (int j = 0; j < 16; ++j) {
        const f32x16 scaled = no_contraction(mul_all(w[j], inverse));
        store_low_bytes(to->q + 16 * j, add_ints(round_half_away(scaled), all_ints(128)));
    }
}

// Quantizes super-block `i` of rows first to last - 1: one thread's share.
void qgemm_eight_bits(const void* argument, int64_t first, int64_t last) {
    const eight_bits_job* job = argument;
    const product weights = {.w = job->w, .w_row = job->w_row, .k = job->k};
    const levels table = load_levels(&weights);
    const uint64_t mode = enter_ieee_mode();
    uint8_t padded[SUPER_BYTES];
    for (int64_t row = first; row < last; ++row)
        quantize_row(&job->to[row - first], read_super(&weights, row, job->i, padded), &table);
    restore_mode(mode);
}
