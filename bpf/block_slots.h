// SPDX-License-Identifier: GPL-2.0
// The counters of block.c, one slot per (cgroup, device, op), and who pays for a bio.

#include <uapi/linux/ptrace.h>

#define NO_SLOT 0xffffffffu
#define READ_OP 0
#define WRITE_OP 1
#define PF_KTHREAD 0x00200000  // include/linux/sched.h; user space sees it in /proc/PID/stat
#define ROOT_CGROUP 1          // where kernel threads are
#define LISTED 1               // in `devices`: counted, wherever in a stack it is
#define LOOKED_THROUGH 2       // in `devices`: never counted, but what it passes on is, where that goes

// One (cgroup, device, op), laid out in cache lines of 64 bytes: a start only reads, in the first, so that it waits for no
// other CPU; what ends write is apart. Bios in flight are counted in block_flight.h's table, by user space. Mirrored by
// BLOCK_SLOT in decode.py.
struct slot_t {
    u64 cgroup;
    u32 device;
    u32 op;
    u32 live;
    u32 epoch;  // changes when user space recycles the slot: late ends of the former owner are dropped
    u64 missed;  // ended without being seen
    u64 missed_bytes;
    u64 unused_start[3];

    u64 bytes;
    u64 latency_ns;
    u64 latency_us_squared;
    u64 throttle_ns;
    u64 queue_ns;  // what is left of the latency is the device's
    u32 epoch_of_ends;
    u32 unused_end[5];

    u64 histogram[HISTOGRAM_BUCKETS];  // their sum is the number of ends that were seen
};

// One element, shared with user space. Mirrored by BLOCK_CONTROL in decode.py.
struct control_t {
    u32 generation;   // what `resolved` holds from an earlier generation is stale
    u32 only_listed;  // count the devices that `devices` lists, and no others
    u64 lost_in_flight;  // bios not recorded: no room
    u64 lost_slots;      // the same for want of a free slot
    u64 volatile address;  // of this element in the kernel, for number_of
};

struct slot_key_t {
    u64 cgroup;
    u32 device;
    u32 op;
};

// Whose IO, on which block device (its address), and in the address's lowest bit which way.
struct asked_t {
    u64 cgroup;
    u64 bdev_and_op;
};

// The answer to that, 32 bytes of one CPU's cache.
struct resolved_t {
    struct asked_t asked;
    u32 slot;
    u32 generation;
    u64 unused;
};

BPF_F_TABLE("array", u32, struct slot_t, slots, MAX_SLOTS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct control_t, control, 1, BPF_F_MMAPABLE);
BPF_HASH(slot_of, struct slot_key_t, u32, MAX_SLOTS);
BPF_QUEUESTACK("queue", free_slots, u32, MAX_SLOTS, 0);
BPF_HASH(managed, u64, u32, MAX_CGROUPS);
BPF_HASH(devices, u32, u32, MAX_DEVICES);
BPF_PERCPU_ARRAY(resolved, struct resolved_t, 1 << RESOLVED_BITS);

static __always_inline struct control_t *shared(void)
{
    u32 zero = 0;
    struct control_t *c = control.lookup(&zero);
    if (c && !c->address)
        c->address = (u64)c;
    return c;
}

// Of the current task. The helper that gives the task is cheaper than the one that looks up its cgroup.
static __always_inline u64 own_cgroup_id(int typed)
{
    if (!typed)
        return bpf_get_current_cgroup_id();
    u64 set = LOAD_FROM("u64", (u64)bpf_get_current_task_btf(), OFF_TASK_CGROUPS);
    u64 node = LOAD_FROM("u64", LOAD_FROM("u64", set, OFF_SET_CGROUP), OFF_CGROUP_KN);
    return LOAD_FROM("u64", node, OFF_KN_ID);
}

static __always_inline int in_kernel_thread(void)
{
    return word_at(bpf_get_current_task() + OFF_TASK_FLAGS) & PF_KTHREAD;
}

#ifdef OFF_BIO_BLKG
// The cgroup that the kernel charges a bio to, when the io controller is on the v2 hierarchy (the default root is
// hierarchy 0); else 0.
static __always_inline u64 charged_cgroup(struct control_t *c, int typed, u64 blkg)
{
    u64 blkcg = POINTER_IN(typed, blkg, OFF_BLKG_BLKCG), cgroup = POINTER_IN(typed, blkcg, OFF_BLKCG_CGROUP);
    u64 root = POINTER_IN(typed, cgroup, OFF_CGROUP_ROOT), number = number_of(typed, c, c->address, cgroup);
    return number && !WORD_IN(typed, root, OFF_ROOT_HIERARCHY) ? number : 0;
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

static __always_inline int is_counted(struct control_t *c, u32 device)
{
    u32 *how = devices.lookup(&device);
    return how ? *how == LISTED : !c->only_listed;
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

static __always_inline int answers(struct resolved_t *known, struct asked_t *asked)
{
    return known->asked.cgroup == asked->cgroup && known->asked.bdev_and_op == asked->bdev_and_op;
}

// Slot of a cgroup's IO, from this CPU's cache, so that the usual case, managed or not, costs one look-up without a hash
// map. `cgroup` is 0 for the current task's. User space moves the generation every second, so a block device that takes
// over the address of a removed one is soon told apart.
static __always_inline u32 slot_of_cgroup(struct control_t *c, u64 id, u64 cgroup, u64 bdev, u32 op)
{
    struct asked_t asked = {.cgroup = id, .bdev_and_op = bdev | op};
    u32 at = ((id ^ asked.bdev_and_op * 0x9e3779b97f4a7c15ull) * 0x9e3779b97f4a7c15ull) >> (64 - RESOLVED_BITS);
    u32 generation = *(u32 volatile *)&c->generation;  // of the answer too: what it is made of may change meanwhile
    struct resolved_t volatile *known = resolved.lookup(&at);
    if (!known)
        return NO_SLOT;
    if (known->generation == generation && answers((void *)known, &asked)) {
        u32 slot = known->slot;
        if (answers((void *)known, &asked))  // still: a program that interrupts this one may have put another there
            return slot;
    }
    u32 slot = NO_SLOT;
    struct slot_key_t owner = {.cgroup = managed_ancestor(cgroup), .op = op};
    if (owner.cgroup) {
        owner.device = whole_device(bdev);
        if (is_counted(c, owner.device)) {
            slot = slot_for(c, &owner);
            if (slot == NO_SLOT)
                return NO_SLOT;
        }
    }
    known->generation = 0;  // none
    known->asked.cgroup = asked.cgroup;
    known->asked.bdev_and_op = asked.bdev_and_op;
    known->slot = slot;
    known->generation = generation;
    return slot;
}

// Whether a write is charged to no job: on a v1 hierarchy, or to the root where the memory controller is not enabled.
static __always_inline int is_nobodys(u64 charged)
{
#ifdef OFF_BIO_BLKG
    return !charged || cgroup_id(charged) == ROOT_CGROUP;
#else
    return 1;
#endif
}

// Writes of kernel threads whose owner this kernel cannot tell are kept under cgroup 0.
static __always_inline u32 unattributed_slot(struct control_t *c, u64 bdev, u32 op)
{
    struct slot_key_t nobody = {.cgroup = 0, .device = whole_device(bdev), .op = op};
    return is_counted(c, nobody.device) ? slot_for(c, &nobody) : NO_SLOT;
}

// Who pays for a bio. A write belongs to the cgroup that it is charged to (the one that dirtied the page), a read to
// the task that asks; what a kernel thread submits (writeback, a throttled bio sent on) only to the charged one.
static __always_inline u32 find_slot(struct control_t *c, int typed, u64 bdev, u64 blkg, u32 op)
{
    u64 self = own_cgroup_id(typed), charged = 0;
    u32 slot = NO_SLOT;
#ifdef OFF_BIO_BLKG
    if (op == WRITE_OP && (charged = charged_cgroup(c, typed, blkg))) {
        slot = slot_of_cgroup(c, cgroup_id(charged), charged, bdev, op);
        if (slot != NO_SLOT)
            return slot;
    }
#endif
    slot = slot_of_cgroup(c, self, 0, bdev, op);
    if (slot != NO_SLOT || self != ROOT_CGROUP || !in_kernel_thread())
        return slot;
#ifdef OFF_BIO_BLKG
    if (op == READ_OP && (charged = charged_cgroup(c, typed, blkg)))
        return slot_of_cgroup(c, cgroup_id(charged), charged, bdev, op);
#endif
    return op == WRITE_OP && is_nobodys(charged) ? unattributed_slot(c, bdev, op) : NO_SLOT;
}
