// SPDX-License-Identifier: GPL-2.0
// What dataloader.c tells, and how it finds out what a message is about. Compiled by BCC behind memory.h and owner.h, in
// front of dataloader.c. OFF_* are offsets from the running kernel's BTF, given by dataloader.py.
//
// Each message is a pickle behind its length (4 bytes, big endian; multiprocessing/connection.py). Only its first bytes
// are looked at: those that say which task it is about.

#include <linux/signal_types.h>
#include <uapi/linux/ptrace.h>

#define S_IFMT 0170000
#define S_IFIFO 0010000
#define PICKLE 0x80
#define FRAME 0x95
#define BININT1 'K'
#define BININT2 'M'
#define BININT 'J'
#define SHORT_BINUNICODE 0x8c
#define FRAMED_OPCODE 11      // behind PROTO (2 bytes) and FRAME (9 bytes)
#define SPLIT_ABOVE 16384     // longer messages have their length written by a call of its own
#define SHORTEST_WAIT_MS 1000 // the loader polls for 5 s or its own time-out; shorter ones are not its
#define FUTEX_COMMAND 0x7f    // include/uapi/linux/futex.h
#define FUTEX_WAIT_BITSET 9
#define FUTEX_CLOCK_REALTIME 256
#define SHORTEST_QUEUE_WAIT_NS 4000000000LL
#define LONGEST_QUEUE_WAIT_NS 5100000000LL
#define HEAD_BYTES 24
#define SECOND_NS 1000000000ULL

// Mirrored by EVENT in dataloader_events.py.
struct event_t {
    u64 time;
    u64 start;
    u64 pipe;
    u64 cgroup;
    u32 process;
    u32 thread;
    u32 parent;
    u32 length;
    s32 task;  // -1: none
    u16 kind;
    u16 flags;
    u8 head[HEAD_BYTES];
};

enum kind_t {
    NO_EVENT,
    EV_WRITE,
    EV_READ,
    EV_POLL,
    EV_CONTROL,
    EV_NEXT_ENTER,
    EV_NEXT_END,
    EV_STEP,
    EV_PROCESS,
    EV_EXIT,
    EV_CONTROL_READ,
    EV_WAIT,
    EV_WAIT_END,
};
enum flag_t { IN_WORKER = 1, IN_PIN_THREAD = 2 };
// Mirrored by RING_FULL and TOO_MANY in dataloader.py: no room in the ring; more than MAX_EVENTS_PER_SECOND of one thread,
// or MAX_JOB_EVENTS_PER_SECOND of one cgroup.
enum drop_t { RING_FULL, TOO_MANY, DROPS };
enum call_t { NO_CALL, READING, WAITING };

// A thread: the system call that it is in, the message that it is in the middle of, the task that it has in hand.
struct thread_t {
    u64 call_start;
    u64 call_pipe;
    u64 call_buffer;
    u64 call_count;
    u64 owner;
    u64 read_pipe;
    u64 read_start;
    u64 write_pipe;
    u64 window;
    u32 call;
    u32 read_length;
    u32 read_got;
    u32 write_length;
    u32 window_events;
    s32 read_task;
    s32 in_hand;
    u32 read_kind;
    u8 read_head[HEAD_BYTES];
};

struct message_t {
    u32 kind;  // 0: not one of ours
    s32 task;
    u8 head[HEAD_BYTES];
};

struct budget_t {
    u64 window;
    u64 events;
};

BPF_F_TABLE("array", u32, u64, dropped, DROPS, BPF_F_MMAPABLE);
BPF_TABLE("lru_hash", u64, struct budget_t, budgets, MAX_CGROUPS);
BPF_TABLE("lru_hash", u64, struct thread_t, threads, MAX_THREADS);
BPF_TABLE("lru_hash", u32, u32, processes, MAX_PROCESSES);
BPF_RINGBUF_OUTPUT(events, RING_PAGES);

static __always_inline void count_drop(u32 reason)
{
    u64 *count = dropped.lookup(&reason);
    if (count)
        __sync_fetch_and_add(count, 1);
}

// Inode of a descriptor of the current task if it is a pipe, else 0.
static __always_inline u64 pipe_of(u32 fd)
{
    u64 table = pointer_at(pointer_at(bpf_get_current_task() + OFF_TASK_FILES) + OFF_FILES_FDT);
    if (fd >= word_at(table + OFF_FDT_MAX_FDS))
        return 0;
    u64 file = pointer_at(pointer_at(table + OFF_FDT_FD) + 8ULL * fd);
    u64 inode = file ? pointer_at(file + OFF_FILE_INODE) : 0;
    if (!inode || (word_at(inode + OFF_INODE_MODE) & S_IFMT) != S_IFIFO)
        return 0;
    return pointer_at(inode + OFF_INODE_INO);
}

static __always_inline int starts_with_pt_data(const char *comm)
{
    return comm[0] == 'p' && comm[1] == 't' && comm[2] == '_' && comm[3] == 'd' && comm[4] == 'a' && comm[5] == 't' &&
           comm[6] == 'a' && comm[7] == '_';
}

// A worker is known by its main thread's name (its feeder thread may bear another), the pin-memory thread by its own.
static __always_inline u16 role_flags(u64 task)
{
    char comm[16] = {};
    bpf_probe_read_kernel(comm, sizeof(comm), (void *)pointer_at(task + OFF_TASK_LEADER) + OFF_TASK_COMM);
    if (starts_with_pt_data(comm) && comm[8] == 'w')
        return IN_WORKER;
    bpf_get_current_comm(comm, sizeof(comm));
    return starts_with_pt_data(comm) && comm[8] == 'p' ? IN_PIN_THREAD : 0;
}

// The ring is everybody's: what one job tells must leave room for what the others do, however many threads it has.
static __always_inline int within_job_budget(u64 owner, u64 now)
{
    struct budget_t fresh = {.window = now}, *b = budgets.lookup_or_try_init(&owner, &fresh);
    if (!b)
        return 1;
    if (now - b->window > SECOND_NS) {
        b->window = now;
        b->events = 0;
    }
    __sync_fetch_and_add(&b->events, 1);
    if (b->events <= MAX_JOB_EVENTS_PER_SECOND)
        return 1;
    count_drop(TOO_MANY);
    return 0;
}

static __always_inline void emit(struct event_t *e, u32 kind, u64 owner)
{
    if (owner && !within_job_budget(owner, e->time))
        return;
    u64 id = bpf_get_current_pid_tgid(), task = bpf_get_current_task();
    e->kind = kind;
    e->cgroup = owner;
    e->process = id >> 32;
    e->thread = (u32)id;
    e->parent = word_at(pointer_at(task + OFF_TASK_PARENT) + OFF_TASK_TGID);
    e->flags = role_flags(task);
    if (events.ringbuf_output(e, sizeof(*e), BPF_RB_NO_WAKEUP))
        count_drop(RING_FULL);
}

static __always_inline int within_budget(struct thread_t *t, u64 now)
{
    if (now - t->window > SECOND_NS) {
        t->window = now;
        t->window_events = 0;
    }
    if (t->window_events++ < MAX_EVENTS_PER_SECOND)
        return 1;
    count_drop(TOO_MANY);
    return 0;
}

// Which task a pickle is about: `(number, anything)`; CONTROL for None and for the DataLoader's own objects.
static __always_inline void parse_message(struct message_t *m, u64 buffer)
{
    u8 raw[24] = {};
    u32 body = FRAMED_OPCODE;
    m->kind = NO_EVENT;
    m->task = -1;
    // A short message may end with its page, so the least is tried last; what lies behind a message does no harm.
    if (bpf_probe_read_user(raw, sizeof(raw), (void *)buffer) && bpf_probe_read_user(raw, 4, (void *)buffer))
        return;
    if (raw[0] != PICKLE)
        return;
    if (raw[2] == 'N' && raw[3] == '.')
        m->kind = EV_CONTROL;
    if (raw[2] != FRAME)
        return;
    u8 opcode = raw[FRAMED_OPCODE];
    if (opcode == BININT1) {
        m->task = raw[body + 1];
        body += 2;
    } else if (opcode == BININT2) {
        m->task = raw[body + 1] | raw[body + 2] << 8;
        body += 3;
    } else if (opcode == BININT) {
        m->task = raw[body + 1] | raw[body + 2] << 8 | raw[body + 3] << 16 | (u32)raw[body + 4] << 24;
        body += 5;
    } else if (opcode == SHORT_BINUNICODE && raw[13] == 't' && raw[14] == 'o' && raw[15] == 'r' && raw[16] == 'c') {
        m->kind = EV_CONTROL;
    } else {
        return;
    }
    if (opcode != SHORT_BINUNICODE)
        m->kind = EV_WRITE;
    bpf_probe_read_user(m->head, HEAD_BYTES, (void *)buffer + body);
}

static __always_inline u32 big_endian(u64 address)
{
    u8 b[4] = {};
    bpf_probe_read_user(b, sizeof(b), (void *)address);
    return (u32)b[0] << 24 | b[1] << 16 | b[2] << 8 | b[3];
}
