// SPDX-License-Identifier: GPL-2.0
// Latency, bytes and counts of every bio of the managed cgroups, aggregated in the kernel.
//
// Compiled by BCC with memory.h, typed.h, histogram.h, block_slots.h and block_flight.h in front. Offsets (OFF_*),
// argument positions (ARG_*) and enumerators (REQ_OP_*, BIO_CLONED) are macros taken from the running kernel's BTF by
// block.py; nothing is read through a struct of the headers. TYPED says that the programs are attached with BTF.
//
// A bio is recorded where it starts (submit_bio, or block_bio_queue where functions cannot be traced) and accounted
// where it ends (bio_endio, or block_rq_complete). The record holds the slot, so the owner is the one at the start:
// later the dispatcher may be a kworker. Splitting makes new bios (`pieces`) whose record points to the first one.
//
// A mapped device that is looked through is not counted: what it passes on starts at block_bio_remap, which comes before
// the blk-throttle of the device below.

#define NSEC_PER_USEC 1000

// A bio that was recorded on its way from a mapped device comes out of blk-throttle.
static __always_inline int was_remapped(struct flight_t *f)
{
    struct record_t *record = f->place < PLACES ? record_at(f->index, f->place) : 0;
    if (!record || !record->submitted || record->queued)
        return 0;
    record->queued = bpf_ktime_get_ns();
    return 1;
}

// `queued` says that the bio is past blk-throttle; `top` that stacked drivers' own bios are to be left out.
static __always_inline int start(int typed, u64 pointer, int queued, int top)
{
    struct control_t *c = shared();
    if (!c)
        return 0;
    u64 bio = number_of(typed, c, c->address, pointer), blkg = 0;
    struct flight_t f = find(bio);
    if (!f.bucket)
        return 0;
    if (f.place != NO_PLACE) {
        if (top && was_remapped(&f))
            return 0;
        forget(&f, bio);
    }
    u32 opf = WORD_IN(typed, pointer, OFF_BIO_OPF) & 0xff, bytes = WORD_IN(typed, pointer, OFF_BIO_SIZE);
    u32 op = opf == REQ_OP_READ ? READ_OP : WRITE_OP;
    if (!bytes || (opf != REQ_OP_READ && opf != REQ_OP_WRITE && opf != REQ_OP_ZONE_APPEND))
        return 0;
    if (top && !c->only_listed && (HALF_IN(typed, pointer, OFF_BIO_FLAGS) & (1 << BIO_CLONED)))
        return 0;
#ifdef OFF_BIO_BLKG
    blkg = POINTER_IN(typed, pointer, OFF_BIO_BLKG);
#endif
    struct record_t record = {.bytes = bytes, .parts = 1};
    u64 bdev = number_of(typed, c, c->address, POINTER_IN(typed, pointer, OFF_BIO_BDEV));
    record.slot = find_slot(c, typed, bdev, blkg, op);
    struct slot_t *s = slots.lookup(&record.slot);  // NO_SLOT is none of them
    if (!s)
        return 0;
    record.epoch = s->epoch;
    record.submitted = bpf_ktime_get_ns();
    record.queued = queued ? record.submitted : 0;
    remember(c, &f, bio, &record);
    return 0;
}

// The time of an event, read once, and only where a bio is recorded.
static __always_inline u64 clock(u64 *now)
{
    if (!*now)
        *now = bpf_ktime_get_ns();
    return *now;
}

static __always_inline void account(struct record_t *record, u64 now)
{
    struct slot_t *s = slots.lookup(&record->slot);
    if (!s || s->epoch_of_ends != record->epoch)
        return;
    u64 latency = now - record->submitted, us = latency / NSEC_PER_USEC, bucket = log2_bucket(us);
    u64 queued = record->queued ? record->queued : record->submitted;
    u64 issued = record->issued ? record->issued : queued;
    __sync_fetch_and_add(&s->bytes, record->bytes);
    __sync_fetch_and_add(&s->latency_ns, latency);
    __sync_fetch_and_add(&s->latency_us_squared, us * us);
    __sync_fetch_and_add(&s->queue_ns, issued - queued);
    if (queued != record->submitted)
        __sync_fetch_and_add(&s->throttle_ns, queued - record->submitted);
    __sync_fetch_and_add(&s->histogram[bucket], 1);
}

// The end of a bio or of one of its pieces; the last one to end accounts for the whole.
static __always_inline int finish(u64 bio, u64 *now, int whole)
{
    struct flight_t f = find(bio);
    struct record_t *record = f.place < PLACES ? record_at(f.index, f.place) : 0;
    if (!record)
        return 0;
    if (record->parent) {
        u64 parent = record->parent;
        release(&f, bio);
        bio = parent;
        f = find(bio);
        record = f.place < PLACES ? record_at(f.index, f.place) : 0;
        if (!record)
            return 0;
    }
    if (record->parts > 1 && __sync_fetch_and_add(&record->parts, -1) > 1 && !whole)
        return 0;
    struct record_t ended = *record;
    if (release(&f, bio))
        account(&ended, clock(now));
    return 0;
}

static __always_inline void mark_issued(u64 bio, u64 *now)
{
    struct record_t *record = find_record(bio);
    if (record && record->parent)
        record = find_record(record->parent);
    if (record && !record->issued)
        record->issued = clock(now);
}

// Bio or request that a program was called with, in the form that TYPED says.
static __always_inline u64 number(u64 pointer)
{
    struct control_t *c = shared();
    return c ? number_of(TYPED, c, c->address, pointer) : 0;
}

// The first argument of a traced function, typed.
#define FIRST_ARGUMENT(ctx) LOAD_FROM("u64", ctx, 0)

KFUNC_PROBE(submit_bio)
{
    return start(1, FIRST_ARGUMENT(ctx), 0, 0);
}

KFUNC_PROBE(bio_endio)
{
    struct control_t *c = shared();
    u64 now = 0;
    return c ? finish(number_of(1, c, c->address, FIRST_ARGUMENT(ctx)), &now, 0) : 0;
}

int kprobe_submit_bio(struct pt_regs *ctx)
{
    return start(0, PT_REGS_PARM1(ctx), 0, 0);
}

int kprobe_bio_endio(struct pt_regs *ctx)
{
    u64 now = 0;
    return finish(PT_REGS_PARM1(ctx), &now, 0);
}

// block_bio_queue fires once per bio, after blk-throttle.
int raw_bio_queued(struct bpf_raw_tracepoint_args *ctx)
{
    u64 bio = number(ctx->args[ARG_BIO_QUEUE_BIO]);
    struct record_t *record = find_record(bio);
    if (record) {
        if (!record->queued)
            record->queued = bpf_ktime_get_ns();
        return 0;
    }
    struct control_t *c = shared();
    return c && c->only_listed ? start(TYPED, ctx->args[ARG_BIO_QUEUE_BIO], 1, 0) : 0;
}

// The same tracepoint where it is the earliest that can be seen, except of what was remapped.
int raw_bio_started(struct bpf_raw_tracepoint_args *ctx)
{
    return start(TYPED, ctx->args[ARG_BIO_QUEUE_BIO], 1, 1);
}

// block_bio_remap: (bio, device that passes it on, …); the bio is the mapper's clone, on its way to the device below.
int raw_bio_remapped(struct bpf_raw_tracepoint_args *ctx)
{
    u32 from = ctx->args[ARG_BIO_REMAP_BIO + 1], *how = devices.lookup(&from);
    return how && *how == LOOKED_THROUGH ? start(TYPED, ctx->args[ARG_BIO_REMAP_BIO], 0, 0) : 0;
}

// block_split: `split` is the front, cut off and chained to the rest (bi_private); device mapper reports the bio itself.
int raw_split(struct bpf_raw_tracepoint_args *ctx)
{
    u64 split = number(ctx->args[ARG_SPLIT_BIO]), whole = split;
    struct record_t *record = find_record(split);
    if (!record) {
        whole = pointer_at(split + OFF_BIO_PRIVATE);
        record = find_record(whole);
        if (record && record->parent) {
            whole = record->parent;
            record = find_record(whole);
        }
    }
    struct control_t *c = shared();
    if (!record || !c)
        return 0;
    __sync_fetch_and_add(&record->parts, 1);
    if (whole == split)
        return 0;
    struct flight_t f = find(split);
    struct record_t piece = {.submitted = record->submitted, .queued = record->queued, .parent = whole, .slot = NO_SLOT};
    if (f.bucket)
        remember(c, &f, split, &piece);
    return 0;
}

int raw_request_issued(struct bpf_raw_tracepoint_args *ctx)
{
    u64 rq = ctx->args[ARG_RQ_ISSUE_RQ], now = 0;
    u64 bio = POINTER_IN(TYPED, rq, OFF_RQ_BIO), last = number(POINTER_IN(TYPED, rq, OFF_RQ_BIOTAIL));
    for (int i = 0; i < MAX_BIOS; i++) {
        u64 address = number(bio);
        if (!address)
            break;
        mark_issued(address, &now);
        if (address == last)
            break;
        bio = POINTER_IN(TYPED, bio, OFF_BIO_NEXT);
    }
    return 0;
}

// block_rq_complete comes before the request's bios are taken off it; a partial completion ends only those it covers.
// Ends beyond MAX_BIOS are missed.
int raw_request_completed(struct bpf_raw_tracepoint_args *ctx)
{
    u64 rq = ctx->args[ARG_RQ_COMPLETE_RQ], now = 0;
    u64 bio = POINTER_IN(TYPED, rq, OFF_RQ_BIO), last = number(POINTER_IN(TYPED, rq, OFF_RQ_BIOTAIL));
    u32 left = ctx->args[ARG_RQ_COMPLETE_RQ + 2], partial = left < WORD_IN(TYPED, rq, OFF_RQ_LENGTH);
    for (int i = 0; i < MAX_BIOS; i++) {
        u64 address = number(bio);
        if (!address)
            break;
        u32 bytes = partial ? WORD_IN(TYPED, bio, OFF_BIO_SIZE) : 0;
        bio = POINTER_IN(TYPED, bio, OFF_BIO_NEXT);
        if (bytes > left)
            break;
        left -= bytes;
        finish(address, &now, 0);
        if (address == last)
            break;
    }
    return 0;
}

// block_bio_complete: devices without requests (device mapper, md), and bios that failed before they had one.
int raw_bio_completed(struct bpf_raw_tracepoint_args *ctx)
{
    u64 now = 0;
    return finish(number(ctx->args[ARG_BIO_COMPLETE_BIO]), &now, 1);
}
