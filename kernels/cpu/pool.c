// A pool of threads that share the rows of a product: one job at a time, in chunks from an atomic counter.
//
// Who calls works as well, and never waits for a thread to begin: a thread that comes late finds the job closed. A call
// that finds the pool busy does its job alone. Threads without work spin for a millisecond, then sleep.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_HELPERS = 255, SPIN_NS = 1000000 };

typedef void (*work_fn)(const void* argument, int64_t first, int64_t last);

static struct {
    // A job: written while `open` is 0 and nobody is `inside`.
    work_fn work;
    const void* argument;
    int64_t count, chunk;
    _Atomic int64_t next;
    _Atomic int open, inside;
    _Atomic uint64_t round;  // of jobs
    _Atomic int busy, stop, sleeping;
    int helpers, wanted;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MAX_HELPERS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void work_chunks(void) {
    for (int64_t first; (first = atomic_fetch_add(&pool.next, pool.chunk)) < pool.count;) {
        const int64_t last = first + pool.chunk;
        pool.work(pool.argument, first, last < pool.count ? last : pool.count);
    }
}

static void* help(void* unused) {
    uint64_t seen = (uintptr_t)unused;
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
        if (atomic_load(&pool.open)) work_chunks();
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
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the threads that Python knows
    while (pool.helpers < pool.wanted) {
        void* seen = (void*)(uintptr_t)atomic_load(&pool.round);
        if (pthread_create(&pool.threads[pool.helpers], 0, help, seen)) break;  // then fewer
        ++pool.helpers;
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
    if (count <= chunk || !pool.wanted || atomic_exchange(&pool.busy, 1)) {
        if (count > 0) work(argument, 0, count);
        return;
    }
    if (pool.helpers < pool.wanted) start_helpers();
    pool.work = work, pool.argument = argument, pool.count = count, pool.chunk = chunk;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.round, 1);
    wake_all();
    work_chunks();
    atomic_store(&pool.open, 0);
    while (atomic_load(&pool.inside)) RELAX();
    atomic_store(&pool.busy, 0);
}

// So many threads from now on, the caller's among them; those that are there are ended. 0: nothing is done (busy).
int qgemm_threads(int count) {
    if (atomic_exchange(&pool.busy, 1)) return 0;
    stop_helpers();
    pool.wanted = count < 1 ? 0 : count > MAX_HELPERS ? MAX_HELPERS : count - 1;
    atomic_store(&pool.busy, 0);
    return pool.wanted + 1;
}

// In the child of a fork, where only the thread that forked is left: threads are started anew by the next job.
void qgemm_after_fork(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.helpers = 0;
    atomic_store(&pool.open, 0), atomic_store(&pool.inside, 0);
    atomic_store(&pool.busy, 0), atomic_store(&pool.stop, 0), atomic_store(&pool.sleeping, 0);
}
