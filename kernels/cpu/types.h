// Loads and stores 16 numbers of a given type at any address, as floats. Stores round once, to nearest with ties to
// even; values beyond the range of the type become infinite.
//
// Macros: TYPE_FLOAT32, TYPE_FLOAT16, TYPE_BFLOAT16, TYPE_FLOAT64 (qgemm/cpu/native/calls.py): values of `type`.
#pragma once

#include "vec.h"

INLINE int64_t size_of_type(int type) { return type == TYPE_FLOAT64 ? 8 : type == TYPE_FLOAT32 ? 4 : 2; }

INLINE f32x16 load_doubles(const void* from) {
    double numbers[16];
    float result[16];
    memcpy(numbers, from, sizeof numbers);
    for (int i = 0; i < 16; ++i) result[i] = (float)numbers[i];
    return load_floats(result);
}

INLINE f32x16 load_numbers(const void* from, int type) {
    switch (type) {
        case TYPE_FLOAT16:
            return load_halves(from);
        case TYPE_BFLOAT16:
            return load_bfloats(from);
        case TYPE_FLOAT64:
            return load_doubles(from);
        default:
            return load_floats(from);
    }
}

// Rounds floats to bfloat16, in the lower 16 bits of each lane; NaN stays NaN.
INLINE i32x16 round_to_bfloats(f32x16 v) {
    i32x16 result;
    EACH_PART {
        const i32_part all = (i32_part)v.part[i], nan = v.part[i] != v.part[i], bits = all & ~nan;
        const i32_part rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        result.part[i] = (nan & (all >> 16 | 0x40)) | (~nan & rounded);
    }
    return result;
}

INLINE void store_numbers(void* to, f32x16 v, int type) {
    if (type == TYPE_FLOAT16) {
        store_halves(to, v);
    } else if (type == TYPE_BFLOAT16) {
        store_low_halves(to, round_to_bfloats(v));
    } else if (type == TYPE_FLOAT64) {
        float from[16];
        double numbers[16];
        store_floats(from, v);
        for (int i = 0; i < 16; ++i) numbers[i] = from[i];
        memcpy(to, numbers, sizeof numbers);
    } else {
        store_floats(to, v);
    }
}

// Loads or stores only the first `count` of sixteen numbers; lanes without a number are 0 when loaded.
INLINE f32x16 load_partial(const void* from, int64_t count, int type) {
    uint64_t numbers[16] = {0};
    if (count >= 16) return load_numbers(from, type);
    memcpy(numbers, from, count * size_of_type(type));
    return load_numbers(numbers, type);
}

INLINE void store_partial(void* to, f32x16 v, int64_t count, int type) {
    uint64_t numbers[16];
    if (count >= 16) {
        store_numbers(to, v, type);
        return;
    }
    store_numbers(numbers, v, type);
    memcpy(to, numbers, count * size_of_type(type));
}
