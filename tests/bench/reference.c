// SPDX-License-Identifier: GPL-2.0
// What the benchmark compares with: a program that does nothing, for the cost of measuring, and the usual latency
// histogram of a block device (a time by device and sector at issue, a bucket at completion), without any owner.

BPF_HASH(issued, u64, u64, 10240);
BPF_HISTOGRAM(latency, int, 64);

int nothing(struct bpf_raw_tracepoint_args *ctx)
{
    return 0;
}

int reference_issue(struct tracepoint__block__block_rq_issue *args)
{
    u64 key = (u64)args->dev << 40 ^ args->sector, now = bpf_ktime_get_ns();
    issued.update(&key, &now);
    return 0;
}

int reference_complete(struct tracepoint__block__block_rq_complete *args)
{
    u64 key = (u64)args->dev << 40 ^ args->sector, *begun = issued.lookup(&key);
    if (!begun)
        return 0;
    latency.atomic_increment(bpf_log2l((bpf_ktime_get_ns() - *begun) / 1000));
    issued.delete(&key);
    return 0;
}
