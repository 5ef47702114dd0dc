// SPDX-License-Identifier: GPL-2.0
// READ and WRITE calls of NFS clients per managed cgroup and mount. Compiled with
// histogram.h and owner.h in front.
//
// nfs_initiate_read/write run in the caller's context just before the RPC's rpc_task_begin, in the same thread: together
// they say who, where and what for an RPC id. rpc_stats_latency gives the times when the call ends, and the
// nfs_*_done that follows it in the same thread the bytes.

#define READ_OP 0
#define WRITE_OP 1
#define NSEC_PER_USEC 1000

// A mount is known by its device number (tracepoints give the kernel's internal dev_t).
struct nfs_key_t {
    u64 cgroup;
    u32 device;
    u32 op;
};

// Mirrored by NFS_COUNTERS in decode.py.
struct nfs_counters_t {
    u64 requests;
    u64 bytes;
    u64 backlog_ns;
    u64 round_trip_ns;
    u64 total_ns;
    u64 total_us_squared;
    u64 histogram[HISTOGRAM_BUCKETS];
};

struct rpc_id_t {
    u32 task;
    u32 client;
};

BPF_HASH(nfs_calls, struct nfs_key_t, struct nfs_counters_t, MAX_SLOTS);
BPF_TABLE("lru_hash", u32, struct nfs_key_t, about_to_begin, 16384);              // by thread
BPF_TABLE("lru_hash", struct rpc_id_t, struct nfs_key_t, running, MAX_RUNNING);
BPF_TABLE("lru_hash", u32, struct nfs_key_t, just_ended, 16384);                  // by thread
BPF_ARRAY(nfs_lost, u64, 1);

static __always_inline int initiate(u32 device, u32 op)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct nfs_key_t key = {.cgroup = current_owner(), .device = device, .op = op};
    if (key.cgroup)
        about_to_begin.update(&thread, &key);
    return 0;
}

static __always_inline int done(u32 op, s64 bytes)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct nfs_key_t *key = just_ended.lookup(&thread);
    if (!key || key->op != op)
        return 0;
    struct nfs_key_t ended = *key;
    just_ended.delete(&thread);
    struct nfs_counters_t *counters = nfs_calls.lookup(&ended);
    if (counters && bytes > 0)
        __sync_fetch_and_add(&counters->bytes, bytes);
    return 0;
}

int read_initiated(struct tracepoint__nfs__nfs_initiate_read *args)
{
    return initiate(args->dev, READ_OP);
}

int write_initiated(struct tracepoint__nfs__nfs_initiate_write *args)
{
    return initiate(args->dev, WRITE_OP);
}

int task_begun(struct tracepoint__sunrpc__rpc_task_begin *args)
{
    u32 thread = bpf_get_current_pid_tgid();
    struct nfs_key_t *key = about_to_begin.lookup(&thread);
    if (!key)
        return 0;
    struct nfs_key_t begun = *key;
    struct rpc_id_t id = {.task = args->task_id, .client = args->client_id};
    about_to_begin.delete(&thread);
    running.update(&id, &begun);
    return 0;
}

int task_ended(struct tracepoint__sunrpc__rpc_stats_latency *args)
{
    u32 thread = bpf_get_current_pid_tgid(), zero = 0;
    struct rpc_id_t id = {.task = args->task_id, .client = args->client_id};
    struct nfs_key_t *key = running.lookup(&id);
    if (!key)
        return 0;
    struct nfs_key_t ended = *key;
    running.delete(&id);
    struct nfs_counters_t nothing = {}, *counters = nfs_calls.lookup_or_try_init(&ended, &nothing);
    if (!counters) {
        nfs_lost.atomic_increment(zero);
        return 0;
    }
    u64 us = args->execute;
    u64 bucket = log2_bucket(us);
    __sync_fetch_and_add(&counters->requests, 1);
    __sync_fetch_and_add(&counters->backlog_ns, (u64)args->backlog * NSEC_PER_USEC);
    __sync_fetch_and_add(&counters->round_trip_ns, (u64)args->rtt * NSEC_PER_USEC);
    __sync_fetch_and_add(&counters->total_ns, us * NSEC_PER_USEC);
    __sync_fetch_and_add(&counters->total_us_squared, us * us);
    __sync_fetch_and_add(&counters->histogram[bucket], 1);
    just_ended.update(&thread, &ended);
    return 0;
}

int read_done(struct tracepoint__nfs__nfs_readpage_done *args)
{
    return done(READ_OP, args->res_count);
}

int write_done(struct tracepoint__nfs__nfs_writeback_done *args)
{
    return done(WRITE_OP, args->res_count);
}
