// A CTA on one host thread: every CUDA thread is a fiber, which runs until it has to wait for its warp or its CTA. At a
// barrier that some threads do not reach the process ends with a message.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <vector>

#include "small_float.h"

// A copy of 16 bytes to shared memory, zeros from nowhere, that a thread waits for as one of a group.
struct Copy {
    unsigned to;
    const void* from;
    int group;
};

// The stack of a CUDA thread, and where it waits. A thread of one CTA is a thread of the next one on the same stack.
//
// A fiber is begun by its context, then left and entered by jumps: swapping contexts would cost a system call each time.
struct Fiber {
    enum State { READY, WARP, WHOLE_CTA, DONE };
    ucontext_t context;
    jmp_buf place;
    State state = DONE;
    uint64_t shown = 0;        // the value that other lanes read by shuffle
    std::vector<Copy> copies;  // copies under way
    int groups = 0;            // committed groups of copies
    alignas(16) char stack[64 << 10];
};
using Fibers = std::vector<std::unique_ptr<Fiber>>;

class Cta {
public:
    // Runs kernel() for each of `threads` threads of CTA `block` of `grid`. backwards: the last thread first, so that
    // what depends on the order of threads, for lack of a barrier, comes out differently. fibers: of the grid's CTAs.
    template <class Kernel>
    Cta(Fibers& fibers, dim3 grid, dim3 block, int threads, bool backwards, const Kernel& kernel)
        : fibers(fibers),
          kernel(&kernel),
          call([](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); }),
          threads(threads) {
        gridDim = grid, blockIdx = block, blockDim = {unsigned(threads), 1, 1};
        memset(host_dynamic_smem, 0xff, sizeof(host_dynamic_smem));  // NaN replaces the values of an earlier CTA
        running() = this;
        for (current = 0; current < threads; ++current) {
            if (current == int(fibers.size())) {
                fibers.emplace_back(new Fiber);
                begin(*fibers.back());
            }
            fibers[current]->state = Fiber::READY;
            fibers[current]->copies.clear();
            fibers[current]->groups = 0;
        }
        while (turn(backwards)) release();
    }

    void wait_for_warp() { wait(Fiber::WARP); }
    void wait_for_cta() { wait(Fiber::WHOLE_CTA); }

    // The value of lane `from` of the same warp.
    template <class T>
    T shuffle(T value, int from) {
        static_assert(sizeof(T) <= sizeof(Fiber::shown), "a value of 8 bytes at most");
        const unsigned thread = threadIdx.x;
        memcpy(&fibers[thread]->shown, &value, sizeof(T));
        wait_for_warp();
        T received;
        memcpy(&received, &fibers[thread / 32 * 32 + from]->shown, sizeof(T));
        wait_for_warp();
        return received;
    }

    // The values of all lanes of the warp, for an instruction that all of them execute together.
    template <class T>
    void gather(const T& own, T (&all)[32]) {
        const unsigned thread = threadIdx.x;
        fibers[thread]->shown = reinterpret_cast<uint64_t>(&own);
        wait_for_warp();
        for (int lane = 0; lane < 32; ++lane)
            all[lane] = *reinterpret_cast<const T*>(fibers[thread / 32 * 32 + lane]->shown);
        wait_for_warp();
    }

    // cp.async, as late as it may be: the 16 bytes, or zeros, are there once the thread has waited for their group.
    void copy_later(unsigned to, const void* from, bool inside) {
        Fiber& fiber = *fibers[threadIdx.x];
        fiber.copies.push_back({to, inside ? from : nullptr, fiber.groups});
    }
    void commit_copies() { ++fibers[threadIdx.x]->groups; }
    void wait_for_copies(int under_way) {
        Fiber& fiber = *fibers[threadIdx.x];
        size_t done = 0;
        for (; done < fiber.copies.size() && fiber.copies[done].group < fiber.groups - under_way; ++done) {
            const Copy& copy = fiber.copies[done];
            copy.from ? memcpy(host_shared(copy.to), copy.from, 16) : memset(host_shared(copy.to), 0, 16);
        }
        fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + done);
    }

    static Cta*& running() {
        static Cta* cta = nullptr;
        return cta;
    }

private:
    Fibers& fibers;
    const void* kernel;
    void (*call)(const void*);
    int threads, current = 0;
    jmp_buf scheduler;

    // As far as it waits for the thread that it is to be.
    void begin(Fiber& fiber) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = sizeof(fiber.stack);
        makecontext(&fiber.context, live, 0);
        if (!_setjmp(scheduler)) setcontext(&fiber.context);
    }
    // A thread of one CTA after the other.
    [[noreturn]] static void live() {
        for (;;) {
            running()->wait(Fiber::DONE);
            running()->call(running()->kernel);
        }
    }
    // To the scheduler, until it enters the fiber again.
    void wait(Fiber::State state) {
        fibers[current]->state = state;
        if (!_setjmp(fibers[current]->place)) _longjmp(scheduler, 1);
    }
    void enter() {
        if (!_setjmp(scheduler)) _longjmp(fibers[current]->place, 1);
    }
    // All threads that need not wait, each until it has to; false if none is left.
    bool turn(bool backwards) {
        bool any = false;
        for (int i = 0; i < threads; ++i) {
            current = backwards ? threads - 1 - i : i;
            if (fibers[current]->state == Fiber::DONE) continue;
            any = true;
            if (fibers[current]->state != Fiber::READY) continue;
            threadIdx = {unsigned(current), 0, 0};
            enter();
        }
        return any;
    }
    void release() {
        bool moved = release(0, threads, Fiber::WHOLE_CTA);
        for (int first = 0; first < threads; first += 32)
            moved |= release(first, min(threads, first + 32), Fiber::WARP);
        for (int i = 0; i < threads; ++i)
            if (!moved && fibers[i]->state != Fiber::DONE) {
                fprintf(stderr, "a barrier that only some threads of CTA %u reach\n", blockIdx.x);
                abort();
            }
    }
    // Makes these threads ready if all of them wait for this; those that have ended wait no more.
    bool release(int first, int end, Fiber::State state) {
        bool waiting = false;
        for (int i = first; i < end; ++i) {
            if (fibers[i]->state != state && fibers[i]->state != Fiber::DONE) return false;
            waiting |= fibers[i]->state == state;
        }
        if (!waiting) return false;
        for (int i = first; i < end; ++i)
            if (fibers[i]->state == state) fibers[i]->state = Fiber::READY;
        return true;
    }
};

inline std::map<std::pair<unsigned, unsigned>, float>& cluster_stores() {
    static std::map<std::pair<unsigned, unsigned>, float> stores;
    return stores;
}

inline void host_cp_async_16(unsigned to, const void* from, bool inside) {
    Cta::running()->copy_later(to, from, inside);
}
inline void host_cp_async_commit() { Cta::running()->commit_copies(); }
inline void host_cp_async_wait(int under_way) { Cta::running()->wait_for_copies(under_way); }
inline void __syncthreads() { Cta::running()->wait_for_cta(); }
inline void __syncwarp(unsigned = ~0u) { Cta::running()->wait_for_warp(); }
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int lanes) {
    return Cta::running()->shuffle(value, int(threadIdx.x % 32) ^ lanes);
}
template <class T>
inline T __shfl_sync(unsigned, T value, int from, int width = 32) {
    return Cta::running()->shuffle(value, int(threadIdx.x) % 32 / width * width + from % width);
}

// Clusters: CTAs run one after the other, so what one stores in another's shared memory is kept, and is there at the
// barriers of the next run of their row of the grid (run.h). Address -> value, of each CTA of a row.
inline unsigned& cluster_size() {
    static unsigned size = 1;
    return size;
}
inline void host_st_shared_cluster(unsigned address, int rank, float value) {
    cluster_stores()[{blockIdx.x / cluster_size() * cluster_size() + rank, address}] = value;
}
inline void host_barrier_cluster_wait() {
    __syncthreads();
    if (threadIdx.x == 0)
        for (auto at = cluster_stores().lower_bound({blockIdx.x, 0});
             at != cluster_stores().end() && at->first.first == blockIdx.x; ++at)
            memcpy(host_shared(at->first.second), &at->second, sizeof(at->second));
    __syncthreads();
}

// mma.sync, m16n8kK: c += a @ b. Register i of operand A has rows g (even i) and g + 8, of B column g; each word has PER
// values of consecutive k, which of_a(word, number) and of_b give.
template <int K, int PER, class Sum, class A, class B, class OfA, class OfB>
void host_mma(Sum (&c)[4], const A& a, const B& b, OfA of_a, OfB of_b) {
    struct Operands {
        A a;
        B b;
    } all[32];
    Cta::running()->gather({a, b}, all);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        decltype(of_a(0u, 0)) sum = c[i];
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < K; ++k) {
            const int quad = k / PER % 4, part = k / PER / 4;
            sum += of_a(all[row % 8 * 4 + quad].a.word[2 * part + row / 8], k % PER) *
                   of_b(all[column * 4 + quad].b.word[part], k % PER);
        }
        c[i] = Sum(sum);
    }
}
template <int K, int PER, class Sum, class A, class B, class Value>
void host_mma(Sum (&c)[4], const A& a, const B& b, Value value) {
    host_mma<K, PER>(c, a, b, value, value);
}
inline double host_half(unsigned word, int i) { return small_float<5>::value_of(word >> 16 * i); }
inline double host_bf16(unsigned word, int i) { return small_float<8>::value_of(word >> 16 * i); }
inline int host_s8(unsigned word, int i) { return int8_t(word >> 8 * i); }
// The number that an e4m3 code stands for, by its definition: kernels have the way back alone.
inline double host_e4m3(unsigned word, int i) {
    const unsigned code = word >> 8 * i & 255, size = code & 127;
    const double value = size == 127 ? NAN : size < 8 ? ldexp(size, -9) : ldexp(8 + size % 8, int(size / 8) - 10);
    return code & 128 ? -value : value;
}
inline int host_u8(unsigned word, int i) { return uint8_t(word >> 8 * i); }
template <int N>
struct Words {
    unsigned word[N];
};

// ldmatrix.x4: lane i has the address of row i % 8 of matrix i / 8 of 8 x 8 values of 16 bits.
inline void host_ldmatrix_x4(unsigned (&to)[4], unsigned row) {
    unsigned rows[32];
    Cta::running()->gather(row, rows);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i)
        memcpy(&to[i], static_cast<char*>(host_shared(rows[8 * i + lane / 4])) + 4 * (lane % 4), 4);
}

// stmatrix.x4: the other way.
inline void host_stmatrix_x4(unsigned row, const unsigned (&from)[4]) {
    unsigned rows[32];
    Cta::running()->gather(row, rows);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i)
        memcpy(static_cast<char*>(host_shared(rows[8 * i + lane / 4])) + 4 * (lane % 4), &from[i], 4);
}
