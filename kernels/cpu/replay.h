// A call like an earlier one, on arrays at other addresses.
//
// Macro: REPLAY_FIELDS, the fields of `replay` (qgemm/cpu/native/calls.py).
typedef struct {
    REPLAY_FIELDS
} replay;

// Two arrays that must not share memory: an output, and another of `other_nbytes`. may_be_same: whether both may have
// the same address.
typedef struct {
    int64_t y, other, y_nbytes, other_nbytes, may_be_same;
} guard;

static int overlaps(const guard* g, const char* const* addresses) {
    const int64_t distance = addresses[g->other] - addresses[g->y];
    return -g->other_nbytes < distance && distance < g->y_nbytes && !(g->may_be_same && !distance);
}

// Copies the record of a call and fills in the addresses of its arrays; returns 0 if C cannot work on them in place.
static int fill_in(const replay* r, const char* const* addresses, void* record) {
    const int64_t *masks = r->masks, *offsets = r->offsets;
    const guard* guards = r->guards;
    for (int64_t i = 0; i < r->arrays; ++i)
        if ((uintptr_t)addresses[i] & (uintptr_t)masks[i]) return 0;
    for (int64_t i = 0; i < r->guard_count; ++i)
        if (overlaps(&guards[i], addresses)) return 0;
    memcpy(record, r->record, r->size);
    for (int64_t i = 0; i < r->arrays; ++i)
        if (offsets[i] >= 0) memcpy((char*)record + offsets[i], &addresses[i], sizeof addresses[i]);
    return 1;
}

// Multiplies arrays at these addresses, x first; returns 0 if C cannot work on them in place, and has then done
// nothing. memory: as for qgemm_multiply, `packed` bytes of it for x packed.
int qgemm_replay(const void* call, const void* addresses, void* memory) {
    const replay* r = call;
    const char* const* a = addresses;
    target targets[MOST_TARGETS];
    if (!fill_in(r, a, targets)) return 0;
    qgemm_multiply(targets, r->count, a[0], r->m, memory, (char*)memory + r->packed);
    return 1;
}

// Repeats a call by experts; returns 0 if the call does not fit, or for an id that is no expert.
int qgemm_replay_experts(const void* call, const void* addresses, void* memory) {
    experts e;
    return fill_in(call, addresses, &e) && multiply_by_experts(&e, memory);
}
