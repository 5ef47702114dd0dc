// SPDX-License-Identifier: GPL-2.0
// Latency, bytes and counts of every bio of the managed cgroups, aggregated in the kernel.
//
// Compiled by BCC with memory.h and histogram.h in front. Offsets (OFF_*), argument positions (ARG_*) and enumerators (REQ_OP_*, BIO_CLONED) are macros taken
// from the running kernel's BTF by block.py; nothing is read through a struct of the headers.
//
// A bio is recorded where it starts (submit_bio, or block_bio_queue where functions cannot be traced) and accounted
// where it ends (bio_endio, or block_rq_complete). The record holds the slot, so the owner is the one at the start:
// later the dispatcher may be a kworker. Splitting makes new bios (`pieces`) whose record points to the first one.
//
// Any event can be missed: the kernel does not run a program that interrupts itself, nor, on some kernels, any program
// while a hidden task is current. A missed end shows when the bio's address is used again, or in user space by its age;
// it counts in `requests` and `bytes`, but has no time.

#include <uapi/linux/ptrace.h>
#include <uapi/asm-generic/errno-base.h>

#define NO_SLOT 0xffffffffu
#define READ_OP 0
#define WRITE_OP 1
#define PF_KTHREAD 0x00200000  // include/linux/sched.h; user space sees it in /proc/PID/stat
#define NSEC_PER_USEC 1000

// One (cgroup, device, op). Mirrored by SLOT in decode.py.
struct slot_t {
    u64 cgroup;
    u32 device;
    u32 op;
    u32 live;
    u32 epoch;  // changes when user space recycles the slot: late completions of the former owner are dropped
    u64 started;
    u64 requests;  // ended, `missed` ones included
    u64 missed;
    u64 bytes;
    u64 latency_ns;
    u64 latency_us_squared;
    u64 throttle_ns;
    u64 queue_ns;
    u64 device_ns;
    u64 histogram[HISTOGRAM_BUCKETS];
};

// One element, shared with user space. Mirrored by CONTROL in decode.py.
struct control_t {
    u32 generation;   // what `resolved` holds from an earlier generation is stale
    u32 only_listed;  // count the devices in `devices`, wherever in a stack they are, and no others
    u64 lost_in_flight;  // bios not recorded: no room
    u64 lost_slots;      // the same for want of a free slot
};

struct slot_key_t {
    u64 cgroup;
    u32 device;
    u32 op;
};

struct resolved_t {
    u32 slot;
    u32 generation;
};

struct record_t {
    u64 submitted;
    u64 queued;
    u64 issued;
    u64 parent;  // of a piece: the bio that it was split from; nothing else is set then
    u32 slot;
    u32 epoch;
    u32 bytes;
    s32 parts;  // pieces still to end, the bio itself included
};

BPF_F_TABLE("array", u32, struct slot_t, slots, MAX_SLOTS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct control_t, control, 1, BPF_F_MMAPABLE);
BPF_HASH(slot_of, struct slot_key_t, u32, MAX_SLOTS);
BPF_QUEUESTACK("queue", free_slots, u32, MAX_SLOTS, 0);
BPF_HASH(managed, u64, u32, MAX_CGROUPS);
BPF_HASH(devices, u32, u32, MAX_DEVICES);
BPF_TABLE("lru_hash", struct slot_key_t, struct resolved_t, resolved, MAX_RESOLVED);
BPF_HASH(in_flight, u64, struct record_t, MAX_IN_FLIGHT);

struct head_t {
    u8 bytes[BIO_HEAD_BYTES] __attribute__((aligned(8)));
};

#define FIELD(head, type, offset) (*(type *)((head)->bytes + (offset)))

static __always_inline struct control_t *shared(void)
{
    u32 zero = 0;
    return control.lookup(&zero);
}

static __always_inline int in_kernel_thread(void)
{
    return word_at(bpf_get_current_task() + OFF_TASK_FLAGS) & PF_KTHREAD;
}

#ifdef OFF_BIO_BLKG
// The cgroup that the kernel charges a bio to, when the io controller is on the v2 hierarchy (the default root is
// hierarchy 0); else 0.
static __always_inline u64 charged_cgroup(struct head_t *head)
{
    u64 blkg = FIELD(head, u64, OFF_BIO_BLKG);
    if (!blkg)
        return 0;
    u64 cgroup = pointer_at(pointer_at(blkg + OFF_BLKG_BLKCG) + OFF_BLKCG_CGROUP);
    if (!cgroup || word_at(pointer_at(cgroup + OFF_CGROUP_ROOT) + OFF_ROOT_HIERARCHY))
        return 0;
    return cgroup;
}

static __always_inline u64 cgroup_id(u64 cgroup)
{
    return pointer_at(pointer_at(cgroup + OFF_CGROUP_KN) + OFF_KN_ID);
}

static __always_inline u64 ancestor_id(u64 cgroup, u32 level)
{
    if (!cgroup)
        return bpf_get_current_ancestor_cgroup_id(level);
    if (level > word_at(cgroup + OFF_CGROUP_LEVEL))
        return 0;
#ifdef OFF_CGROUP_ANCESTOR_IDS  // before 6.1
    return pointer_at(cgroup + OFF_CGROUP_ANCESTOR_IDS + 8 * level);
#else
    return cgroup_id(pointer_at(cgroup + OFF_CGROUP_ANCESTORS + 8 * level));
#endif
}
#else
static __always_inline u64 ancestor_id(u64 cgroup, u32 level)
{
    return bpf_get_current_ancestor_cgroup_id(level);
}
#endif

// The innermost managed cgroup among a cgroup (0: the current task's) and its ancestors; 0 where none is managed.
static __always_inline u64 managed_ancestor(u64 cgroup)
{
    u64 found = 0;
    for (u32 level = 0; level < MAX_DEPTH; level++) {
        u64 id = ancestor_id(cgroup, level);
        if (!id)
            break;
        if (managed.lookup(&id))
            found = id;
    }
    return found;
}

// Whole device of a block device: a partition's IO belongs to its disk. In the kernel's own dev_t: major << 20 | minor.
static __always_inline u32 whole_device(u64 bdev)
{
    u64 disk = pointer_at(bdev + OFF_BDEV_DISK);
    return word_at(disk + OFF_DISK_MAJOR) << 20 | word_at(disk + OFF_DISK_FIRST_MINOR);
}

static __always_inline u32 slot_for(struct control_t *c, struct slot_key_t *key)
{
    u32 *known = slot_of.lookup(key), slot = NO_SLOT;
    if (known)
        return *known;
    if (free_slots.pop(&slot)) {
        __sync_fetch_and_add(&c->lost_slots, 1);
        return NO_SLOT;
    }
    struct slot_t *s = slots.lookup(&slot);
    if (!s)
        return NO_SLOT;
    if (slot_of.insert(key, &slot)) {  // another CPU was first
        free_slots.push(&slot, 0);
        known = slot_of.lookup(key);
        return known ? *known : NO_SLOT;
    }
    s->cgroup = key->cgroup;
    s->device = key->device;
    s->op = key->op;
    s->live = 1;
    return slot;
}

// Slot of a cgroup's IO, from a cache keyed by the cgroup itself, so that the usual case, managed or not, costs one
// look-up. `cgroup` is 0 for the current task's.
static __always_inline u32 slot_of_cgroup(struct control_t *c, u64 id, u64 cgroup, u64 bdev, u32 dev, u32 op)
{
    struct slot_key_t key = {.cgroup = id, .device = dev, .op = op};
    struct resolved_t *known = resolved.lookup(&key);
    if (known && known->generation == c->generation)
        return known->slot;
    struct resolved_t answer = {.slot = NO_SLOT, .generation = c->generation};
    struct slot_key_t owner = {.cgroup = managed_ancestor(cgroup), .op = op};
    if (owner.cgroup) {
        owner.device = whole_device(bdev);
        if (!c->only_listed || devices.lookup(&owner.device)) {
            answer.slot = slot_for(c, &owner);
            if (answer.slot == NO_SLOT)
                return NO_SLOT;
        }
    }
    resolved.update(&key, &answer);
    return answer.slot;
}

// Writes of kernel threads whose owner this kernel cannot tell are kept under cgroup 0.
static __always_inline u32 unattributed_slot(struct control_t *c, u64 bdev, u32 op)
{
    struct slot_key_t nobody = {.cgroup = 0, .device = whole_device(bdev), .op = op};
    if (c->only_listed && !devices.lookup(&nobody.device))
        return NO_SLOT;
    return slot_for(c, &nobody);
}

// Who pays for a bio. A write belongs to the cgroup that it is charged to (the one that dirtied the page), a read to
// the task that asks; what a kernel thread submits (writeback, a throttled bio sent on) only to the charged one.
static __always_inline u32 find_slot(struct control_t *c, struct head_t *head, u64 bdev, u32 op)
{
    u32 dev = word_at(bdev + OFF_BDEV_DEV), slot = NO_SLOT;
    u64 charged = 0;
#ifdef OFF_BIO_BLKG
    if (op == WRITE_OP && (charged = charged_cgroup(head))) {
        slot = slot_of_cgroup(c, cgroup_id(charged), charged, bdev, dev, op);
        if (slot != NO_SLOT)
            return slot;
    }
#endif
    slot = slot_of_cgroup(c, bpf_get_current_cgroup_id(), 0, bdev, dev, op);
    if (slot != NO_SLOT || !in_kernel_thread())
        return slot;
#ifdef OFF_BIO_BLKG
    if (op == READ_OP && (charged = charged_cgroup(head)))
        return slot_of_cgroup(c, cgroup_id(charged), charged, bdev, dev, op);
#endif
    return op == WRITE_OP && !charged ? unattributed_slot(c, bdev, op) : NO_SLOT;
}

static __always_inline void count(struct slot_t *s, u32 bytes)
{
    __sync_fetch_and_add(&s->bytes, bytes);
    __sync_fetch_and_add(&s->requests, 1);
}

// The bio recorded at this address has ended without being seen.
static __always_inline void count_missed(u64 bio)
{
    struct record_t *old = in_flight.lookup(&bio);
    if (!old || old->parent)
        return;
    struct slot_t *s = slots.lookup(&old->slot);
    if (!s || s->epoch != old->epoch)
        return;
    count(s, old->bytes);
    __sync_fetch_and_add(&s->missed, 1);
}

static __always_inline int remember(struct control_t *c, u64 bio, struct record_t *record)
{
    int failed = in_flight.insert(&bio, record);
    if (failed == -EEXIST) {
        count_missed(bio);
        failed = in_flight.update(&bio, record);
    }
    if (failed)
        __sync_fetch_and_add(&c->lost_in_flight, 1);
    return failed;
}

// `queued` says that the bio is past blk-throttle; `top` that stacked drivers' own bios are to be left out.
static __always_inline int start(u64 bio, int queued, int top)
{
    struct control_t *c = shared();
    struct head_t head;
    if (!c || bpf_probe_read_kernel(&head, sizeof(head), (void *)bio))
        return 0;
    u32 opf = FIELD(&head, u32, OFF_BIO_OPF) & 0xff, bytes = FIELD(&head, u32, OFF_BIO_SIZE);
    u32 op = opf == REQ_OP_READ ? READ_OP : WRITE_OP;
    if (!bytes || (opf != REQ_OP_READ && opf != REQ_OP_WRITE && opf != REQ_OP_ZONE_APPEND))
        return 0;
    if (top && !c->only_listed && (FIELD(&head, u16, OFF_BIO_FLAGS) & (1 << BIO_CLONED)))
        return 0;
    struct record_t record = {.bytes = bytes, .parts = 1};
    record.slot = find_slot(c, &head, FIELD(&head, u64, OFF_BIO_BDEV), op);
    if (record.slot == NO_SLOT)
        return 0;
    struct slot_t *s = slots.lookup(&record.slot);
    if (!s)
        return 0;
    record.epoch = s->epoch;
    record.submitted = bpf_ktime_get_ns();
    record.queued = queued ? record.submitted : 0;
    if (!remember(c, bio, &record))
        __sync_fetch_and_add(&s->started, 1);
    return 0;
}

static __always_inline void account(struct record_t *record, u64 now)
{
    struct slot_t *s = slots.lookup(&record->slot);
    if (!s || s->epoch != record->epoch)
        return;
    u64 latency = now - record->submitted, us = latency / NSEC_PER_USEC;
    u64 bucket = log2_bucket(us);
    u64 queued = record->queued ? record->queued : record->submitted;
    u64 issued = record->issued ? record->issued : queued;
    count(s, record->bytes);
    __sync_fetch_and_add(&s->latency_ns, latency);
    __sync_fetch_and_add(&s->latency_us_squared, us * us);
    __sync_fetch_and_add(&s->throttle_ns, queued - record->submitted);
    __sync_fetch_and_add(&s->queue_ns, issued - queued);
    __sync_fetch_and_add(&s->device_ns, now - issued);
    __sync_fetch_and_add(&s->histogram[bucket], 1);
}

// The end of a bio or of one of its pieces; the last one to end accounts for the whole.
static __always_inline int finish(u64 bio, u64 now, int whole)
{
    struct record_t *record = in_flight.lookup(&bio);
    if (!record)
        return 0;
    if (record->parent) {
        u64 parent = record->parent;
        in_flight.delete(&bio);
        bio = parent;
        record = in_flight.lookup(&bio);
        if (!record)
            return 0;
    }
    __sync_fetch_and_add(&record->parts, -1);
    if (!whole && record->parts > 0)
        return 0;
    struct record_t ended = *record;
    if (!in_flight.delete(&bio))  // of two pieces that end at once only one succeeds here
        account(&ended, now);
    return 0;
}

static __always_inline void mark_issued(u64 bio, u64 now)
{
    struct record_t *record = in_flight.lookup(&bio);
    if (record && record->parent) {
        bio = record->parent;
        record = in_flight.lookup(&bio);
    }
    if (record && !record->issued)
        record->issued = now;
}

KFUNC_PROBE(submit_bio, void *bio)
{
    return start((u64)bio, 0, 0);
}

KFUNC_PROBE(bio_endio, void *bio)
{
    return finish((u64)bio, bpf_ktime_get_ns(), 0);
}

int kprobe_submit_bio(struct pt_regs *ctx)
{
    return start(PT_REGS_PARM1(ctx), 0, 0);
}

int kprobe_bio_endio(struct pt_regs *ctx)
{
    return finish(PT_REGS_PARM1(ctx), bpf_ktime_get_ns(), 0);
}

// block_bio_queue fires once per bio, after blk-throttle.
int raw_bio_queued(struct bpf_raw_tracepoint_args *ctx)
{
    u64 bio = ctx->args[ARG_BIO_QUEUE_BIO];
    struct record_t *record = in_flight.lookup(&bio);
    if (record) {
        if (!record->queued)
            record->queued = bpf_ktime_get_ns();
        return 0;
    }
    struct control_t *c = shared();
    return c && c->only_listed ? start(bio, 1, 0) : 0;
}

// The same tracepoint where it is the earliest that can be seen.
int raw_bio_started(struct bpf_raw_tracepoint_args *ctx)
{
    return start(ctx->args[ARG_BIO_QUEUE_BIO], 1, 1);
}

// block_split: `split` is the front, cut off and chained to the rest (bi_private); device mapper reports the bio itself.
int raw_split(struct bpf_raw_tracepoint_args *ctx)
{
    u64 split = ctx->args[ARG_SPLIT_BIO], whole = split;
    struct record_t *record = in_flight.lookup(&split);
    if (!record) {
        whole = pointer_at(split + OFF_BIO_PRIVATE);
        record = in_flight.lookup(&whole);
        if (record && record->parent) {
            whole = record->parent;
            record = in_flight.lookup(&whole);
        }
    }
    struct control_t *c = shared();
    if (!record || !c)
        return 0;
    __sync_fetch_and_add(&record->parts, 1);
    struct record_t piece = {.parent = whole, .slot = NO_SLOT};
    if (whole != split)
        remember(c, split, &piece);
    return 0;
}

int raw_request_issued(struct bpf_raw_tracepoint_args *ctx)
{
    u64 bio = pointer_at(ctx->args[ARG_RQ_ISSUE_RQ] + OFF_RQ_BIO), now = bpf_ktime_get_ns();
    for (int i = 0; bio && i < MAX_BIOS; i++) {
        mark_issued(bio, now);
        bio = pointer_at(bio + OFF_BIO_NEXT);
    }
    return 0;
}

// block_rq_complete comes before the request's bios are taken off it; a partial completion ends only those it covers.
// Ends beyond MAX_BIOS are missed.
int raw_request_completed(struct bpf_raw_tracepoint_args *ctx)
{
    u64 bio = pointer_at(ctx->args[ARG_RQ_COMPLETE_RQ] + OFF_RQ_BIO), now = bpf_ktime_get_ns();
    u32 left = ctx->args[ARG_RQ_COMPLETE_RQ + 2];
    for (int i = 0; bio && i < MAX_BIOS; i++) {
        u32 bytes = word_at(bio + OFF_BIO_SIZE);
        u64 next = pointer_at(bio + OFF_BIO_NEXT);
        if (bytes > left)
            return 0;
        left -= bytes;
        finish(bio, now, 0);
        bio = next;
    }
    return 0;
}

// block_bio_complete: devices without requests (device mapper, md), and bios that failed before they had one.
int raw_bio_completed(struct bpf_raw_tracepoint_args *ctx)
{
    return finish(ctx->args[ARG_BIO_COMPLETE_BIO], bpf_ktime_get_ns(), 1);
}
