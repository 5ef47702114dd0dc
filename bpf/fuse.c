// SPDX-License-Identifier: GPL-2.0
// Requests of managed cgroups to user-space file systems, per mount. Compiled with memory.h, histogram.h and owner.h in
// front; offsets (OFF_*) come from the running kernel's BTF.
//
// A request begins where the caller hands its arguments over (fuse_simple_request waits for the answer,
// fuse_simple_background does not) and ends in fuse_request_end, which knows the arguments by their address.

#include <uapi/linux/ptrace.h>

#define NSEC_PER_USEC 1000
#define READ_OP 0
#define WRITE_OP 1
#define OTHER_OP 2
#define OPCODE_READ 15  // include/uapi/linux/fuse.h
#define OPCODE_WRITE 16
#define IN_HEADER_BYTES 40
#define OUT_HEADER_BYTES 16
#define WRITE_ARGUMENT_BYTES 40

// A mount is known by its device number (the kernel's internal dev_t).
struct fuse_key_t {
    u64 cgroup;
    u32 device;
    u32 op;
};

// Mirrored by FUSE_COUNTERS in decode.py.
struct fuse_counters_t {
    u64 requests;
    u64 bytes;
    u64 total_ns;
    u64 total_us_squared;
    u64 histogram[HISTOGRAM_BUCKETS];
};

struct begun_t {
    u64 cgroup;
    u64 time;
    u32 device;
    u32 unused;
};

struct caller_t {
    u64 mount;
    u64 thread;
};

BPF_HASH(fuse_calls, struct fuse_key_t, struct fuse_counters_t, MAX_SLOTS);
BPF_TABLE("lru_hash", u64, struct begun_t, begun, MAX_RUNNING);      // by the address of the arguments, or the request
BPF_TABLE("lru_hash", struct caller_t, u64, callers, MAX_RUNNING);   // whose thread this is
BPF_TABLE("lru_hash", u32, u32, servers, MAX_SERVERS);               // processes that answer
BPF_ARRAY(fuse_lost, u64, 1);

static __always_inline void lose(void)
{
    u32 zero = 0;
    fuse_lost.atomic_increment(zero);
}

static __always_inline void begin(u64 key, u64 mount, u64 owner)
{
    struct begun_t now = {.cgroup = owner, .device = word_at(pointer_at(mount + OFF_MOUNT_SB) + OFF_SB_DEV)};
    now.time = bpf_ktime_get_ns();
    begun.update(&key, &now);
}

static __always_inline int call(u64 mount, u64 arguments)
{
    u64 owner = current_owner();
    if (owner)
        begin(arguments, mount, owner);
    else
        begun.delete(&arguments);  // that of a request that never ended
    return 0;
}

static __always_inline int end(u64 key, u64 request)
{
    struct begun_t *known = begun.lookup(&key);
    if (!known)
        return 0;
    struct begun_t started = *known;
    begun.delete(&key);
    u32 opcode = word_at(request + OFF_REQ_OPCODE), sent = word_at(request + OFF_REQ_IN_LENGTH);
    u32 received = word_at(request + OFF_REQ_OUT_LENGTH), failed = word_at(request + OFF_REQ_ERROR);
    struct fuse_key_t slot = {.cgroup = started.cgroup, .device = started.device, .op = OTHER_OP};
    u64 bytes = 0;
    if (opcode == OPCODE_READ) {
        slot.op = READ_OP;
        bytes = failed || received < OUT_HEADER_BYTES ? 0 : received - OUT_HEADER_BYTES;
    } else if (opcode == OPCODE_WRITE) {
        slot.op = WRITE_OP;
        bytes = failed ? 0 : sent - IN_HEADER_BYTES - WRITE_ARGUMENT_BYTES;
    }
    struct fuse_counters_t nothing = {}, *counters = fuse_calls.lookup_or_try_init(&slot, &nothing);
    if (!counters) {
        lose();
        return 0;
    }
    u64 ns = bpf_ktime_get_ns() - started.time, us = ns / NSEC_PER_USEC, bucket = log2_bucket(us);
    __sync_fetch_and_add(&counters->requests, 1);
    __sync_fetch_and_add(&counters->bytes, bytes);
    __sync_fetch_and_add(&counters->total_ns, ns);
    __sync_fetch_and_add(&counters->total_us_squared, us * us);
    __sync_fetch_and_add(&counters->histogram[bucket], 1);
    return 0;
}

// (mount, arguments)
int kprobe_call(struct pt_regs *ctx)
{
    return call(PT_REGS_PARM1(ctx), PT_REGS_PARM2(ctx));
}

// (idmap, mount, arguments): since Linux 6.12
int kprobe_mapped_call(struct pt_regs *ctx)
{
    return call(PT_REGS_PARM2(ctx), PT_REGS_PARM3(ctx));
}

int kprobe_end(struct pt_regs *ctx)
{
    u64 request = PT_REGS_PARM1(ctx);
    return end(pointer_at(request + OFF_REQ_ARGS), request);
}

// fuse_request_send(request) fires where a request is queued for the server: in the caller, or, for background requests
// that had to wait for another one to end, in a process that answers. Then the caller is known by its thread's number.
int raw_sent(struct bpf_raw_tracepoint_args *ctx)
{
    u64 request = ctx->args[0], owner = 0;
    struct caller_t caller = {.mount = pointer_at(request + OFF_REQ_MOUNT), .thread = word_at(request + OFF_REQ_PID)};
    u32 process = bpf_get_current_pid_tgid() >> 32;
    if (!servers.lookup(&process)) {
        owner = current_owner();
        callers.update(&caller, &owner);
    } else {
        u64 *known = callers.lookup(&caller);
        if (known)
            owner = *known;
        else
            lose();
    }
    if (owner)
        begin(request, caller.mount, owner);
    return 0;
}

// fuse_request_end(request)
int raw_ended(struct bpf_raw_tracepoint_args *ctx)
{
    u32 process = bpf_get_current_pid_tgid() >> 32, one = 1;
    if (process && !servers.lookup(&process))
        servers.update(&process, &one);
    return end(ctx->args[0], ctx->args[0]);
}
