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

// row: row of W. token: index in y of the token's first output.
struct Epilogue : EpilogueArguments {
    __device__ bool adds() const { return types.bias || types.residual; }
    __device__ float biased(i64 row, float sum) const {
        return types.bias ? sum + load_as(arrays.bias, types.bias, row) : sum;
    }
    // The residual in two steps: raw_residual loads it, `finished` waits for it.
    __device__ u32 raw_residual(i64 token, i64 row) const {
        return load_raw(arrays.residual, types.residual, token + row);
    }
    __device__ float finished(i64 row, float sum, u32 raw) const {
        sum = biased(row, sum);
        if (!types.residual) return sum;
        const float residual = value_of(raw, types.residual);
        return types.gate ? gated(types.gate, residual, sum) : sum + residual;
    }
    __device__ void store(i64 token, i64 row, float sum, u32 raw) const {
        store_as(arrays.y, types.y, token + row, finished(row, sum, raw));
    }
    __device__ void store(i64 token, i64 row, float sum) const { store(token, row, sum, raw_residual(token, row)); }
};

}  // namespace qgemm
