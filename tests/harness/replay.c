// Repeats calls of the libraries of kernels/cpu/ on another CPU, from a file that holds the expected outputs.
//
// replay FILE: a head, the struct that is the argument, and for each of its pointers the place in it and the bytes that
// it points to. Prints the bytes that differ; ends with 1 if any does.
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

static void stop(const char* message) {
    fprintf(stderr, "replay: %s\n", message);
    exit(2);
}

static void* allocate(int64_t size) {
    void* memory = 0;
    if (posix_memalign(&memory, ALIGNED, size ? size : 1)) stop("no memory");
    memset(memory, 0xa5, size);
    return memory;
}

static void read_all(void* to, int64_t size, FILE* file) {
    if (size && fread(to, size, 1, file) != 1) stop("the file is cut short");
}

static void* function(void* library, const char* name) {
    void* symbol = dlsym(library, name);
    if (!symbol) stop(name);
    return symbol;
}

// x as the library packs it.
static char* packed(void* library, const head* call, const char* x) {
    const int64_t row = ((size_fn)function(library, "qgemm_packed_bytes"))(call->digits, call->tiles, call->k);
    char* to = allocate(call->m * row);
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

static int differs(const head* call, const buffer* output, const char* bytes, const char* expected) {
    for (int64_t i = 0; i < output->size; ++i)
        if (bytes[i] != expected[i]) {
            printf("%s %s: byte %lld of %lld at %lld: digits %lld, tiles %lld, m %lld, k %lld\n", call->library,
                   call->function, (long long)i, (long long)output->size, (long long)output->place,
                   (long long)call->digits, (long long)call->tiles, (long long)call->m, (long long)call->k);
            return 1;
        }
    return 0;
}

static int replay(const head* call, FILE* file) {
    void* library = dlopen(call->library, RTLD_NOW);
    if (!library) stop(dlerror());
    char* argument = allocate(call->argument_bytes);
    read_all(argument, call->argument_bytes, file);
    buffer buffers[MOST_BUFFERS];
    char *memory[MOST_BUFFERS], *expected[MOST_BUFFERS];
    if (call->buffers > MOST_BUFFERS) stop("too many buffers");
    for (int i = 0; i < call->buffers; ++i) {
        read_all(&buffers[i], sizeof buffers[i], file);
        expected[i] = allocate(buffers[i].size), memory[i] = allocate(buffers[i].size);
        read_all(expected[i], buffers[i].size, file);
        if (buffers[i].kind != OUTPUT) memcpy(memory[i], expected[i], buffers[i].size);
        void* to = buffers[i].kind == TO_PACK ? packed(library, call, memory[i]) : memory[i];
        memcpy(argument + buffers[i].place, &to, sizeof to);
    }
    void* called = function(library, call->function);
    call->items < 0 ? ((whole_fn)called)(argument) : ((work_fn)called)(argument, 0, call->items);
    int wrong = 0;
    for (int i = 0; i < call->buffers; ++i)
        if (buffers[i].kind == OUTPUT) wrong |= differs(call, &buffers[i], memory[i], expected[i]);
    return wrong;
}

int main(int count, char** words) {
    FILE* file = count == 2 ? fopen(words[1], "rb") : 0;
    if (!file) stop("usage: replay FILE");
    head call;
    int calls = 0, wrong = 0;
    for (; fread(&call, sizeof call, 1, file) == 1; ++calls) wrong += replay(&call, file);
    printf("%d of %d calls agree\n", calls - wrong, calls);
    return wrong != 0;
}
