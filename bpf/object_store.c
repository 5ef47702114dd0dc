// SPDX-License-Identifier: GPL-2.0
// Requests of managed cgroups on TCP connections to object stores, without a look at what is sent. Compiled with
// memory.h, histogram.h and owner.h in front.
//
// A request begins with the first send after something was received, its first byte is the first received after that,
// its last byte the last one before the next send. So pipelined requests count as one, and the handshake of TLS as one
// exchange, which is left out on peers marked TLS.

#include <uapi/linux/ptrace.h>

#define AF_INET_FAMILY 2
#define AF_INET6_FAMILY 10
#define TCP_PROTOCOL 6
#define TCP_SYN_SENT_STATE 2
#define TCP_CLOSE_STATE 7
#define TCP_PEER_ENDED (1 << 6 | 1 << 8 | 1 << 9 | 1 << 11)  // TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING: net/tcp_states.h
#define PEER_TLS 2  // value in `peers`: 1 otherwise
#define NSEC_PER_USEC 1000

// Address as IPv6, IPv4 mapped; all zero: any. The port is in network byte order.
struct peer_t {
    u32 address[4];
    u32 port;
};

struct object_key_t {
    u64 cgroup;
    struct peer_t peer;
    u32 unused;
};

// Mirrored by OBJECT_COUNTERS in decode.py.
struct object_counters_t {
    u64 requests;
    u64 bytes;
    u64 first_byte_ns;
    u64 last_byte_ns;
    u64 last_byte_us_squared;
    u64 opened;
    u64 closed;
    u64 histogram[HISTOGRAM_BUCKETS];
};

struct connection_t {
    struct object_key_t key;
    u64 sent;      // 0: no request is running
    u64 first;     // 0: nothing received for it yet
    u64 last;
    u64 handshake; // exchanges still to be left out
    u32 read;      // the peer's sequence number up to which was read
    u32 unused;
};

BPF_HASH(peers, struct peer_t, u32, MAX_PEERS);
BPF_HASH(connections, u64, struct connection_t, MAX_CONNECTIONS);
BPF_HASH(objects, struct object_key_t, struct object_counters_t, MAX_SLOTS);
BPF_HASH(endpoints, u64, u64, MAX_CGROUPS);  // how many a cgroup has in `objects`
BPF_ARRAY(objects_lost, u64, 1);

static __always_inline void lose(void)
{
    u32 zero = 0;
    objects_lost.atomic_increment(zero);
}

static __always_inline int peer_of(u64 sk, struct peer_t *peer)
{
    u16 family = word_at(sk + OFF_SK_FAMILY), port = word_at(sk + OFF_SK_DPORT);
    peer->port = port;
    if (family == AF_INET_FAMILY) {
        peer->address[2] = __builtin_bswap32(0xffff);
        peer->address[3] = word_at(sk + OFF_SK_DADDR);
        return 1;
    }
    return family == AF_INET6_FAMILY &&
           !bpf_probe_read_kernel(peer->address, sizeof(peer->address), (void *)(sk + OFF_SK_V6_DADDR));
}

// Flags of a peer that is to be watched, by its address or by its port alone; else 0.
static __always_inline u32 watched(struct peer_t *peer)
{
    struct peer_t any = {.port = peer->port};
    u32 *flags = peers.lookup(peer);
    if (!flags)
        flags = peers.lookup(&any);
    return flags ? *flags : 0;
}

// Counters of a cgroup at a peer. A job that talks to ever new addresses (a store behind thousands, pages of the web)
// has no more endpoints than MAX_ENDPOINTS: those beyond count together, by their port alone, and leave room for others.
static __always_inline struct object_counters_t *counters_of(struct object_key_t *key)
{
    struct object_counters_t nothing = {}, *counters = objects.lookup(key);
    if (counters)
        return counters;
    u64 none = 0, *count = endpoints.lookup_or_try_init(&key->cgroup, &none);
    if (!count)
        return 0;
    if (*count < MAX_ENDPOINTS)
        __sync_fetch_and_add(count, 1);
    else
        __builtin_memset(key->peer.address, 0, sizeof(key->peer.address));
    return objects.lookup_or_try_init(key, &nothing);
}

static __always_inline void open(u64 sk, u64 owner, u64 now)
{
    struct connection_t connection = {.key.cgroup = owner, .sent = now, .read = word_at(sk + OFF_TCP_COPIED_SEQ)};
    if ((u16)word_at(sk + OFF_SK_PROTOCOL) != TCP_PROTOCOL || !peer_of(sk, &connection.key.peer))
        return;
    u32 flags = watched(&connection.key.peer);
    if (!flags)
        return;
    connection.handshake = flags == PEER_TLS;
    struct object_counters_t *counters = counters_of(&connection.key);
    if (!counters || connections.update(&sk, &connection)) {
        lose();
        return;
    }
    __sync_fetch_and_add(&counters->opened, 1);
}

// The answer to the request that ran is complete.
static __always_inline void settle(struct connection_t *connection)
{
    struct object_key_t key = connection->key;
    struct object_counters_t *counters = objects.lookup(&key);
    if (!connection->first || !counters)
        return;
    if (connection->handshake) {
        connection->handshake--;
        return;
    }
    u64 us = (connection->last - connection->sent) / NSEC_PER_USEC, bucket = log2_bucket(us);
    __sync_fetch_and_add(&counters->last_byte_us_squared, us * us);
    __sync_fetch_and_add(&counters->histogram[bucket], 1);
}

static __always_inline int sending(u64 sk)
{
    u64 owner = current_owner();
    if (!owner)
        return 0;
    u64 now = bpf_ktime_get_ns();
    struct connection_t *connection = connections.lookup(&sk);
    if (!connection) {
        open(sk, owner, now);
        return 0;
    }
    if (connection->sent && !connection->first)  // more of the same request
        return 0;
    settle(connection);
    connection->first = 0;
    connection->sent = now;
    return 0;
}

// Whether a socket was read to the end of its stream, which the peer has sent: that takes a sequence number as well.
static __always_inline int was_read_whole(u64 sk, u32 read)
{
    u32 state = (u8)word_at(sk + OFF_SK_STATE);
    return (1 << (state & 31) & TCP_PEER_ENDED) && read == word_at(sk + OFF_TCP_RCV_NXT);
}

// A call has `copied` bytes so far. It tells them anew each time that it waits for more (MSG_WAITALL, SO_RCVLOWAT), and
// one that looks ahead (MSG_PEEK) has bytes that the next will have too; so what counts is how far the socket was read.
static __always_inline u32 newly_read(u64 sk, struct connection_t *connection)
{
    u32 before = connection->read, bytes;
    connection->read = word_at(sk + OFF_TCP_COPIED_SEQ);
    bytes = connection->read - before;
    return bytes && was_read_whole(sk, connection->read) ? bytes - 1 : bytes;
}

static __always_inline int received(u64 sk, s64 copied)
{
    struct connection_t *connection = copied > 0 ? connections.lookup(&sk) : 0;
    u32 bytes = connection ? newly_read(sk, connection) : 0;
    if (!bytes || !connection->sent)
        return 0;
    u64 now = bpf_ktime_get_ns(), since = connection->first ? connection->last : connection->sent;
    struct object_key_t key = connection->key;
    struct object_counters_t *counters = connection->handshake ? 0 : objects.lookup(&key);
    if (counters) {
        __sync_fetch_and_add(&counters->bytes, bytes);
        __sync_fetch_and_add(&counters->last_byte_ns, now - since);
        if (!connection->first) {
            __sync_fetch_and_add(&counters->first_byte_ns, now - since);
            __sync_fetch_and_add(&counters->requests, 1);
        }
    }
    if (!connection->first)
        connection->first = now;
    connection->last = now;
    return 0;
}

// The end of a connection, or a new one at the address of one whose end was missed.
static __always_inline int closed(u64 sk)
{
    struct connection_t *connection = connections.lookup(&sk);
    if (!connection)
        return 0;
    settle(connection);
    struct object_key_t key = connection->key;
    struct object_counters_t *counters = objects.lookup(&key);
    if (!connections.delete(&sk) && counters)
        __sync_fetch_and_add(&counters->closed, 1);
    return 0;
}

KFUNC_PROBE(tcp_sendmsg, void *sk)
{
    return sending((u64)sk);
}

KFUNC_PROBE(tcp_cleanup_rbuf, void *sk, s32 copied)
{
    return received((u64)sk, copied);
}

int kprobe_tcp_sendmsg(struct pt_regs *ctx)
{
    return sending(PT_REGS_PARM1(ctx));
}

int kprobe_tcp_cleanup_rbuf(struct pt_regs *ctx)
{
    return received(PT_REGS_PARM1(ctx), (s32)PT_REGS_PARM2(ctx));
}

// sock_send_length and sock_recv_length(sk, result, flags): since Linux 6.3, after the call.
int raw_sent(struct bpf_raw_tracepoint_args *ctx)
{
    return (s32)ctx->args[1] > 0 ? sending(ctx->args[0]) : 0;
}

int raw_received(struct bpf_raw_tracepoint_args *ctx)
{
    return received(ctx->args[0], (s32)ctx->args[1]);
}

// inet_sock_set_state(sk, old, new)
int raw_state(struct bpf_raw_tracepoint_args *ctx)
{
    u32 state = ctx->args[2];
    return state == TCP_CLOSE_STATE || state == TCP_SYN_SENT_STATE ? closed(ctx->args[0]) : 0;
}
