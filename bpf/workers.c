// SPDX-License-Identifier: GPL-2.0
// What the DataLoader's workers of the managed cgroups do with their time: running, runnable, or blocked, and on what.
//
// Compiled by BCC with memory.h and owner.h in front. OFF_* come from the running kernel's BTF, NR_* are the system call
// numbers of this architecture, both given by workers.py. Workers are known by the name that PyTorch gives their main
// thread; it is seen when it is set, and user space adds those that had it before.
//
// Any event can be missed: the kernel does not run a program that interrupts itself, nor, on some kernels, any program
// while a task that it hides from tracing is current, so that what such a task gives way to is not seen to come (measured:
// once in 300 to 700 times on a crowded machine), nor what it wakes. What a task ran, and waited to run, is then taken from
// the kernel's own sums, once it leaves the CPU.

#include <uapi/linux/ptrace.h>

#define S_IFMT_BITS 0170000
#define S_IFREG_BITS 0100000
#define S_IFBLK_BITS 0060000
#define S_IFSOCK_BITS 0140000
#define NFS_MAGIC 0x6969  // include/uapi/linux/magic.h and fs/*/: network file systems
#define CIFS_MAGIC 0xff534d42
#define SMB2_MAGIC 0xfe534d42
#define CEPH_MAGIC 0x00c36400
#define LUSTRE_MAGIC 0x0bd00bd0
#define FUSE_MAGIC 0x65735546
#define V9FS_MAGIC 0x01021997
#define UNINTERRUPTIBLE 0x002  // include/linux/sched.h: plain disk waits are this, and neither of the next two
#define WAKEKILL 0x100
#define NOLOAD 0x400

// Mirrored by WorkerTime's fields in workers.py.
enum state_t { ON_CPU, BLOCK, REMOTE, NETWORK, FAULT, OTHER, RUNNABLE, STATES };

struct totals_t {
    u64 ns[8];  // STATES rounded up, so that a mask bounds the index
};

struct worker_t {
    u64 owner;
    u64 since;  // 0: not yet seen to be switched
    u64 ran;    // what the kernel had it run in all, when it was last seen to leave the CPU
    u64 queued;  // what it had it wait for a CPU, then
    u64 held;    // time between sleep and run in which the wake-up was missed: not booked yet
    u32 state;
    u32 held_state;
};

// Events that were missed, as they showed. Mirrored by _MISSED in workers.py.
enum missed_t { ARRIVALS, DEPARTURES, WAKEUPS, MISSED };

BPF_HASH(totals, u64, struct totals_t, MAX_CGROUPS);
BPF_TABLE("lru_hash", u32, struct worker_t, workers, MAX_WORKERS);
BPF_ARRAY(missed, u64, MISSED);

static __always_inline void book(struct worker_t *w, u32 state, u64 ns)
{
    struct totals_t nothing = {}, *sum;
    if (!w->owner || !ns)
        return;
    sum = totals.lookup_or_try_init(&w->owner, &nothing);
    asm volatile("" : "+r"(state));  // or the compiler leaves the mask out as superfluous
    if (sum)
        __sync_fetch_and_add(&sum->ns[state & 7], ns);
}

static __always_inline void account(struct worker_t *w, u64 now)
{
    if (w->since && now > w->since)
        book(w, w->state, now - w->since);
}

static __always_inline void become(struct worker_t *w, u32 state, u64 now)
{
    account(w, now);
    w->state = state;
    w->since = now;
}

static __always_inline void count_missed(u32 kind)
{
    u64 *count = missed.lookup(&kind);
    if (count)
        __sync_fetch_and_add(count, 1);
}

static __always_inline void remember_sums(struct worker_t *w, u64 task)
{
    w->ran = pointer_at(task + OFF_TASK_RAN);
#ifdef OFF_TASK_QUEUED
    w->queued = pointer_at(task + OFF_TASK_QUEUED);
#endif
}

// How long a task has run since it was last seen to leave the CPU, at most all of the time since its state is known. The
// kernel brings its sum up to date before it switches.
static __always_inline u64 stretch(struct worker_t *w, u64 task, u64 now)
{
    u64 ran = pointer_at(task + OFF_TASK_RAN) - w->ran, most = now - w->since;
    return ran < most ? ran : most;
}

// How much of the held time it waited for a CPU: what the kernel's sum has grown by.
static __always_inline u64 queued_of_held(struct worker_t *w, u64 task)
{
#ifdef OFF_TASK_QUEUED
    u64 queued = pointer_at(task + OFF_TASK_QUEUED) - w->queued;
    return queued < w->held ? queued : w->held;
#else
    return 0;
#endif
}

// A task that leaves the CPU has been running, whether it was seen to come or not.
static __always_inline void was_running(struct worker_t *w, u64 task, u64 now)
{
    if (w->held) {
        u64 queued = queued_of_held(w, task);
        book(w, RUNNABLE, queued);
        book(w, w->held_state, w->held - queued);
        w->held = 0;
    }
    if (w->state == ON_CPU || !w->since || now < w->since)
        return;
    count_missed(ARRIVALS);
    become(w, ON_CPU, now - stretch(w, task, now));
}

// A task that comes to the CPU was waiting for it, whether it was seen to leave and to wake or not. What it waited for
// before is not known where its leaving was missed.
static __always_inline void was_waiting(struct worker_t *w, u64 task, u64 now)
{
    if (!w->since || now < w->since)
        return;
    u64 ran = stretch(w, task, now);
    if (w->state == ON_CPU) {
        count_missed(DEPARTURES);
        become(w, OTHER, w->since + ran);
        return;
    }
    if (ran) {  // it came and left unseen
        count_missed(ARRIVALS);
        book(w, ON_CPU, ran);
        w->since += ran;
    }
    if (w->state == RUNNABLE)
        return;
    count_missed(WAKEUPS);
    w->held = now - w->since;
    w->held_state = w->state;
    w->since = now;
}

// The open file behind a descriptor of the current task.
static __always_inline u64 file_of(u32 fd)
{
    u64 table = pointer_at(pointer_at(bpf_get_current_task() + OFF_TASK_FILES) + OFF_FILES_FDT);
    if (fd >= word_at(table + OFF_FDT_MAX_FDS))
        return 0;
    return pointer_at(pointer_at(table + OFF_FDT_FD) + 8ULL * fd);
}

static __always_inline int is_remote(u32 magic)
{
    return magic == NFS_MAGIC || magic == CIFS_MAGIC || magic == SMB2_MAGIC || magic == CEPH_MAGIC ||
           magic == LUSTRE_MAGIC || magic == FUSE_MAGIC || magic == V9FS_MAGIC;
}

// What a thread waits for that waits for a descriptor.
static __always_inline u32 state_of_descriptor(u32 fd)
{
    u64 file = file_of(fd), inode = file ? pointer_at(file + OFF_FILE_INODE) : 0;
    u32 kind = inode ? word_at(inode + OFF_INODE_MODE) & S_IFMT_BITS : 0;
    if (kind == S_IFSOCK_BITS)
        return NETWORK;
    if (kind == S_IFBLK_BITS)
        return BLOCK;
    if (kind != S_IFREG_BITS)
        return OTHER;
    return is_remote(word_at(pointer_at(inode + OFF_INODE_SB) + OFF_SB_MAGIC)) ? REMOTE : BLOCK;
}

static __always_inline int is_disk_wait(u32 sleeping)
{
    return (sleeping & (UNINTERRUPTIBLE | WAKEKILL | NOLOAD)) == UNINTERRUPTIBLE;
}

#ifdef NR_READ
static __always_inline int reads_descriptor(s64 number)
{
    return number == NR_READ || number == NR_PREAD64 || number == NR_READV || number == NR_PREADV ||
           number == NR_PREADV2;
}

static __always_inline int talks_to_socket(s64 number)
{
    return number == NR_RECVFROM || number == NR_RECVMSG || number == NR_SENDTO || number == NR_SENDMSG ||
           number == NR_CONNECT;
}

static __always_inline u32 first_polled(u64 fds)
{
    s32 fd = -1;
    bpf_probe_read_user(&fd, sizeof(fd), (void *)fds);
    return fd;
}

// By the registers that the current task entered the kernel with: in a fault there is no system call.
static __always_inline u32 blocked_on(u32 sleeping)
{
    struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs((void *)bpf_get_current_task_btf());
    s64 number = -1;
    u64 first = 0;
    bpf_probe_read_kernel(&number, sizeof(number), (void *)regs + REGS_NUMBER);
    bpf_probe_read_kernel(&first, sizeof(first), (void *)regs + REGS_FIRST);
    if (number < 0)
        return FAULT;
    if (reads_descriptor(number))
        return state_of_descriptor(first);
    if (talks_to_socket(number))
        return NETWORK;
    if (number == NR_PPOLL
#ifdef NR_POLL
        || number == NR_POLL
#endif
    )
        return state_of_descriptor(first_polled(first)) == NETWORK ? NETWORK : OTHER;
    return is_disk_wait(sleeping) ? BLOCK : OTHER;
}
#else
static __always_inline u32 blocked_on(u32 sleeping)
{
    return is_disk_wait(sleeping) ? BLOCK : OTHER;
}
#endif

// raw tracepoint sched_switch(preempt, previous, next, …); the previous task is still the current one
int raw_switched(struct bpf_raw_tracepoint_args *ctx)
{
    u64 now = bpf_ktime_get_ns();
    u32 leaving = bpf_get_current_pid_tgid(), coming = word_at(ctx->args[2] + OFF_TASK_PID);
    struct worker_t *w = workers.lookup(&leaving);
    if (w) {
        u32 sleeping = (u8)ctx->args[0] ? 0 : word_at(ctx->args[1] + OFF_TASK_STATE);
        was_running(w, ctx->args[1], now);
        become(w, sleeping ? blocked_on(sleeping) : RUNNABLE, now);
        w->owner = current_owner();
        remember_sums(w, ctx->args[1]);
    }
    w = workers.lookup(&coming);
    if (w) {
        was_waiting(w, ctx->args[2], now);
        become(w, ON_CPU, now);
    }
    return 0;
}

// raw tracepoint sched_wakeup(task)
int raw_woken(struct bpf_raw_tracepoint_args *ctx)
{
    u32 thread = word_at(ctx->args[0] + OFF_TASK_PID);
    struct worker_t *w = workers.lookup(&thread);
    if (w && w->state != ON_CPU)
        become(w, RUNNABLE, bpf_ktime_get_ns());
    return 0;
}

// raw tracepoint task_rename(task, name)
int raw_renamed(struct bpf_raw_tracepoint_args *ctx)
{
    char name[10] = {};
    bpf_probe_read_kernel(name, sizeof(name), (void *)ctx->args[1]);
    if (name[0] != 'p' || name[1] != 't' || name[2] != '_' || name[3] != 'd' || name[7] != '_' || name[8] != 'w')
        return 0;
    u32 thread = word_at(ctx->args[0] + OFF_TASK_PID);
    u64 owner = current_owner();
    if (!owner || thread != (u32)bpf_get_current_pid_tgid())
        return 0;
    struct worker_t fresh = {.owner = owner, .since = bpf_ktime_get_ns(), .state = ON_CPU};
    remember_sums(&fresh, ctx->args[0]);
    workers.update(&thread, &fresh);
    return 0;
}

// raw tracepoint sched_process_exit(task)
int raw_exited(struct bpf_raw_tracepoint_args *ctx)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct worker_t *w = workers.lookup(&thread);
    if (!w)
        return 0;
    u64 now = bpf_ktime_get_ns();
    was_running(w, ctx->args[0], now);
    account(w, now);
    workers.delete(&thread);
    return 0;
}
