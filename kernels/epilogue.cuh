// Epilogue: y = sum + bias + residual, the last two optional, of types that the host chooses at run time.
#pragma once

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

// row: of W; token: index in y of the token's first output.
struct Epilogue : EpilogueArguments {
    __device__ bool adds() const { return types.bias || types.residual; }
    __device__ float added(i64 token, i64 row, float sum) const {
        if (types.bias) sum += load_as(arrays.bias, types.bias, row);
        if (types.residual) sum += load_as(arrays.residual, types.residual, token + row);
        return sum;
    }
    __device__ void store(i64 token, i64 row, float sum) const {
        store_as(arrays.y, types.y, token + row, added(token, row, sum));
    }
};

}  // namespace qgemm
