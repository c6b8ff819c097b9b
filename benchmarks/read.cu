// Kernels that only read: n times 16 bytes at p. The fastest of them is the floor of products at the speed of memory.
//
// Launched programmatically, each of them lets the next one start at once, and waits for the one before it at its end.

constexpr int STAGES = 4, STAGE_BYTES = 8192;  // the ring of read_bulk
constexpr int AT_ONCE = 8;                     // loads of a thread in flight

__device__ inline void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline unsigned fold(const uint4& a) { return a.x ^ a.y ^ a.z ^ a.w; }
// Keeps the loads.
__device__ inline void keep(unsigned sum, unsigned* sink) {
    if (sum == 0x12345678) *sink = sum;
}

// All threads of the grid side by side.
extern "C" __global__ void read_strided(const uint4* p, unsigned* sink, long long n) {
    start_next();
    const long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 3 * stride < n; i += 4 * stride) {
        const uint4 a = __ldcs(p + i), b = __ldcs(p + i + stride);
        const uint4 c = __ldcs(p + i + 2 * stride), d = __ldcs(p + i + 3 * stride);
        sum ^= fold(a) ^ fold(b) ^ fold(c) ^ fold(d);
    }
    for (; i < n; i += stride) sum ^= fold(__ldcs(p + i));
    keep(sum, sink);
    wait_for_previous();
}

// Each CTA an equal share of consecutive bytes.
extern "C" __global__ void read_shares(const uint4* p, unsigned* sink, long long n) {
    start_next();
    const long long end = n * (blockIdx.x + 1) / gridDim.x;
    long long i = n * blockIdx.x / gridDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + (AT_ONCE - 1) * blockDim.x < end; i += AT_ONCE * blockDim.x) {
        uint4 values[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) values[j] = __ldcs(p + i + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) sum ^= fold(values[j]);
    }
    for (; i < end; i += blockDim.x) sum ^= fold(__ldcs(p + i));
    keep(sum, sink);
    wait_for_previous();
}

#if __CUDA_ARCH__ >= 900
// Each CTA an equal share by bulk copies into a ring of stages, all of them issued by one thread.
extern "C" __global__ void read_bulk(const uint4* p, unsigned* sink, long long n) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[STAGES];
    start_next();
    if (threadIdx.x == 0) {
        const long long first = n * blockIdx.x / gridDim.x * 16, end = n * (blockIdx.x + 1) / gridDim.x * 16;
        const char* from = reinterpret_cast<const char*>(p);
        const unsigned barrier = unsigned(__cvta_generic_to_shared(barriers));
        const unsigned stage_0 = unsigned(__cvta_generic_to_shared(memory));
        const int chunks = int((end - first + STAGE_BYTES - 1) / STAGE_BYTES);
        for (int stage = 0; stage < STAGES; ++stage)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * stage) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        const auto load = [&](int chunk) {
            const int stage = chunk % STAGES;
            const long long start = first + (long long)chunk * STAGE_BYTES, left = end - start;
            const unsigned bytes = unsigned(left < STAGE_BYTES ? left : STAGE_BYTES);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier + 8 * stage), "r"(bytes)
                         : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    stage_0 + stage * STAGE_BYTES),
                "l"(from + start), "r"(bytes), "r"(barrier + 8 * stage)
                : "memory");
        };
        for (int chunk = 0; chunk < STAGES && chunk < chunks; ++chunk) load(chunk);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const unsigned address = barrier + 8 * (chunk % STAGES), parity = chunk / STAGES % 2;
            unsigned done = 0;
            while (!done)
                asm volatile(
                    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done)
                    : "r"(address), "r"(parity)
                    : "memory");
            if (chunk + STAGES < chunks) load(chunk + STAGES);
        }
    }
    wait_for_previous();
}
#endif
