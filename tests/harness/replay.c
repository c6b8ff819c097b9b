// Calls of libraries of kernels/cpu/ made again on another CPU: from a file, each with the outputs that it must have.
//
// replay FILE: a head, the struct that is the argument, and for each of its pointers the place in it and the bytes that
// it points to. Prints what differs; ends with 1 if anything does.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"

enum { INPUT, OUTPUT, TO_PACK, ALIGNED = 64, MOST_BUFFERS = 16 };

// items: of a function (struct, first, last), -1 of a function (struct). digits, tiles, m, k, x_row: how x is packed.
typedef struct {
    char library[256], function[32];
    int64_t argument_bytes, buffers, items, digits, tiles, m, k, x_row;
} head;

typedef struct {
    int64_t place, size, kind;
} buffer;

typedef int64_t (*size_fn)(int32_t, int32_t, int64_t);
typedef void (*whole_fn)(const void*);

static void stop(const char* what) {
    fprintf(stderr, "replay: %s\n", what);
    exit(2);
}

static void* room(int64_t size) {
    void* found = 0;
    if (posix_memalign(&found, ALIGNED, size ? size : 1)) stop("no memory");
    memset(found, 0xa5, size);
    return found;
}

static void read_all(void* to, int64_t size, FILE* file) {
    if (size && fread(to, size, 1, file) != 1) stop("the file is cut short");
}

static void* function(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) stop(name);
    return found;
}

// x as the library packs it.
static char* packed(void* library, const head* call, const char* x) {
    const int64_t row = ((size_fn)function(library, "qgemm_packed_bytes"))(call->digits, call->tiles, call->k);
    char* to = room(call->m * row);
    const packing rows = {.to = to,
                          .to_row = row,
                          .x = x,
                          .x_row = call->x_row,
                          .m = call->m,
                          .k = call->k,
                          .digits = (int32_t)call->digits,
                          .tiles = (int32_t)call->tiles};
    ((work_fn)function(library, "qgemm_pack"))(&rows, 0, call->m);
    return to;
}

static int differs(const head* call, const buffer* of, const char* found, const char* want) {
    for (int64_t i = 0; i < of->size; ++i)
        if (found[i] != want[i]) {
            printf("%s %s: byte %lld of %lld at %lld: digits %lld, tiles %lld, m %lld, k %lld\n", call->library,
                   call->function, (long long)i, (long long)of->size, (long long)of->place, (long long)call->digits,
                   (long long)call->tiles, (long long)call->m, (long long)call->k);
            return 1;
        }
    return 0;
}

static int replay(const head* call, FILE* file) {
    void* library = dlopen(call->library, RTLD_NOW);
    if (!library) stop(dlerror());
    char* argument = room(call->argument_bytes);
    read_all(argument, call->argument_bytes, file);
    buffer of[MOST_BUFFERS];
    char *memory[MOST_BUFFERS], *want[MOST_BUFFERS];
    if (call->buffers > MOST_BUFFERS) stop("too many buffers");
    for (int i = 0; i < call->buffers; ++i) {
        read_all(&of[i], sizeof of[i], file);
        want[i] = room(of[i].size), memory[i] = room(of[i].size);
        read_all(want[i], of[i].size, file);
        if (of[i].kind != OUTPUT) memcpy(memory[i], want[i], of[i].size);
        void* to = of[i].kind == TO_PACK ? packed(library, call, memory[i]) : memory[i];
        memcpy(argument + of[i].place, &to, sizeof to);
    }
    void* called = function(library, call->function);
    call->items < 0 ? ((whole_fn)called)(argument) : ((work_fn)called)(argument, 0, call->items);
    int wrong = 0;
    for (int i = 0; i < call->buffers; ++i)
        if (of[i].kind == OUTPUT) wrong |= differs(call, &of[i], memory[i], want[i]);
    return wrong;
}

int main(int count, char** words) {
    FILE* file = count == 2 ? fopen(words[1], "rb") : 0;
    if (!file) stop("one file is wanted, of calls");
    head call;
    int calls = 0, wrong = 0;
    for (; fread(&call, sizeof call, 1, file) == 1; ++calls) wrong += replay(&call, file);
    printf("%d of %d calls agree\n", calls - wrong, calls);
    return wrong != 0;
}
