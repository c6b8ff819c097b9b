// A pool of threads that share the rows of a product: one job at a time, each thread a contiguous run of rows.
//
// A run is taken in chunks from an atomic counter; a thread that has done its own takes what is left of the others'. So
// the same thread reads the same rows of W each time, from memory that its node may have, and none waits for a slow
// one. Who calls works as well, and never waits for a thread to begin: a thread that comes late finds the job closed. A
// call that finds the pool busy does its job alone. Threads without work spin for a millisecond, then sleep.
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

// The items next .. last - 1, on a cache line of its own.
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t last;
} run;

static struct {
    // A job: written while `open` is 0 and nobody is `inside`.
    work_fn work;
    const void* argument;
    int64_t chunk;
    run runs[MAX_HELPERS + 1];  // of the caller, then of each helper
    _Atomic int open, inside;
    _Atomic uint64_t round;             // of jobs
    uint64_t first_round[MAX_HELPERS];  // that each helper has not to do
    _Atomic int busy, stop, sleeping, wanted;
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

// The run of a thread, then those that come after it.
static void work_chunks(int self) {
    const int threads = pool.helpers + 1;
    for (int i = 0; i < threads; ++i) {
        run* of = &pool.runs[(self + i) % threads];
        while (atomic_load(&of->next) < of->last) {
            const int64_t first = atomic_fetch_add(&of->next, pool.chunk), last = first + pool.chunk;
            if (first < of->last) pool.work(pool.argument, first, last < of->last ? last : of->last);
        }
    }
}

// Whole chunks to each thread, as many as to any other or one fewer.
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
    uint64_t seen = pool.first_round[helper];
    for (;;) {
        const int64_t until = now_ns() + SPIN_NS;
        for (int turn = 0; atomic_load(&pool.round) == seen && !atomic_load(&pool.stop); ++turn) {
            RELAX();
            if (turn % 64 == 63 && now_ns() > until) {
                pthread_mutex_lock(&pool.lock);
                atomic_fetch_add(&pool.sleeping, 1);
                while (atomic_load(&pool.round) == seen && !atomic_load(&pool.stop))
                    pthread_cond_wait(&pool.wake, &pool.lock);
                atomic_fetch_sub(&pool.sleeping, 1);
                pthread_mutex_unlock(&pool.lock);
            }
        }
        if (atomic_load(&pool.stop)) return 0;
        seen = atomic_load(&pool.round);
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
    if (pool.helpers >= atomic_load(&pool.wanted)) return;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the threads that Python knows
    for (; pool.helpers < atomic_load(&pool.wanted); ++pool.helpers) {
        pool.first_round[pool.helpers] = atomic_load(&pool.round);
        void* number = (void*)(intptr_t)pool.helpers;
        if (pthread_create(&pool.threads[pool.helpers], 0, help, number)) break;  // then fewer
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

// Do work(argument, first, last) for all of 0 .. count - 1, in chunks.
void qgemm_run(work_fn work, const void* argument, int64_t count, int64_t chunk) {
    if (count <= chunk || !atomic_load(&pool.wanted) || atomic_exchange(&pool.busy, 1)) {
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
    for (int turn = 0; atomic_load(&pool.inside); ++turn)
        if (turn < SPINS)
            RELAX();
        else
            sched_yield();  // who is inside may need this very core
    atomic_store(&pool.busy, 0);
}

// So many threads from now on, the caller's among them; those that are there are ended. 0: nothing is done (busy).
int qgemm_threads(int count) {
    if (atomic_exchange(&pool.busy, 1)) return 0;
    stop_helpers();
    const int wanted = count < 1 ? 0 : count > MAX_HELPERS ? MAX_HELPERS : count - 1;
    atomic_store(&pool.wanted, wanted);
    atomic_store(&pool.busy, 0);
    return wanted + 1;
}

// In the child of a fork, where only the thread that forked is left: threads are started anew by the next job.
void qgemm_after_fork(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.helpers = 0;
    atomic_store(&pool.open, 0), atomic_store(&pool.inside, 0);
    atomic_store(&pool.busy, 0), atomic_store(&pool.stop, 0), atomic_store(&pool.sleeping, 0);
}

#include "multiply.h"
