// Level 1, a loop: y [m, n] = x [m, k] @ W [n, k].T, a thread per row of W, on the blocks as they lie in the file.
//
// w = d * (q - 8). Neighbouring threads read addresses k / 32 * 18 bytes apart, so every load of a warp fetches 32
// sectors and uses two bytes of each.
#include "formats/q4_0.cuh"

extern "C" __global__ void level_1_loop(const qgemm::q4_0_block* w, const half* x, float* y, int n, int k, int m) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x, blocks = k / 32;
    if (row >= n) return;
    for (int token = 0; token < m; ++token) {
        float sum = 0;
        for (int i = 0; i < blocks; ++i) {
            const qgemm::q4_0_block& block = w[qgemm::i64(row) * blocks + i];
            const half* xs = x + qgemm::i64(token) * k + 32 * i;
            float dot = 0;
            for (int j = 0; j < 16; ++j) {
                dot += float((block.qs[j] & 15) - 8) * __half2float(xs[j]);
                dot += float((block.qs[j] >> 4) - 8) * __half2float(xs[j + 16]);
            }
            sum += __half2float(block.d) * dot;
        }
        y[qgemm::i64(token) * n + row] = sum;
    }
}
