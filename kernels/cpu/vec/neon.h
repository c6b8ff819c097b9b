// Vectors of 64 bytes in four parts: 64-bit ARM, with dot products where the CPU has them.
#pragma once

#include <arm_neon.h>

// A vector that many instructions multiply.
INLINE f32x16 load_operand(const f32x16* from) { return *from; }

// A sum that later additions must not be merged with.
INLINE i32x16 settle(i32x16 sum) { return sum; }

// Concatenates four vectors of 16 bytes.
INLINE u8x64 join(u8x16 a, u8x16 b, u8x16 c, u8x16 d) { return (u8x64){{a, b, c, d}}; }

// Replaces the last 16 bytes.
INLINE u8x64 replace_last_quarter(u8x64 v, u8x16 last) {
    v.part[3] = last;
    return v;
}

INLINE u8x16 extract_quarter(u8x64 v, int quarter) { return v.part[quarter]; }

// Concatenates 32 bytes at a and 32 bytes at b.
INLINE u8x64 join_halves(const uint8_t* a, const uint8_t* b) {
    return (u8x64){{load16(a), load16(a + 16), load16(b), load16(b + 16)}};
}

// Looks up bytes within each quarter of 16: byte i is entry index[i] % 16 of the same quarter of `table`.
INLINE u8x64 lookup(u8x64 table, u8x64 index) {
    EACH_PART table.part[i] = (u8_part)vqtbl1q_u8((uint8x16_t)table.part[i], (uint8x16_t)(index.part[i] & 15));
    return table;
}

// acc[i] + the dot product of bytes 4i to 4i + 3 of the unsigned codes and the signed x.
INLINE int32x4_t signed_dot(int32x4_t acc, int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, a, b);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vaddq_s32(acc, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b))));
#endif
}

// acc[i] + the dot product of bytes 4i to 4i + 3 of the unsigned codes and the signed x.
INLINE i32x16 dot(i32x16 acc, u8x64 codes, i8x64 x) {
    EACH_PART {
        const int8x16_t b = (int8x16_t)x.part[i];
        int32x4_t sum = (int32x4_t)acc.part[i];
#if defined(__ARM_FEATURE_MATMUL_INT8)
        sum = vusdotq_s32(sum, (uint8x16_t)codes.part[i], b);
#else
        sum = signed_dot(sum, (int8x16_t)(codes.part[i] & 127), b);
        if (CODE_BITS == 8) {  // the high bit counts 128: 64 is multiplied twice
            const int8x16_t high = (int8x16_t)(codes.part[i] >> 1 & 64);
            sum = signed_dot(signed_dot(sum, high, b), high, b);
        }
#endif
        acc.part[i] = (i32_part)sum;
    }
    return acc;
}

// For each four lanes: (a0 + a2, a1 + a3, b0 + b2, b1 + b3).
INLINE i32x16 half_sums(i32x16 a, i32x16 b) {
    EACH_PART {
        const int64x2_t x = (int64x2_t)a.part[i], y = (int64x2_t)b.part[i];
        a.part[i] = (i32_part)vzip1q_s64(x, y) + (i32_part)vzip2q_s64(x, y);
    }
    return a;
}

// For each four lanes: (a0 + a1, a2 + a3, b0 + b1, b2 + b3).
INLINE i32x16 pair_sums(i32x16 a, i32x16 b) {
    EACH_PART a.part[i] = (i32_part)vpaddq_s32((int32x4_t)a.part[i], (int32x4_t)b.part[i]);
    return a;
}

INLINE i32x8 join_ints(i32_part low, i32_part high) {
    i32x8 result;
    memcpy(&result, &low, sizeof low), memcpy((char*)&result + sizeof low, &high, sizeof high);
    return result;
}

INLINE f32x8 first_eight(f32x16 v) { return (f32x8)join_ints((i32_part)v.part[0], (i32_part)v.part[1]); }

// Sums of adjacent lanes. Result lane j is the sum of lanes 2i and 2i + 1 with i = 0, 1, 4, 5, 2, 3, 6, 7.
INLINE i32x8 sum_pairs(i32x16 v) {
    const int32x4_t low = vpaddq_s32((int32x4_t)v.part[0], (int32x4_t)v.part[2]);
    return join_ints((i32_part)low, (i32_part)vpaddq_s32((int32x4_t)v.part[1], (int32x4_t)v.part[3]));
}

// The first quarter of lanes plus the second, then the third plus the fourth.
INLINE i32x8 sum_quarters(i32x16 v) { return join_ints(v.part[0] + v.part[1], v.part[2] + v.part[3]); }

INLINE f32x16 join_floats(f32x8 a, f32x8 b) {
    f32x16 result;
    memcpy(&result.part[0], &a, sizeof a), memcpy(&result.part[2], &b, sizeof b);
    return result;
}

// Eight floats in the low half, zeros in the high half.
INLINE f32x16 zero_extend(f32x8 v) {
    f32x16 result = {{{0}}};
    memcpy(&result.part[0], &v, sizeof v);
    return result;
}

// Sixteen signed bytes as floats.
INLINE f32x16 load_signed_bytes(const uint8_t* from) {
    const int8x16_t bytes = vld1q_s8((const int8_t*)from);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (f32x16){
        {(f32_part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), (f32_part)vcvtq_f32_s32(vmovl_high_s16(low)),
         (f32_part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), (f32_part)vcvtq_f32_s32(vmovl_high_s16(high))}};
}

// Eight unsigned bytes as integers.
INLINE i32x8 bytes_to_ints(uint64_t bytes) {
    const uint16x8_t wide = vmovl_u8(vcreate_u8(bytes));
    const uint32x4_t parts[2] = {vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)};
    i32x8 result;
    memcpy(&result, parts, sizeof result);
    return result;
}

// Sums all lanes by a fixed tree: the upper half is added to the lower one until one lane is left.
INLINE float reduce_add_eight(f32x8 v) {
    float32x4_t half[2];
    memcpy(half, &v, sizeof half);
    const float32x4_t four = vaddq_f32(half[0], half[1]);
    const float32x2_t y = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
}

INLINE float reduce_add(f32x16 v) {
    const f32_part low = v.part[0] + v.part[2], high = v.part[1] + v.part[3];
    return reduce_add_eight((f32x8)join_ints((i32_part)low, (i32_part)high));
}

// Conversions between IEEE half and float, subnormals included; float to half rounds to nearest, ties to even. Two
// halves arrive in one 32-bit word, eight in two 64-bit words.
INLINE float half_to_float(uint16_t half) { return vgetq_lane_f32(vcvt_f32_f16(vcreate_f16(half)), 0); }
INLINE uint16_t float_to_half(float value) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
}
INLINE f32x4 two_halves_to_floats(uint32_t both) { return (f32x4)vcvt_f32_f16(vcreate_f16(both)); }
INLINE f32x8 halves_to_floats(uint64_t low, uint64_t high) {
    const float16x8_t all = vcombine_f16(vcreate_f16(low), vcreate_f16(high));
    const float32x4_t parts[2] = {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
    f32x8 result;
    memcpy(&result, parts, sizeof result);
    return result;
}

// Lane i is values[index[i] % 16]: a lookup of single bytes, four for each lane.
INLINE f32x16 permute(f32x16 values, i32x16 index) {
    uint8x16x4_t table;
    EACH_PART table.val[i] = (uint8x16_t)values.part[i];
    EACH_PART {
        const i32_part bytes = (index.part[i] & 15) * 0x04040404 + 0x03020100;
        values.part[i] = (f32_part)vqtbl4q_u8(table, (uint8x16_t)bytes);
    }
    return values;
}

// Lane i is values[index[i] % 8].
INLINE f32x8 permute_eight(f32x8 values, i32x8 index) {
    f32x16 all = {{{0}}};
    i32x16 numbers = {{{0}}};
    memcpy(&all.part[0], &values, sizeof values), memcpy(&numbers.part[0], &index, sizeof index);
    return first_eight(permute(all, numbers));
}

// Sixteen unsigned bytes as integers.
INLINE i32x16 load_bytes_as_ints(const uint8_t* from) {
    const uint8x16_t bytes = vld1q_u8(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return (i32x16){{(i32_part)vmovl_u16(vget_low_u16(low)), (i32_part)vmovl_high_u16(low),
                     (i32_part)vmovl_u16(vget_low_u16(high)), (i32_part)vmovl_high_u16(high)}};
}

// Sixteen halves as floats.
INLINE f32x16 load_halves(const void* from) {
    f32x16 result;
    EACH_PART {
        uint64_t halves;
        memcpy(&halves, (const char*)from + 8 * i, sizeof halves);
        result.part[i] = (f32_part)vcvt_f32_f16(vcreate_f16(halves));
    }
    return result;
}

// Sixteen bfloat16 numbers as floats.
INLINE f32x16 load_bfloats(const void* from) {
    f32x16 result;
    EACH_PART {
        uint16x4_t half;
        memcpy(&half, (const char*)from + 8 * i, sizeof half);
        result.part[i] = (f32_part)vshll_n_u16(half, 16);
    }
    return result;
}

// Transposes 4 x 4 floats in place.
INLINE void transpose4(f32x4 rows[4]) {
    const float32x4_t a = (float32x4_t)rows[0], b = (float32x4_t)rows[1];
    const float32x4_t c = (float32x4_t)rows[2], d = (float32x4_t)rows[3];
    const float64x2_t ab = (float64x2_t)vtrn1q_f32(a, b), ab_odd = (float64x2_t)vtrn2q_f32(a, b);
    const float64x2_t cd = (float64x2_t)vtrn1q_f32(c, d), cd_odd = (float64x2_t)vtrn2q_f32(c, d);
    rows[0] = (f32x4)vtrn1q_f64(ab, cd), rows[1] = (f32x4)vtrn1q_f64(ab_odd, cd_odd);
    rows[2] = (f32x4)vtrn2q_f64(ab, cd), rows[3] = (f32x4)vtrn2q_f64(ab_odd, cd_odd);
}

// Sets IEEE arithmetic (round to nearest, subnormals kept), whatever other libraries have set, and returns the previous
// mode.
INLINE uint64_t enter_ieee_mode(void) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    if (old) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return old;
}

INLINE void restore_mode(uint64_t mode) {
    if (mode) __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}

INLINE void store_halves(void* to, f32x16 v) {
    EACH_PART {
        const float16x4_t half = vcvt_f16_f32((float32x4_t)v.part[i]);
        memcpy((char*)to + 8 * i, &half, sizeof half);
    }
}

// Stores the lowest byte of each integer.
INLINE void store_low_bytes(void* to, i32x16 v) {
    uint16x4_t half[4];
    EACH_PART half[i] = vmovn_u32((uint32x4_t)v.part[i]);
    const uint16x8_t low = vcombine_u16(half[0], half[1]), high = vcombine_u16(half[2], half[3]);
    vst1q_u8(to, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}

// Stores the lower 16 bits of each integer.
INLINE void store_low_halves(void* to, i32x16 v) {
    EACH_PART {
        const uint16x4_t half = vmovn_u32((uint32x4_t)v.part[i]);
        memcpy((char*)to + 8 * i, &half, sizeof half);
    }
}
