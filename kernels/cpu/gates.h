// The gates of qgemm/gating.py in float32, by the same formulas.
//
// Macros (qgemm/cpu/native/calls.py): GATE_SILU, GATE_GELU, GATE_GELU_TANH, GATE_SWIGLU_OAI, values of `gate`;
// GATE_SLOPE and GATE_LIMIT of SWIGLU_OAI; ERF_P and the five numbers ERF_C of the approximation of erf.
#pragma once

#include "vec.h"

INLINE f32x16 divide(f32x16 a, f32x16 b) {
    EACH_PART a.part[i] /= b.part[i];
    return a;
}

// min(a, b); NaN in a stays.
INLINE f32x16 min_keep_nan(f32x16 a, float b) {
    EACH_PART {
        const f32_part limit = b - (f32_part){0};
        const i32_part above = a.part[i] > limit;
        a.part[i] = (f32_part)((above & (i32_part)limit) | (~above & (i32_part)a.part[i]));
    }
    return a;
}

INLINE f32x16 negate(f32x16 v) {
    EACH_PART v.part[i] = -v.part[i];
    return v;
}

INLINE f32x16 max_keep_nan(f32x16 a, float b) { return negate(min_keep_nan(negate(a), -b)); }

// e^x = 2^n e^r with |r| <= ln(2) / 2, by a polynomial of degree 7; the error is about one unit in the last place.
INLINE f32x16 exp_floats(f32x16 x) {
    static const float FACTORS[] = {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1, 1};
    const float magic = 0x1.8p23f;  // its last place is 1, so adding it rounds to an integer
    x = max_keep_nan(min_keep_nan(x, 90), -110);
    const f32x16 sum = mul_add(all_floats(magic), x, all_floats(0x1.715476p0f));
    const f32x16 n = add_floats(sum, all_floats(-magic));
    f32x16 r =
        mul_add(x, n, all_floats(-0x1.62e4p-1f));  // ln 2 in two parts; the first has few bits, so n times it is exact
    r = mul_add(r, n, all_floats(-0x1.7f7d1cp-20f));
    f32x16 power = all_floats(1 / 5040.f);
#pragma GCC unroll 8
    for (int i = 0; i < 7; ++i) power = mul_add(all_floats(FACTORS[i]), power, r);
    EACH_PART {  // 2^n in two factors: the result may be subnormal or infinite
        const i32_part number = (i32_part)sum.part[i] - 0x4b400000, first = number >> 1, second = number - first;
        power.part[i] *= (f32_part)((first + 127) << 23);
        power.part[i] *= (f32_part)((second + 127) << 23);
    }
    return power;
}

// x / (1 + e^-slope_x), where slope_x = slope * x.
INLINE f32x16 swish(f32x16 x, f32x16 slope_x) {
    return divide(x, add_floats(all_floats(1), exp_floats(negate(slope_x))));
}

INLINE f32x16 gelu(f32x16 x) {
    static const float C[] = ERF_C;
    f32x16 z = mul_all(x, 0x1.6a09e6p-1f), sum = all_floats(0);  // sqrt(1/2)
    EACH_PART z.part[i] = (f32_part)((i32_part)z.part[i] & 0x7fffffff);
    const f32x16 t = divide(all_floats(1), mul_add(all_floats(1), z, all_floats(ERF_P)));
#pragma GCC unroll 8
    for (int i = 4; i >= 0; --i) sum = mul(add_floats(sum, all_floats(C[i])), t);
    f32x16 erf = mul_add(all_floats(1), negate(sum), exp_floats(negate(mul(z, z))));
    EACH_PART erf.part[i] =
        (f32_part)(((i32_part)erf.part[i] & 0x7fffffff) | ((i32_part)x.part[i] & (int32_t)0x80000000));
    return mul_all(mul(x, add_floats(all_floats(1), erf)), 0.5f);
}

INLINE f32x16 gelu_tanh(f32x16 x) {
    const f32x16 cube = mul(mul(x, x), x), z = mul_all(mul_add(x, cube, all_floats(0.044715f)), 0x1.988454p-1f);
    return swish(x, mul_all(z, 2));
}

INLINE f32x16 apply_gate(int gate, f32x16 g, f32x16 up) {
    switch (gate) {
        case GATE_SILU:
            return mul(swish(g, g), up);
        case GATE_GELU:
            return mul(gelu(g), up);
        case GATE_GELU_TANH:
            return mul(gelu_tanh(g), up);
        default: {
            g = min_keep_nan(g, GATE_LIMIT), up = max_keep_nan(min_keep_nan(up, GATE_LIMIT), -GATE_LIMIT);
            return mul(swish(g, mul_all(g, GATE_SLOPE)), add_floats(up, all_floats(1)));
        }
    }
}
