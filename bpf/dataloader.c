// SPDX-License-Identifier: GPL-2.0
// What PyTorch's DataLoader says through its pipes, and when its loop waits, for processes of the managed cgroups.
//
// Compiled by BCC with memory.h and owner.h in front. OFF_* are offsets from the running kernel's BTF, given by
// dataloader.py. Each message is a pickle
// behind its length (4 bytes, big endian; multiprocessing/connection.py). Only its first bytes are looked at: those
// that say which task it is about. Meaning is made of the events in dataloader_model.py.

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
#define HEAD_BYTES 24
#define NAME_BYTES 48
#define SECOND_NS 1000000000ULL

// Mirrored by EVENT in dataloader.py.
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
};
enum flag_t { IN_WORKER = 1, IN_PIN_THREAD = 2 };
// Mirrored by RING_FULL and TOO_MANY in dataloader.py: no room in the ring; more than MAX_EVENTS_PER_SECOND of one thread.
enum drop_t { RING_FULL, TOO_MANY, DROPS };
enum call_t { NO_CALL, WRITING, READING };

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

struct span_t {
    u64 start;
    u64 record;  // at::RecordFunction *
    u32 kind;
    u32 unused;
    u8 name[NAME_BYTES];
};

struct message_t {
    u32 kind;  // 0: not one of ours
    s32 task;
    u8 head[HEAD_BYTES];
};

BPF_F_TABLE("array", u32, u64, dropped, DROPS, BPF_F_MMAPABLE);
BPF_TABLE("lru_hash", u64, struct thread_t, threads, MAX_THREADS);
BPF_TABLE("lru_hash", u32, u32, processes, MAX_PROCESSES);
BPF_TABLE("lru_hash", u64, struct span_t, spans, MAX_THREADS);
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

static __always_inline void emit(struct event_t *e, u32 kind, u64 owner)
{
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

// A process is told once, so that user space can look for libraries to trace in it.
static __always_inline void introduce(u64 owner)
{
    u32 process = bpf_get_current_pid_tgid() >> 32, one = 1;
    if (processes.lookup(&process))
        return;
    processes.update(&process, &one);
    struct event_t e = {.time = bpf_ktime_get_ns(), .task = -1};
    emit(&e, EV_PROCESS, owner);
}

// The state of the current thread, which now does something with a pipe; none where nobody manages it.
static __always_inline struct thread_t *thread_on_pipe(u64 owner)
{
    struct thread_t fresh = {.in_hand = -1, .read_task = -1};
    u64 id = bpf_get_current_pid_tgid();
    struct thread_t *t = threads.lookup_or_try_init(&id, &fresh);
    if (t)
        t->owner = owner;
    return t;
}

static __always_inline int enter_call(u32 call, u32 fd, u64 buffer, u64 count)
{
    u64 owner = current_owner();
    if (!owner)
        return 0;
    introduce(owner);
    u64 pipe = pipe_of(fd);
    struct thread_t *t = pipe ? thread_on_pipe(owner) : 0;
    if (!t)
        return 0;
    t->call = call;
    t->call_start = bpf_ktime_get_ns();
    t->call_pipe = pipe;
    t->call_buffer = buffer;
    t->call_count = count;
    return 0;
}

static __always_inline struct thread_t *leave_call(u32 call)
{
    u64 id = bpf_get_current_pid_tgid();
    struct thread_t *t = threads.lookup(&id);
    if (!t || t->call != call)
        return 0;
    t->call = NO_CALL;
    return t;
}

static __always_inline void wrote(struct thread_t *t, u64 body, u32 length)
{
    struct message_t m = {};
    parse_message(&m, body);
    if (!m.kind || !within_budget(t, t->call_start))
        return;
    struct event_t e = {.time = bpf_ktime_get_ns(), .start = t->call_start, .pipe = t->call_pipe, .task = m.task};
    e.length = length;
    __builtin_memcpy(e.head, m.head, HEAD_BYTES);
    emit(&e, m.kind, t->owner);
}

TRACEPOINT_PROBE(syscalls, sys_enter_write)
{
    return enter_call(WRITING, args->fd, (u64)args->buf, args->count);
}

// A message is written at once, or, if it is long, its length first; what follows of a long one is not looked at.
TRACEPOINT_PROBE(syscalls, sys_exit_write)
{
    struct thread_t *t = leave_call(WRITING);
    s64 written = args->ret;
    if (!t || written < 4)
        return 0;
    u32 expected = t->write_pipe == t->call_pipe ? t->write_length : 0, first = big_endian(t->call_buffer);
    t->write_length = 0;
    if (expected && t->call_count == expected) {
        wrote(t, t->call_buffer, expected);
    } else if (written == 4 && first > SPLIT_ABOVE) {
        t->write_pipe = t->call_pipe;
        t->write_length = first;
    } else if ((u64)first + 4 == written) {
        wrote(t, t->call_buffer + 4, first);
    }
    return 0;
}

TRACEPOINT_PROBE(syscalls, sys_enter_read)
{
    return enter_call(READING, args->fd, (u64)args->buf, args->count);
}

static __always_inline void got_part(struct thread_t *t, u32 size)
{
    if (!t->read_got) {
        struct message_t m = {};
        parse_message(&m, t->call_buffer);
        t->read_kind = m.kind;
        t->read_task = m.task;
        __builtin_memcpy(t->read_head, m.head, HEAD_BYTES);
    }
    t->read_got += size;
    if (t->read_got < t->read_length)
        return;
    u32 length = t->read_length;
    t->read_length = 0;
    u64 now = bpf_ktime_get_ns();
    if (!t->read_kind || !within_budget(t, now))
        return;
    if (t->read_kind == EV_WRITE)
        t->in_hand = t->read_task;
    struct event_t e = {.time = now, .start = t->read_start, .pipe = t->call_pipe, .task = t->read_task};
    e.length = length;
    __builtin_memcpy(e.head, t->read_head, HEAD_BYTES);
    emit(&e, t->read_kind == EV_WRITE ? EV_READ : EV_CONTROL_READ, t->owner);
}

// A message is read by asking for 4 bytes, then for what they say, until all has come.
TRACEPOINT_PROBE(syscalls, sys_exit_read)
{
    struct thread_t *t = leave_call(READING);
    s64 size = args->ret;
    if (!t || size <= 0)
        return 0;
    if (t->read_length && t->read_pipe == t->call_pipe && t->call_count == t->read_length - t->read_got) {
        got_part(t, size);
        return 0;
    }
    t->read_length = 0;
    if (t->call_count == 4 && size == 4) {
        t->read_pipe = t->call_pipe;
        t->read_start = t->call_start;
        t->read_length = big_endian(t->call_buffer);
        t->read_got = 0;
    }
    return 0;
}

// Entering poll: a worker has finished the task that it had in hand; the training loop has begun to wait.
static __always_inline int polling(u64 fds, u64 count, s64 wait_ms)
{
    if (count != 1 || wait_ms < SHORTEST_WAIT_MS)
        return 0;
    u64 owner = current_owner();
    if (!owner)
        return 0;
    s32 fd = -1;
    bpf_probe_read_user(&fd, sizeof(fd), (void *)fds);
    u64 pipe = pipe_of(fd), now = bpf_ktime_get_ns();
    struct thread_t *t = pipe ? thread_on_pipe(owner) : 0;
    if (!t || !within_budget(t, now))
        return 0;
    struct event_t e = {.time = now, .start = now, .pipe = pipe, .task = t->in_hand};
    t->in_hand = -1;
    emit(&e, EV_POLL, owner);
    return 0;
}

#ifdef HAVE_POLL
TRACEPOINT_PROBE(syscalls, sys_enter_poll)
{
    return polling((u64)args->ufds, args->nfds, args->timeout_msecs);
}
#endif

// The C library's poll() on machines without that system call.
TRACEPOINT_PROBE(syscalls, sys_enter_ppoll)
{
    s64 wait[2] = {};  // seconds, nanoseconds
    bpf_probe_read_user(wait, sizeof(wait), (void *)args->tsp);
    return polling((u64)args->ufds, args->nfds, wait[0] * 1000 + (u64)wait[1] / 1000000);
}

TRACEPOINT_PROBE(sched, sched_process_exit)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 process = id >> 32;
    if ((u32)id != process || !processes.lookup(&process))
        return 0;
    processes.delete(&process);
    struct event_t e = {.time = bpf_ktime_get_ns(), .task = -1};
    emit(&e, EV_EXIT, 0);
    return 0;
}


// What a profiler span is about: `enumerate(DataLoader)#…` or `Optimizer.step#…` (torch/utils/data/dataloader.py,
// torch/optim/optimizer.py); else 0.
static __always_inline u32 span_kind(const u8 *name)
{
    if (name[0] == 'e' && name[1] == 'n' && name[9] == '(' && name[10] == 'D' && name[14] == 'L' && name[20] == ')')
        return EV_NEXT_END;
    if (name[0] == 'O' && name[1] == 'p' && name[9] == '.' && name[10] == 's' && name[11] == 't' && name[12] == 'e')
        return EV_STEP;
    return 0;
}

// torch::autograd::profiler::record_function_enter_new(const std::string &name, …) with the result's address first
int span_entered(struct pt_regs *ctx)
{
    u64 owner = current_owner(), id = bpf_get_current_pid_tgid(), text = 0;
    if (!owner)
        return 0;
    struct span_t *outer = spans.lookup(&id);
    if (outer && outer->kind == EV_NEXT_END)
        return 0;  // inside the loader's own
    struct span_t span = {.start = bpf_ktime_get_ns()};
    bpf_probe_read_user(&text, sizeof(text), (void *)PT_REGS_PARM2(ctx));
    bpf_probe_read_user_str(span.name, sizeof(span.name), (void *)text);
    span.kind = span_kind(span.name);
    if (!span.kind)
        return 0;
    spans.update(&id, &span);
    if (span.kind == EV_NEXT_END) {
        struct event_t e = {.time = span.start, .start = span.start, .task = -1};
        __builtin_memcpy(e.head, span.name + 22, HEAD_BYTES);
        emit(&e, EV_NEXT_ENTER, owner);
    }
    return 0;
}

// at::RecordFunction::RecordFunction(RecordScope): the first one after span_entered is the span's own
int span_constructed(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct span_t *span = spans.lookup(&id);
    if (span && !span->record)
        span->record = PT_REGS_PARM1(ctx);
    return 0;
}

// at::RecordFunction::end()
int span_ended(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct span_t *span = spans.lookup(&id);
    if (!span || span->record != PT_REGS_PARM1(ctx))
        return 0;
    u64 owner = current_owner();
    struct event_t e = {.time = bpf_ktime_get_ns(), .start = span->start, .task = -1};
    __builtin_memcpy(e.head, span->name + 22, HEAD_BYTES);
    u32 kind = span->kind;
    spans.delete(&id);
    if (owner)
        emit(&e, kind, owner);
    return 0;
}
