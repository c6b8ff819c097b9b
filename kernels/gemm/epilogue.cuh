// Epilogue: y = sum + bias + residual or, with a gate, y = gate(residual) * (sum + bias). Bias and residual are
// optional; the host chooses types and gate at run time.
#pragma once

#include "gate.cuh"
#include "host.cuh"

namespace qgemm {

// type: a TypeCode.
__device__ inline float load_as(const void* data, int type, i64 i) {
    switch (type) {
        case FLOAT32:
            return static_cast<const float*>(data)[i];
        case FLOAT16:
            return to_float(static_cast<const half*>(data)[i]);
        case BFLOAT16:
            return to_float(static_cast<const bf16*>(data)[i]);
        default:
            return 0;
    }
}

// load_as in two steps, so that the load is waited for later: load_raw loads bits, value_of converts them.
__device__ inline u32 load_raw(const void* data, int type, i64 i) {
    u32 bits = 0;
    if (type == FLOAT32) bits = static_cast<const u32*>(data)[i];
    if (type == FLOAT16 || type == BFLOAT16) bits = static_cast<const u16*>(data)[i];
    return bits;
}
__device__ inline float value_of(u32 bits, int type) {
    if (type == FLOAT32) return __uint_as_float(bits);
    if (type == BFLOAT16) return __uint_as_float(bits << 16);
    return type == FLOAT16 ? __half2float(__ushort_as_half(u16(bits))) : 0;
}

__device__ inline void store_as(void* data, int type, i64 i, float value) {
    switch (type) {
        case FLOAT32:
            static_cast<float*>(data)[i] = value;
            break;
        case FLOAT16:
            static_cast<half*>(data)[i] = from_float<half>(value);
            break;
        case BFLOAT16:
            static_cast<bf16*>(data)[i] = from_float<bf16>(value);
    }
}

// Four values of an array from index i, a multiple of four. Bits are loaded at once, and converted when needed.
struct FourValues {
    uint4 bits;
    int type;

    __device__ FourValues(const void* data, int type, i64 i) : bits(), type(type) {
        if (type == FLOAT32) {
            bits = *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + i);
        } else if (type) {
            const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const half*>(data) + i);
            bits.x = pairs.x;
            bits.y = pairs.y;
        }
    }
    __device__ float operator[](int i) const {
        const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        if (type == FLOAT32) return __uint_as_float(words[i]);
        const u32 value = words[i / 2] >> 16 * (i % 2) & 0xffff;
        return type == FLOAT16 ? __half2float(__ushort_as_half(u16(value))) : __uint_as_float(value << 16);
    }
};

__device__ inline void store_as_four(void* data, int type, i64 i, const float (&values)[4]) {
    if (type == FLOAT32) {
        *reinterpret_cast<float4*>(static_cast<float*>(data) + i) = {values[0], values[1], values[2], values[3]};
        return;
    }
    u16 bits[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) store_as(bits, type, j, values[j]);
    const uint2 pairs = {bits[0] | u32(bits[1]) << 16, bits[2] | u32(bits[3]) << 16};
    *reinterpret_cast<uint2*>(static_cast<half*>(data) + i) = pairs;
}

// row: row of W. token: index in y of the token's first output.
struct Epilogue : EpilogueArguments {
    __device__ bool adds() const { return types.bias || types.residual; }
    __device__ float biased(i64 row, float sum) const {
        return types.bias ? sum + load_as(arrays.bias, types.bias, row) : sum;
    }
    __device__ float added(i64 token, i64 row, float sum) const {
        sum = biased(row, sum);
        if (!types.residual) return sum;
        const float residual = load_as(arrays.residual, types.residual, token + row);
        return types.gate ? gated(types.gate, residual, sum) : sum + residual;
    }
    __device__ void store(i64 token, i64 row, float sum) const {
        store_as(arrays.y, types.y, token + row, added(token, row, sum));
    }
    // Whether four outputs of a token, from a row that is a multiple of four, may be stored together. A gate is
    // excluded: for kernels that call this, add_epilogue.cu applies it.
    __device__ bool in_fours(i64 n) const {
        const i64 addresses = reinterpret_cast<i64>(arrays.y) | reinterpret_cast<i64>(arrays.bias) |
                              reinterpret_cast<i64>(arrays.residual);
        return !types.gate && n % 4 == 0 && addresses % 16 == 0;
    }
    __device__ void store_four(i64 token, i64 row, float4 sums) const {
        const FourValues biases(arrays.bias, types.bias, row), residuals(arrays.residual, types.residual, token + row);
        float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (types.bias) values[i] += biases[i];
            if (types.residual) values[i] += residuals[i];
        }
        store_as_four(arrays.y, types.y, token + row, values);
    }
};

}  // namespace qgemm
