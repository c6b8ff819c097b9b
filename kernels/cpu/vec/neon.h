// Vectors of 64 bytes in four parts: 64-bit ARM, with dot products where the CPU has them.
#pragma once

#include <arm_neon.h>

// Sixteen bytes after sixteen.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) { return (u8x64){{a, b, c, d}}; }

// The last sixteen bytes replaced.
INLINE u8x64 with_last_sixteen(u8x64 v, u8x16 last) {
    v.part[3] = last;
    return v;
}

INLINE u8x16 sixteen_of(u8x64 v, int quarter) { return v.part[quarter]; }

// Thirty-two bytes after thirty-two.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    return (u8x64){{load16(a), load16(a + 16), load16(b), load16(b + 16)}};
}

// Byte i of each sixteen: that byte of the sixteen of `table` whose number is index[i] % 16.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
    EACH table.part[i] = (u8_part)vqtbl1q_u8((uint8x16_t)table.part[i], (uint8x16_t)(index.part[i] & 15));
    return table;
}

// acc + the sums of four products of signed bytes.
INLINE int32x4_t signed_dot(int32x4_t acc, int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, a, b);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vaddq_s32(acc, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b))));
#endif
}

// acc[i] + the dot product of bytes 4i .. 4i + 3 of codes, unsigned, with those of x, signed.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    EACH {
        const int8x16_t b = (int8x16_t)x.part[i];
        int32x4_t sum = (int32x4_t)acc.part[i];
#if defined(__ARM_FEATURE_MATMUL_INT8)
        sum = vusdotq_s32(sum, (uint8x16_t)codes.part[i], b);
#else
        sum = signed_dot(sum, (int8x16_t)(codes.part[i] & 127), b);
        if (CODE_BITS == 8) {  // the high bit, 128, as twice 64
            const int8x16_t high = (int8x16_t)(codes.part[i] >> 1 & 64);
            sum = signed_dot(signed_dot(sum, high, b), high, b);
        }
#endif
        acc.part[i] = (i32_part)sum;
    }
    return acc;
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 2, 1 and 3, then of b's.
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    EACH {
        const int64x2_t one = (int64x2_t)a.part[i], two = (int64x2_t)b.part[i];
        a.part[i] = (i32_part)vzip1q_s64(one, two) + (i32_part)vzip2q_s64(one, two);
    }
    return a;
}

// Of each four lanes of a and b: the sums of a's lanes 0 and 1, 2 and 3, then of b's.
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    EACH a.part[i] = (i32_part)vpaddq_s32((int32x4_t)a.part[i], (int32x4_t)b.part[i]);
    return a;
}

INLINE i32x8 join_ints(i32_part low, i32_part high) {
    i32x8 found;
    memcpy(&found, &low, sizeof low), memcpy((char*)&found + sizeof low, &high, sizeof high);
    return found;
}

INLINE f32x8 first_eight(f32x16 v) { return (f32x8)join_ints((i32_part)v.part[0], (i32_part)v.part[1]); }

// Sums of lanes 2 i and 2 i + 1, in the order of i 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 pairs_together(i32x16 v) {
    const int32x4_t low = vpaddq_s32((int32x4_t)v.part[0], (int32x4_t)v.part[2]);
    return join_ints((i32_part)low, (i32_part)vpaddq_s32((int32x4_t)v.part[1], (int32x4_t)v.part[3]));
}

// The first four lanes and the next, added; then those of the upper half.
INLINE i32x8 quads_together(i32x16 v) { return join_ints(v.part[0] + v.part[1], v.part[2] + v.part[3]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    f32x16 found;
    memcpy(&found.part[0], &a, sizeof a), memcpy(&found.part[2], &b, sizeof b);
    return found;
}

// Eight numbers, and zeros behind them.
INLINE f32x16 with_zeros(f32x8 v) {
    f32x16 found = {{{0}}};
    memcpy(&found.part[0], &v, sizeof v);
    return found;
}

// Sixteen signed bytes as numbers.
INLINE f32x16 sixteen_signed(const uint8_t* from) {
    const int8x16_t bytes = vld1q_s8((const int8_t*)from);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (f32x16){
        {(f32_part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), (f32_part)vcvtq_f32_s32(vmovl_high_s16(low)),
         (f32_part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), (f32_part)vcvtq_f32_s32(vmovl_high_s16(high))}};
}

// Eight bytes as numbers.
INLINE i32x8 bytes_to_ints(uint64_t bytes) {
    const uint16x8_t wide = vmovl_u8(vcreate_u8(bytes));
    const uint32x4_t parts[2] = {vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)};
    i32x8 found;
    memcpy(&found, parts, sizeof found);
    return found;
}

// The sum of eight numbers, halves of them added until one is left; of sixteen.
INLINE float sum_of_eight(f32x8 v) {
    float32x4_t half[2];
    memcpy(half, &v, sizeof half);
    const float32x4_t four = vaddq_f32(half[0], half[1]);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE float sum_of(f32x16 v) {
    const f32_part low = v.part[0] + v.part[2], high = v.part[1] + v.part[3];
    return sum_of_eight((f32x8)join_ints((i32_part)low, (i32_part)high));
}

// Halves as floats, also subnormal ones: one, and eight in two words; a float as a half, to nearest, ties to even.
INLINE float half_to_float(uint16_t half) { return vgetq_lane_f32(vcvt_f32_f16(vcreate_f16(half)), 0); }
INLINE uint16_t float_to_half(float value) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
}
INLINE f32x4 two_halves_to_floats(uint32_t both) { return (f32x4)vcvt_f32_f16(vcreate_f16(both)); }
INLINE f32x8 halves_to_floats(uint64_t low, uint64_t high) {
    const float16x8_t all = vcombine_f16(vcreate_f16(low), vcreate_f16(high));
    const float32x4_t parts[2] = {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
    f32x8 found;
    memcpy(&found, parts, sizeof found);
    return found;
}

// values[number[i] % 16] in lane i: four bytes each.
INLINE f32x16 spread(f32x16 values, i32x16 number) {
    uint8x16x4_t table;
    EACH table.val[i] = (uint8x16_t)values.part[i];
    EACH {
        const i32_part bytes = (number.part[i] & 15) * 0x04040404 + 0x03020100;
        values.part[i] = (f32_part)vqtbl4q_u8(table, (uint8x16_t)bytes);
    }
    return values;
}

// values[number[i] % 8] in lane i.
INLINE f32x8 spread_eight(f32x8 values, i32x8 number) {
    f32x16 all = {{{0}}};
    i32x16 numbers = {{{0}}};
    memcpy(&all.part[0], &values, sizeof values), memcpy(&numbers.part[0], &number, sizeof number);
    return first_eight(spread(all, numbers));
}

// Sixteen unsigned bytes as numbers.
INLINE i32x16 sixteen_ints(const uint8_t* from) {
    const uint8x16_t bytes = vld1q_u8(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return (i32x16){{(i32_part)vmovl_u16(vget_low_u16(low)), (i32_part)vmovl_high_u16(low),
                     (i32_part)vmovl_u16(vget_low_u16(high)), (i32_part)vmovl_high_u16(high)}};
}

// Sixteen halves as floats.
INLINE f32x16 sixteen_halves(const void* from) {
    f32x16 found;
    EACH {
        uint64_t halves;
        memcpy(&halves, (const char*)from + 8 * i, sizeof halves);
        found.part[i] = (f32_part)vcvt_f32_f16(vcreate_f16(halves));
    }
    return found;
}

// Sixteen floats of which the upper halves lie in memory: bfloat16.
INLINE f32x16 upper_halves(const void* from) {
    f32x16 found;
    EACH {
        uint16x4_t half;
        memcpy(&half, (const char*)from + 8 * i, sizeof half);
        found.part[i] = (f32_part)vshll_n_u16(half, 16);
    }
    return found;
}

// Four rows of four numbers -> four columns.
INLINE void transpose4(f32x4 rows[4]) {
    const float32x4_t a = (float32x4_t)rows[0], b = (float32x4_t)rows[1];
    const float32x4_t c = (float32x4_t)rows[2], d = (float32x4_t)rows[3];
    const float64x2_t ab = (float64x2_t)vtrn1q_f32(a, b), ab_odd = (float64x2_t)vtrn2q_f32(a, b);
    const float64x2_t cd = (float64x2_t)vtrn1q_f32(c, d), cd_odd = (float64x2_t)vtrn2q_f32(c, d);
    rows[0] = (f32x4)vtrn1q_f64(ab, cd), rows[1] = (f32x4)vtrn1q_f64(ab_odd, cd_odd);
    rows[2] = (f32x4)vtrn2q_f64(ab, cd), rows[3] = (f32x4)vtrn2q_f64(ab_odd, cd_odd);
}

// Rounding as IEEE 754 has it, without flushing of subnormals, whatever another library has set; what was set before.
INLINE uint64_t ieee_mode(void) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    if (old) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return old;
}

INLINE void restore_mode(uint64_t mode) {
    if (mode) __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}

INLINE void store_halves(void* to, f32x16 v) {
    EACH {
        const float16x4_t half = vcvt_f16_f32((float32x4_t)v.part[i]);
        memcpy((char*)to + 8 * i, &half, sizeof half);
    }
}

// The lowest byte of each number.
INLINE void store_low_bytes(void* to, i32x16 v) {
    uint16x4_t half[4];
    EACH half[i] = vmovn_u32((uint32x4_t)v.part[i]);
    const uint16x8_t low = vcombine_u16(half[0], half[1]), high = vcombine_u16(half[2], half[3]);
    vst1q_u8(to, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}

// The lower half of each number.
INLINE void store_low_halves(void* to, i32x16 v) {
    EACH {
        const uint16x4_t half = vmovn_u32((uint32x4_t)v.part[i]);
        memcpy((char*)to + 8 * i, &half, sizeof half);
    }
}
