// SPDX-License-Identifier: GPL-2.0
// Bytes that managed cgroups read through the page cache, and bytes that had to be added to it for that. Compiled with
// memory.h and owner.h in front.
//
// A thread that is inside a read or a fault is in `inside`; pages added meanwhile, readahead included, are its misses.
// Pages that writes add are not. What mmap readers look at shows only where they fault.

#include <uapi/linux/ptrace.h>

#define VM_FAULT_NOPAGE 0x100  // include/linux/mm_types.h: the range was mapped
#define VM_FAULT_LOCKED 0x200  // the page was found; a fault that waited for it returns without, and is tried again
#define S_IFMT_MASK 0170000
#define S_IFREG_BITS 0100000
#define FAULT_WINDOW_NS 5000000  // a fault adds its pages at once; its end cannot be seen by tracepoints

struct cache_t {
    u64 read_bytes;
    u64 missed_bytes;
};

struct inside_t {
    u64 owner;
    u64 until;    // 0: until the call returns
    u64 mapping;  // this and the next: the page of a fault that a tracepoint saw
    u64 index;
};

struct range_t {
    u64 bytes;
    u64 owner;
};

// Every syscall tracepoint begins like this (kernel/trace/trace_syscalls.c); what follows is the first argument, or the
// return value.
struct syscall_t {
    u64 common;
    s64 number;
    s64 first;
};

BPF_HASH(caches, u64, struct cache_t, MAX_CGROUPS);
BPF_TABLE("lru_hash", u32, struct inside_t, inside, 16384);
BPF_TABLE("lru_hash", u32, struct range_t, mapping, 16384);
BPF_ARRAY(cache_lost, u64, 1);

static __always_inline struct cache_t *counters_of(u64 owner)
{
    struct cache_t nothing = {}, *counters = caches.lookup_or_try_init(&owner, &nothing);
    u32 zero = 0;
    if (!counters)
        cache_lost.atomic_increment(zero);
    return counters;
}

static __always_inline void add_read(u64 owner, u64 bytes)
{
    struct cache_t *counters = counters_of(owner);
    if (counters)
        __sync_fetch_and_add(&counters->read_bytes, bytes);
}

static __always_inline int enter(void)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct inside_t now = {.owner = current_owner()};
    if (now.owner)
        inside.update(&thread, &now);
    return 0;
}

static __always_inline int leave(s64 bytes)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct inside_t *was = inside.lookup(&thread);
    if (!was)
        return 0;
    u64 owner = was->owner;
    inside.delete(&thread);
    if (bytes > 0)
        add_read(owner, bytes);
    return 0;
}

static __always_inline int leave_fault(u32 result)
{
    return leave(result & VM_FAULT_LOCKED ? PAGE_BYTES : 0);
}

int page_added(struct tracepoint__filemap__mm_filemap_add_to_page_cache *args)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct inside_t *now = inside.lookup(&thread);
    if (!now || (now->until && now->until < bpf_ktime_get_ns()))
        return 0;
    struct cache_t *counters = counters_of(now->owner);
#ifdef HAS_ORDER
    u64 bytes = (u64)PAGE_BYTES << args->order;
#else
    u64 bytes = PAGE_BYTES;
#endif
    if (counters)
        __sync_fetch_and_add(&counters->missed_bytes, bytes);
    return 0;
}

KFUNC_PROBE(filemap_read, void *iocb, void *iter, s64 already)
{
    return enter();
}

KRETFUNC_PROBE(filemap_read, void *iocb, void *iter, s64 already, s64 bytes)
{
    return leave(bytes);
}

KFUNC_PROBE(filemap_fault, void *vmf)
{
    return enter();
}

KRETFUNC_PROBE(filemap_fault, void *vmf, u32 result)
{
    return leave_fault(result);
}

KRETFUNC_PROBE(filemap_map_pages, void *vmf, u64 first, u64 last, u32 result)
{
    u64 owner = result & VM_FAULT_NOPAGE ? current_owner() : 0;
    if (owner)
        add_read(owner, (last - first + 1) * PAGE_BYTES);
    return 0;
}

int kprobe_read(struct pt_regs *ctx)
{
    return enter();
}

int kretprobe_read(struct pt_regs *ctx)
{
    return leave(PT_REGS_RC(ctx));
}

int kprobe_fault(struct pt_regs *ctx)
{
    return enter();
}

int kretprobe_fault(struct pt_regs *ctx)
{
    return leave_fault(PT_REGS_RC(ctx));
}

int kprobe_map_pages(struct pt_regs *ctx)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct range_t range = {.owner = current_owner()};
    range.bytes = (PT_REGS_PARM3(ctx) - PT_REGS_PARM2(ctx) + 1) * PAGE_BYTES;
    if (range.owner)
        mapping.update(&thread, &range);
    return 0;
}

int kretprobe_map_pages(struct pt_regs *ctx)
{
    u32 thread = bpf_get_current_pid_tgid(), result = PT_REGS_RC(ctx);
    struct range_t *range = mapping.lookup(&thread);
    if (!range)
        return 0;
    if (result & VM_FAULT_NOPAGE)
        add_read(range->owner, range->bytes);
    mapping.delete(&thread);
    return 0;
}

// Whether a descriptor of the current task is a regular file that is read through the page cache.
static __always_inline int is_cached_file(u32 fd)
{
    u64 table = pointer_at(pointer_at(bpf_get_current_task() + OFF_TASK_FILES) + OFF_FILES_FDT);
    if (fd >= word_at(table + OFF_FDT_MAX))
        return 0;
    u64 file = pointer_at(pointer_at(table + OFF_FDT_FD) + 8 * (u64)fd);
    if (!file || (word_at(file + OFF_FILE_FLAGS) & OPEN_DIRECT))
        return 0;
    return (word_at(pointer_at(file + OFF_FILE_INODE) + OFF_INODE_MODE) & S_IFMT_MASK) == S_IFREG_BITS;
}

int read_entered(struct syscall_t *args)
{
    return current_owner() && is_cached_file(args->first) ? enter() : 0;
}

int read_returned(struct syscall_t *args)
{
    return leave(args->first);
}

// Pages of a range without the one that the thread faulted last: it counted then. A fault that waited for its page is
// tried again, and that ends either in the same fault or in a range around it.
static __always_inline u64 pages_uncounted(u32 thread, u64 mapping, u64 first, u64 last)
{
    struct inside_t *was = inside.lookup(&thread);
    int overlaps = was && was->mapping == mapping && was->index >= first && was->index <= last;
    return last - first + 1 - overlaps;
}

// mm_filemap_fault(mapping, index)
int raw_fault(struct bpf_raw_tracepoint_args *ctx)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct inside_t now = {.owner = current_owner(), .mapping = ctx->args[0], .index = ctx->args[1]};
    if (!now.owner)
        return 0;
    add_read(now.owner, pages_uncounted(thread, now.mapping, now.index, now.index) * PAGE_BYTES);
    now.until = bpf_ktime_get_ns() + FAULT_WINDOW_NS;
    inside.update(&thread, &now);
    return 0;
}

// mm_filemap_map_pages(mapping, first, last): what a fault mapped around its address.
int raw_map_pages(struct bpf_raw_tracepoint_args *ctx)
{
    u32 thread = bpf_get_current_pid_tgid();
    u64 owner = current_owner();
    if (owner)
        add_read(owner, pages_uncounted(thread, ctx->args[0], ctx->args[1], ctx->args[2]) * PAGE_BYTES);
    return 0;
}
