// A product like an earlier one, on arrays at other addresses.
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

// Multiplies arrays at these addresses, x first; returns 0 if C cannot work on them in place, and has then done
// nothing. memory: as for qgemm_multiply, `packed` bytes of it for x packed.
int qgemm_replay(const void* call, const void* addresses, void* memory) {
    const replay* r = call;
    const char* const* a = addresses;
    const int64_t *masks = r->masks, *offsets = r->offsets;
    const guard* guards = r->guards;
    target targets[MOST_TARGETS];
    for (int64_t i = 0; i < r->arrays; ++i)
        if ((uintptr_t)a[i] & (uintptr_t)masks[i]) return 0;
    for (int64_t i = 0; i < r->guard_count; ++i)
        if (overlaps(&guards[i], a)) return 0;
    memcpy(targets, r->targets, r->count * sizeof(target));
    for (int64_t i = 1; i < r->arrays; ++i) memcpy((char*)targets + offsets[i], &a[i], sizeof a[i]);
    qgemm_multiply(targets, r->count, a[0], r->m, memory, (char*)memory + r->packed);
    return 1;
}
