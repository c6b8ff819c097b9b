// Numbers of a type in memory, at any address, as floats and back, rounded once: half to even, beyond the range
// infinite.
//
// Macros: TYPE_FLOAT32, TYPE_FLOAT16, TYPE_BFLOAT16, TYPE_FLOAT64 (qgemm/cpu/native/calls.py).
#pragma once

#include "vec.h"

INLINE int64_t size_of_type(int type) { return type == TYPE_FLOAT64 ? 8 : type == TYPE_FLOAT32 ? 4 : 2; }

INLINE f32x16 sixteen_doubles(const void* from) {
    double numbers[16];
    float found[16];
    memcpy(numbers, from, sizeof numbers);
    for (int i = 0; i < 16; ++i) found[i] = (float)numbers[i];
    return load_floats(found);
}

INLINE f32x16 load_sixteen(const void* from, int type) {
    switch (type) {
        case TYPE_FLOAT16:
            return sixteen_halves(from);
        case TYPE_BFLOAT16:
            return upper_halves(from);
        case TYPE_FLOAT64:
            return sixteen_doubles(from);
        default:
            return load_floats(from);
    }
}

// Upper halves of floats, rounded; NaN stays one.
INLINE i32x16 rounded_to_upper_halves(f32x16 v) {
    i32x16 found;
    EACH {
        const i32_part all = (i32_part)v.part[i], nan = v.part[i] != v.part[i], bits = all & ~nan;
        const i32_part rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        found.part[i] = (nan & (all >> 16 | 0x40)) | (~nan & rounded);
    }
    return found;
}

INLINE void store_sixteen(void* to, f32x16 v, int type) {
    if (type == TYPE_FLOAT16) {
        store_halves(to, v);
    } else if (type == TYPE_BFLOAT16) {
        store_low_halves(to, rounded_to_upper_halves(v));
    } else if (type == TYPE_FLOAT64) {
        float from[16];
        double numbers[16];
        put_floats(from, v);
        for (int i = 0; i < 16; ++i) numbers[i] = from[i];
        memcpy(to, numbers, sizeof numbers);
    } else {
        put_floats(to, v);
    }
}

// The first `count` of sixteen numbers.
INLINE f32x16 load_some(const void* from, int64_t count, int type) {
    uint64_t numbers[16] = {0};
    if (count >= 16) return load_sixteen(from, type);
    memcpy(numbers, from, count * size_of_type(type));
    return load_sixteen(numbers, type);
}

INLINE void store_some(void* to, f32x16 v, int64_t count, int type) {
    uint64_t numbers[16];
    if (count >= 16) {
        store_sixteen(to, v, type);
        return;
    }
    store_sixteen(numbers, v, type);
    memcpy(to, numbers, count * size_of_type(type));
}
