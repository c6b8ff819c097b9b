// quantize_activations_groups: x [m, k] -> bytes [rows, columns], whole token tiles and whole stages, and a float scale
// a group and token [groups][rows] behind them: qgemm/cuda/layout/group_activations.py has the order of both.
//
// A thread owns eight columns of TOKENS tokens, GROUP / 8 neighbours a group: d = absmax / 127, q = x / d rounded half
// away from zero, or d = absmax / 448, q the nearest e4m3 number, as qgemm/codec/group_activations.py computes them,
// bit for bit. What is beyond m and k is written as zeros.
// Config: In (float, half, bf16), E4M3 (0, 1), TOKENS, GROUP (columns that share a scale: 128 or 256).
#include "ptx/cvt_e4m3.cuh"
#include "ptx/griddepcontrol.cuh"
#include "codes/quantize.cuh"
#include "eight_bit_layout.cuh"

namespace qgemm {

// Over the lanes of a group.
__device__ inline u32 largest_of_group(const float (&values)[8]) {
    u32 largest = largest_of_block(values);
#pragma unroll
    for (int lanes = 4; lanes < Config::GROUP / 8; lanes *= 2)
        largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    return largest;
}

// The codes of four numbers in units of their group's scale.
template <bool E4M3>
__device__ u32 four_codes(const float* scaled);
template <>
__device__ inline u32 four_codes<false>(const float* scaled) {
    u32 byte[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)  // NaN is cut to 0
        byte[j] = __float2int_rz(__fadd_rn(scaled[j], copysignf(0x1.fffffep-2f, scaled[j])));
    return __byte_perm(__byte_perm(byte[0], byte[1], 0x40), __byte_perm(byte[2], byte[3], 0x40), 0x5410);
}
template <>
__device__ inline u32 four_codes<true>(const float* scaled) {
    return e4m3x2(scaled[0], scaled[1]) | e4m3x2(scaled[2], scaled[3]) << 16;
}

}  // namespace qgemm

extern "C" __global__ void __launch_bounds__(128)
    quantize_activations_groups(const qgemm::Config::In* __restrict__ x, signed char* __restrict__ codes, qgemm::i64 k,
                                int m) {
    using namespace qgemm;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    constexpr int TOKENS = Config::TOKENS;
    constexpr float MOST = Config::E4M3 ? 448 : 127;
    const i64 rows = i64(gridDim.x) * TOKENS;
    const i64 columns = (k + EIGHT_BIT_COLUMNS - 1) / EIGHT_BIT_COLUMNS * EIGHT_BIT_COLUMNS;
    const i64 first_token = i64(blockIdx.x) * TOKENS, first = 8 * (i64(blockIdx.y) * blockDim.x + threadIdx.x);
    float values[TOKENS][8] = {};
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
        if (first_token + i < m && first < k) load_eight(values[i], x + (first_token + i) * k + first);
    float* scales = reinterpret_cast<float*>(codes + rows * columns) + first / Config::GROUP * rows;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const i64 token = first_token + i;
        const u32 largest = largest_of_group(values[i]);
        constexpr u32 INFINITE = 0x7f800000, COUNTS = (127 - EIGHT_BIT_LEAST) << 23;
        const bool known = largest >= COUNTS && largest < INFINITE;
        const float absmax = __uint_as_float(largest), inverse = known ? __fdiv_rn(MOST, absmax) : 0.0f;
        float scaled[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) scaled[j] = __fmul_rn(values[i][j], inverse);
        const u32 zeros = known ? ~0u : 0;  // of e4m3 a sign and NaN would stay
        const u32 q[2] = {four_codes<Config::E4M3>(scaled) & zeros, four_codes<Config::E4M3>(scaled + 4) & zeros};
        // Two neighbours hold the halves of a step: the first makes the words of t = 0 and 1, the second of t = 2 and
        // 3, each of columns 2t, 2t + 1, 2t + 8, 2t + 9.
        const bool odd = threadIdx.x % 2;
        const u32 other = __shfl_xor_sync(~0u, odd ? q[0] : q[1], 1);
        if (first >= columns) continue;
        const u32 near = odd ? other : q[0], far = odd ? q[1] : other;
        *reinterpret_cast<uint2*>(codes + token * columns + first) = {__byte_perm(near, far, 0x5410),
                                                                      __byte_perm(near, far, 0x7632)};
        if (first % Config::GROUP == 0)
            scales[token / 16 * 16 + eight_bit_scale_offset(int(token % 16))] = largest >= INFINITE
                                                                                    ? __uint_as_float(0x7fffffff)
                                                                                : known ? __fdiv_rn(absmax, MOST)
                                                                                        : 0.0f;
    }
}
