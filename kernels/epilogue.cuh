// What a kernel does with a float sum: y = sum + bias + residual, the last two optional, of types that the host chooses.
#pragma once

#include "types.cuh"

// An array of a type that is known at run time, or none. The codes are TYPE_CODES of qgemm/products.py.
struct Array {
    void* data;
    i64 type;

    __device__ float operator[](i64 i) const {
        switch (type) {
            case 1:
                return static_cast<const float*>(data)[i];
            case 2:
                return to_float(static_cast<const half*>(data)[i]);
            case 3:
                return to_float(static_cast<const bf16*>(data)[i]);
            default:
                return 0;
        }
    }
    __device__ void store(i64 i, float value) const {
        switch (type) {
            case 1:
                static_cast<float*>(data)[i] = value;
                break;
            case 2:
                static_cast<half*>(data)[i] = from_float<half>(value);
                break;
            case 3:
                static_cast<bf16*>(data)[i] = from_float<bf16>(value);
        }
    }
    // Whether four elements from a multiple of 4 lie on a multiple of their size, in every row of n.
    __device__ bool aligned(i64 n) const {
        return n % 4 == 0 && reinterpret_cast<i64>(data) % (type == 1 ? 16 : 8) == 0;
    }
    __device__ void store_four(i64 i, const float4& values) const {
        if (type == 1) {
            *reinterpret_cast<float4*>(static_cast<float*>(data) + i) = values;
        } else if (type == 2) {
            half2 pairs[2] = {__floats2half2_rn(values.x, values.y), __floats2half2_rn(values.z, values.w)};
            *reinterpret_cast<uint2*>(static_cast<half*>(data) + i) = *reinterpret_cast<const uint2*>(pairs);
        } else {
            __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(values.x, values.y),
                                       __floats2bfloat162_rn(values.z, values.w)};
            *reinterpret_cast<uint2*>(static_cast<bf16*>(data) + i) = *reinterpret_cast<const uint2*>(pairs);
        }
    }
};

struct Outputs {
    Array y;         // [m, n]
    Array bias;      // [n]
    Array residual;  // [m, n]; it may be y

    __device__ bool adds() const { return bias.type || residual.type; }
    // A sum of row `first + row` of W, where the outputs of row `first` start at y[start], with what is added to it.
    __device__ float added(i64 start, i64 first, int row, float sum) const {
        if (bias.type) sum += bias[first + row];
        if (residual.type) sum += residual[start + row];
        return sum;
    }
    // A sum of row `row` of W for the token whose outputs start at index `token` of y.
    __device__ void store(i64 token, i64 row, float sum) const {
        if (bias.type) sum += bias[row];
        if (residual.type) sum += residual[token + row];
        y.store(token + row, sum);
    }
};
