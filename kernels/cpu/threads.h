// Threads, and waiting until a word in memory changes: futex on Linux, WaitOnAddress on Windows, else a lock with a
// condition variable, which every POSIX system has (macro USE_CONDITION: on Linux as well, for tests).
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { THREAD_STACK = 8 << 20 };  // bytes: macOS gives a thread 512 KiB, less than a product by tiles needs

typedef void (*thread_body)(int number);
typedef struct {
    thread_body body;
    int number;
} thread_start;

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef HANDLE thread_handle;

static int64_t now_ns(void) {
    LARGE_INTEGER ticks, rate;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&rate);
    return (int64_t)((double)ticks.QuadPart * 1e9 / (double)rate.QuadPart);
}

static void yield_core(void) { SwitchToThread(); }

static DWORD WINAPI run_thread(void* start) {
    const thread_start* t = start;
    t->body(t->number);
    return 0;
}

// Returns 0 where the system gives no thread. `start` stays valid as long as the thread.
static int create_thread(thread_handle* thread, thread_start* start) {
    *thread = CreateThread(0, THREAD_STACK, run_thread, start, STACK_SIZE_PARAM_IS_A_RESERVATION, 0);
    return *thread != 0;
}

static void join_thread(thread_handle thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

// Waits while the word has this value; may return earlier.
static void wait_while(_Atomic uint32_t* word, uint32_t value) {
    WaitOnAddress((void*)word, &value, sizeof value, INFINITE);
}

// Wakes all threads that wait for the word, which has changed.
static void wake_waiting(_Atomic uint32_t* word) { WakeByAddressAll((void*)word); }

// Resets the waiting in a child of a fork, where no other thread exists.
static void reset_waiting(void) {}

#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

typedef pthread_t thread_handle;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void yield_core(void) { sched_yield(); }

static void* run_thread(void* start) {
    const thread_start* t = start;
    t->body(t->number);
    return 0;
}

static int create_thread(thread_handle* thread, thread_start* start) {
    sigset_t all, old;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals stay with the threads that Python started
    const int failed = pthread_create(thread, &attributes, run_thread, start);
    pthread_sigmask(SIG_SETMASK, &old, 0);
    pthread_attr_destroy(&attributes);
    return !failed;
}

static void join_thread(thread_handle thread) { pthread_join(thread, 0); }

#if defined(__linux__) && !defined(USE_CONDITION)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait_while(_Atomic uint32_t* word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake_waiting(_Atomic uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }

static void reset_waiting(void) {}

#else
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
} waiting = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

static void wait_while(_Atomic uint32_t* word, uint32_t value) {
    pthread_mutex_lock(&waiting.lock);
    if (atomic_load(word) == value) pthread_cond_wait(&waiting.changed, &waiting.lock);
    pthread_mutex_unlock(&waiting.lock);
}

static void wake_waiting(_Atomic uint32_t* word) {
    (void)word;  // one word is waited for
    pthread_mutex_lock(&waiting.lock);
    pthread_cond_broadcast(&waiting.changed);
    pthread_mutex_unlock(&waiting.lock);
}

static void reset_waiting(void) {
    pthread_mutex_init(&waiting.lock, 0);
    pthread_cond_init(&waiting.changed, 0);
}
#endif
#endif
