// A pool of threads that share the rows of a product: one job at a time, and each thread has a contiguous run of rows.
//
// A run is divided into chunks by an atomic counter; a thread that has finished its own run helps with the others. The
// same thread therefore reads the same rows of W at each call, from memory that its NUMA node may hold, and no thread
// waits for a slow one. The calling thread works too and never waits for a thread to start: a late thread finds the job
// closed. A call that finds the pool busy does its job alone, and so does one whose job is small (worth_sharing). Idle
// threads spin for a millisecond, then sleep.
//
// Where torch has threads of an OpenMP runtime, products run on those: they spin after each of torch's operations, for
// milliseconds, on the cores that the pool's threads would need, and the other way round. But a region of OpenMP ends
// when all its threads have joined it, also those that other processes delay and that find nothing left to do. After
// such a wait, products of one row of x, which are short beside it, run on the pool's own threads for a while.
#define _GNU_SOURCE
#include "threads.h"

#include "calls.h"

enum { MAX_HELPERS = 255, SPIN_NS = 1000000, SPINS = 4096 };

enum { LATE_NS = 500000, AVOIDED_NS = 100000000 };  // a wait for late threads of OpenMP, and how long it is remembered

// Multiply-adds of a job from which on other threads save more time than they cost, at some 20 a nanosecond: threads
// that still spin cost 2 us, while waking them costs the caller 10 to 20 us, and where a core is busy the wait for it.
enum { LEAST_SHARED = 1 << 17, LEAST_WAKING = 1 << 21 };

// Items next to last - 1, on a cache line of its own.
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t last;
} run;

// Functions of an OpenMP runtime of this process; null where jobs run on the pool's own threads.
static struct {
    void (*_Atomic parallel)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);  // GOMP_parallel
    int (*max_threads)(void);
    _Atomic int next;         // the number of the next thread that joins a job
    _Atomic int64_t worked;   // when a thread last ended its part of a job
    _Atomic int64_t avoided;  // until when jobs of one row run elsewhere
} openmp;

static struct {
    // The job. Written only while `open` is 0 and no helper is `inside`.
    work_fn work;
    const void* argument;
    int64_t chunk;
    run runs[MAX_HELPERS + 1];  // the caller's run, then one for each helper
    _Atomic int open, inside;
    _Atomic uint32_t round;             // counts the jobs
    uint32_t first_round[MAX_HELPERS];  // the round during which a helper was started: not its job
    _Atomic int busy, stop, sleeping, wanted_helpers;
    _Atomic int64_t ended;  // when the latest job of LEAST_SHARED or more ended
    int helpers, shares;    // shares: the number of runs of the job
    thread_handle threads[MAX_HELPERS];
    thread_start starts[MAX_HELPERS];
} pool;

// Works on the thread's own run, then on those of the threads after it; returns whether anything was left to do.
static int work_chunks(int self) {
    const int threads = pool.shares;
    int worked = 0;
    for (int i = 0; i < threads; ++i) {
        run* share = &pool.runs[(self + i) % threads];
        while (atomic_load(&share->next) < share->last) {
            const int64_t first = atomic_fetch_add(&share->next, pool.chunk), last = first + pool.chunk;
            if (first >= share->last) continue;
            pool.work(pool.argument, first, last < share->last ? last : share->last);
            worked = 1;
        }
    }
    return worked;
}

// Divides the items into runs of whole chunks whose lengths differ by at most one chunk.
static void share_out(int64_t count, int threads) {
    pool.shares = threads;
    const int64_t chunks = (count + pool.chunk - 1) / pool.chunk;
    for (int i = 0; i < threads; ++i) {
        const int64_t last = chunks * (i + 1) / threads * pool.chunk;
        atomic_store(&pool.runs[i].next, chunks * i / threads * pool.chunk);
        pool.runs[i].last = last < count ? last : count;
    }
}

static void help(int helper) {
    uint32_t last_round = pool.first_round[helper];
    for (;;) {
        const int64_t until = now_ns() + SPIN_NS;
        for (int spin = 0; atomic_load(&pool.round) == last_round; ++spin) {
            RELAX();
            if (spin % 64 == 63 && now_ns() > until) {
                atomic_fetch_add(&pool.sleeping, 1);  // before the round is read again: see begin_round
                while (atomic_load(&pool.round) == last_round) wait_while(&pool.round, last_round);
                atomic_fetch_sub(&pool.sleeping, 1);
            }
        }
        if (atomic_load(&pool.stop)) return;
        last_round = atomic_load(&pool.round);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open)) work_chunks(helper + 1);
        atomic_fetch_sub(&pool.inside, 1);
    }
}

// A helper that is about to sleep counts itself first and then reads the round; here the order is the reverse, so that
// it either sees the new round or is woken.
static void begin_round(void) {
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleeping)) wake_waiting(&pool.round);
}

static void start_helpers(void) {
    for (; pool.helpers < atomic_load(&pool.wanted_helpers); ++pool.helpers) {
        const int i = pool.helpers;
        pool.first_round[i] = atomic_load(&pool.round);
        pool.starts[i] = (thread_start){help, i};
        if (!create_thread(&pool.threads[i], &pool.starts[i])) break;  // the pool runs with fewer threads
    }
}

static void stop_helpers(void) {
    atomic_store(&pool.stop, 1);
    begin_round();
    for (int i = 0; i < pool.helpers; ++i) join_thread(pool.threads[i]);
    pool.helpers = 0;
    atomic_store(&pool.stop, 0);
}

static void join_openmp(void* unused) {
    (void)unused;
    if (work_chunks(atomic_fetch_add(&openmp.next, 1) % pool.shares)) atomic_store(&openmp.worked, now_ns());
}

// Whether the job runs on the threads of OpenMP: only where these are as many, since the runtime ends threads that a
// smaller region does not need and starts them again for the next one.
static int runs_on_openmp(int threads, int64_t rows) {
    return atomic_load(&openmp.parallel) && openmp.max_threads() == threads &&
           (rows > 1 || now_ns() > atomic_load(&openmp.avoided));
}

// Whether a job is large enough for other threads. After a pause they sleep, and a small job does not wake them; the
// next one of a series does.
static int worth_sharing(int64_t steps) {
    return steps >= LEAST_WAKING || (steps >= LEAST_SHARED && now_ns() - atomic_load(&pool.ended) < SPIN_NS);
}

// Runs a job on all threads. The pool is busy with it.
static void share(work_fn work, const void* argument, int64_t count, int64_t chunk, int64_t rows) {
    const int threads = atomic_load(&pool.wanted_helpers) + 1;
    pool.work = work, pool.argument = argument, pool.chunk = chunk;
    if (runs_on_openmp(threads, rows)) {
        share_out(count, threads);
        atomic_store(&openmp.next, 0);
        atomic_load (&openmp.parallel)(join_openmp, 0, (unsigned)threads, 0);
        const int64_t end = now_ns();
        if (end - atomic_load(&openmp.worked) > LATE_NS) atomic_store(&openmp.avoided, end + AVOIDED_NS);
        return;
    }
    start_helpers();
    share_out(count, pool.helpers + 1);
    atomic_store(&pool.open, 1);
    begin_round();
    work_chunks(0);
    atomic_store(&pool.open, 0);
    for (int spin = 0; atomic_load(&pool.inside); ++spin)
        if (spin < SPINS)
            RELAX();
        else
            yield_core();  // a helper inside may need this core
}

// Runs work(argument, first, last) for items 0 to count - 1, in chunks. rows: of x. steps: multiply-adds of all items.
static void run_items(work_fn work, const void* argument, int64_t count, int64_t chunk, int64_t rows, int64_t steps) {
    if (count <= 0) return;
    if (count <= chunk || !atomic_load(&pool.wanted_helpers) || !worth_sharing(steps) ||
        atomic_exchange(&pool.busy, 1)) {
        work(argument, 0, count);
    } else {
        share(work, argument, count, chunk, rows);
        atomic_store(&pool.busy, 0);
    }
    if (steps >= LEAST_SHARED) atomic_store(&pool.ended, now_ns());
}

// Shares a job that is no product, such as encoding, among the threads.
void qgemm_run(work_fn work, const void* argument, int64_t count, int64_t chunk) {
    run_items(work, argument, count, chunk, 1, LEAST_WAKING);
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

// Lets jobs run on the threads of an OpenMP runtime, by its GOMP_parallel and omp_get_max_threads; null: by none.
void qgemm_use_openmp(void* parallel, void* max_threads) {
    openmp.max_threads = (int (*)(void))max_threads;
    atomic_store(&openmp.avoided, 0);
    atomic_store(&openmp.parallel, (void (*)(void (*)(void*), void*, unsigned, unsigned))parallel);
}

// Resets the pool in the child of a fork, where only the forking thread exists; the next job starts new threads.
void qgemm_after_fork(void) {
    reset_waiting();
    atomic_store(&openmp.parallel, 0);  // a region of libgomp would wait for threads of the parent
    pool.helpers = 0;
    atomic_store(&pool.open, 0), atomic_store(&pool.inside, 0);
    atomic_store(&pool.busy, 0), atomic_store(&pool.stop, 0), atomic_store(&pool.sleeping, 0);
}

#include "multiply.h"

#include "experts.h"
#include "replay.h"
