// SPDX-License-Identifier: GPL-2.0
// What PyTorch's DataLoader says through its pipes, and when its loop waits, for processes of the managed cgroups.
// Compiled by BCC with memory.h, owner.h and dataloader_event.h in front. Meaning is made of the events in
// dataloader_model.py.

#define NAME_BYTES 48

struct span_t {
    u64 start;
    u64 record;  // at::RecordFunction *
    u32 kind;
    u32 unused;
    u8 name[NAME_BYTES];
};

BPF_TABLE("lru_hash", u64, struct span_t, spans, MAX_THREADS);

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

// The state of the current thread, which now does something that is told.
static __always_inline struct thread_t *state_of_thread(u64 owner)
{
    struct thread_t fresh = {.in_hand = -1, .read_task = -1};
    u64 id = bpf_get_current_pid_tgid();
    struct thread_t *t = threads.lookup_or_try_init(&id, &fresh);
    if (t)
        t->owner = owner;
    return t;
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

static __always_inline void writes(struct thread_t *t, u64 pipe, u64 body, u32 length)
{
    struct message_t m = {};
    u64 now = bpf_ktime_get_ns();
    parse_message(&m, body);
    if (!m.kind || !within_budget(t, now))
        return;
    struct event_t e = {.time = now, .start = now, .pipe = pipe, .task = m.task};
    e.length = length;
    __builtin_memcpy(e.head, m.head, HEAD_BYTES);
    emit(&e, m.kind, t->owner);
}

// A message is written at once, or, if it is long, its length first; what follows of a long one is not looked at.
// Told before the call, not after: the reader may run, and even answer, before the writer gets to run again, and what
// one process causes in another must not be told first.
TRACEPOINT_PROBE(syscalls, sys_enter_write)
{
    u64 owner = current_owner(), buffer = (u64)args->buf, count = args->count;
    if (!owner)
        return 0;
    introduce(owner);
    u64 pipe = count < 4 ? 0 : pipe_of(args->fd);
    struct thread_t *t = pipe ? state_of_thread(owner) : 0;
    if (!t)
        return 0;
    u32 expected = t->write_pipe == pipe ? t->write_length : 0, first = big_endian(buffer);
    t->write_length = 0;
    if (expected && count == expected) {
        writes(t, pipe, buffer, expected);
    } else if (count == 4 && first > SPLIT_ABOVE) {
        t->write_pipe = pipe;
        t->write_length = first;
    } else if ((u64)first + 4 == count) {
        writes(t, pipe, buffer + 4, first);
    }
    return 0;
}

TRACEPOINT_PROBE(syscalls, sys_enter_read)
{
    u64 owner = current_owner();
    if (!owner)
        return 0;
    introduce(owner);
    u64 pipe = pipe_of(args->fd);
    struct thread_t *t = pipe ? state_of_thread(owner) : 0;
    if (!t)
        return 0;
    t->call = READING;
    t->call_start = bpf_ktime_get_ns();
    t->call_pipe = pipe;
    t->call_buffer = (u64)args->buf;
    t->call_count = args->count;
    return 0;
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
    struct thread_t *t = pipe ? state_of_thread(owner) : 0;
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

// The training loop waits for its pin-memory thread: queue.Queue.get(timeout=5), in the C library sem_clockwait(). Waits
// for the interpreter's lock last 5 ms.
TRACEPOINT_PROBE(syscalls, sys_enter_futex)
{
    u64 id = bpf_get_current_pid_tgid();
    if ((args->op & FUTEX_COMMAND) != FUTEX_WAIT_BITSET || args->op & FUTEX_CLOCK_REALTIME || id >> 32 != (u32)id)
        return 0;
    u64 owner = current_owner(), now = bpf_ktime_get_ns();
    s64 until[2] = {};  // seconds, nanoseconds, CLOCK_MONOTONIC
    if (!owner || bpf_probe_read_user(until, sizeof(until), (void *)args->utime))
        return 0;
    s64 wait = until[0] * (s64)SECOND_NS + until[1] - (s64)now;
    if (wait < SHORTEST_QUEUE_WAIT_NS || wait > LONGEST_QUEUE_WAIT_NS)
        return 0;
    struct thread_t *t = state_of_thread(owner);
    if (!t || !within_budget(t, now))
        return 0;
    t->call = WAITING;
    t->call_start = now;
    struct event_t e = {.time = now, .start = now, .task = -1};
    emit(&e, EV_WAIT, owner);
    return 0;
}

TRACEPOINT_PROBE(syscalls, sys_exit_futex)
{
    struct thread_t *t = leave_call(WAITING);
    if (!t)
        return 0;
    struct event_t e = {.time = bpf_ktime_get_ns(), .start = t->call_start, .task = -1};
    emit(&e, EV_WAIT_END, t->owner);
    return 0;
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
