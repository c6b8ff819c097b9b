// A pool of threads that share the rows of a product: one job at a time, and each thread has a contiguous run of rows.
//
// A run is divided into chunks by an atomic counter; a thread that has finished its own run helps with the others. The
// same thread therefore reads the same rows of W at each call, from memory that its NUMA node may hold, and no thread
// waits for a slow one. The calling thread works too and never waits for a thread to start: a late thread finds the job
// closed. A call that finds the pool busy does its job alone. Idle threads spin for a millisecond, then sleep.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "calls.h"
#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_HELPERS = 255, SPIN_NS = 1000000, SPINS = 4096 };

// Items next to last - 1, on a cache line of its own.
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t last;
} run;

static struct {
    // The job. Written only while `open` is 0 and no helper is `inside`.
    work_fn work;
    const void* argument;
    int64_t chunk;
    run runs[MAX_HELPERS + 1];  // the caller's run, then one for each helper
    _Atomic int open, inside;
    _Atomic uint64_t round;             // counts the jobs
    uint64_t first_round[MAX_HELPERS];  // the round during which a helper was started: not its job
    _Atomic int busy, stop, sleeping, wanted_helpers;
    int helpers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MAX_HELPERS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Works on the thread's own run, then on those of the threads after it.
static void work_chunks(int self) {
    const int threads = pool.helpers + 1;
    for (int i = 0; i < threads; ++i) {
        run* share = &pool.runs[(self + i) % threads];
        while (atomic_load(&share->next) < share->last) {
            const int64_t first = atomic_fetch_add(&share->next, pool.chunk), last = first + pool.chunk;
            if (first < share->last) pool.work(pool.argument, first, last < share->last ? last : share->last);
        }
    }
}

// Divides the items into runs of whole chunks whose lengths differ by at most one chunk.
static void share_out(int64_t count) {
    const int threads = pool.helpers + 1;
    const int64_t chunks = (count + pool.chunk - 1) / pool.chunk;
    for (int i = 0; i < threads; ++i) {
        const int64_t last = chunks * (i + 1) / threads * pool.chunk;
        atomic_store(&pool.runs[i].next, chunks * i / threads * pool.chunk);
        pool.runs[i].last = last < count ? last : count;
    }
}

static void* help(void* number) {
    const int helper = (int)(intptr_t)number;
    uint64_t last_round = pool.first_round[helper];
    for (;;) {
        const int64_t until = now_ns() + SPIN_NS;
        for (int spin = 0; atomic_load(&pool.round) == last_round && !atomic_load(&pool.stop); ++spin) {
            RELAX();
            if (spin % 64 == 63 && now_ns() > until) {
                pthread_mutex_lock(&pool.lock);
                atomic_fetch_add(&pool.sleeping, 1);
                while (atomic_load(&pool.round) == last_round && !atomic_load(&pool.stop))
                    pthread_cond_wait(&pool.wake, &pool.lock);
                atomic_fetch_sub(&pool.sleeping, 1);
                pthread_mutex_unlock(&pool.lock);
            }
        }
        if (atomic_load(&pool.stop)) return 0;
        last_round = atomic_load(&pool.round);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open)) work_chunks(helper + 1);
        atomic_fetch_sub(&pool.inside, 1);
    }
}

static void wake_all(void) {
    if (!atomic_load(&pool.sleeping)) return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void start_helpers(void) {
    if (pool.helpers >= atomic_load(&pool.wanted_helpers)) return;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals stay with the threads that Python started
    for (; pool.helpers < atomic_load(&pool.wanted_helpers); ++pool.helpers) {
        pool.first_round[pool.helpers] = atomic_load(&pool.round);
        void* number = (void*)(intptr_t)pool.helpers;
        if (pthread_create(&pool.threads[pool.helpers], 0, help, number)) break;  // the pool runs with fewer threads
    }
    pthread_sigmask(SIG_SETMASK, &old, 0);
}

static void stop_helpers(void) {
    atomic_store(&pool.stop, 1);
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.helpers; ++i) pthread_join(pool.threads[i], 0);
    pool.helpers = 0;
    atomic_store(&pool.stop, 0);
}

// Runs work(argument, first, last) for items 0 to count - 1, in chunks.
void qgemm_run(work_fn work, const void* argument, int64_t count, int64_t chunk) {
    if (count <= chunk || !atomic_load(&pool.wanted_helpers) || atomic_exchange(&pool.busy, 1)) {
        if (count > 0) work(argument, 0, count);
        return;
    }
    start_helpers();
    pool.work = work, pool.argument = argument, pool.chunk = chunk;
    share_out(count);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.round, 1);
    wake_all();
    work_chunks(0);
    atomic_store(&pool.open, 0);
    for (int spin = 0; atomic_load(&pool.inside); ++spin)
        if (spin < SPINS)
            RELAX();
        else
            sched_yield();  // a helper inside may need this core
    atomic_store(&pool.busy, 0);
}

// Sets the number of threads, the caller included, after ending the present ones. Returns it, or 0 if the pool is busy
// and nothing changed.
int qgemm_threads(int count) {
    if (atomic_exchange(&pool.busy, 1)) return 0;
    stop_helpers();
    const int helpers = count < 1 ? 0 : count > MAX_HELPERS ? MAX_HELPERS : count - 1;
    atomic_store(&pool.wanted_helpers, helpers);
    atomic_store(&pool.busy, 0);
    return helpers + 1;
}

// Resets the pool in the child of a fork, where only the forking thread exists; the next job starts new threads.
void qgemm_after_fork(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.helpers = 0;
    atomic_store(&pool.open, 0), atomic_store(&pool.inside, 0);
    atomic_store(&pool.busy, 0), atomic_store(&pool.stop, 0), atomic_store(&pool.sleeping, 0);
}

#include "multiply.h"
