// SPDX-License-Identifier: GPL-2.0
// The bios in flight of block.c: a table with eight places per bucket, found by the bio's address. Places are claimed and
// freed by compare-and-swap, which costs a tenth of a hash map's update and delete (measured: 20 against 200 ns).
//
// Any event can be missed: the kernel does not run a program that interrupts itself, nor, on some kernels, any program
// while a hidden task is current. A missed end shows when the bio's address is used again, when its bucket is full, or to
// user space by its age; it counts in `requests` and `bytes`, but has no time.

#define PLACES 8
#define NO_PLACE PLACES
#define STALE_NS 30000000000ull  // the block layer's own limit for a request (BLK_DEFAULT_RQ_TIMEOUT)

// Mirrored by BLOCK_RECORD in decode.py.
struct record_t {
    u64 submitted;  // 0 while the record is not complete
    u64 queued;
    u64 issued;
    u64 parent;  // of a piece: the bio that it was split from; slot, epoch and bytes are not set then
    u32 slot;
    u32 epoch;
    u64 bytes;
    s64 parts;  // pieces still to end, the bio itself included
    u64 unused;
};

struct bucket_t {
    u64 bio[PLACES];  // 0: free
};

struct flight_t {
    struct bucket_t *bucket;
    u32 index;  // of the bucket
    u32 place;
};

BPF_F_TABLE("array", u32, struct bucket_t, buckets, 1 << BUCKET_BITS, BPF_F_MMAPABLE);
BPF_F_TABLE("array", u32, struct record_t, records, PLACES << BUCKET_BITS, BPF_F_MMAPABLE);

static __always_inline struct record_t *record_at(u32 index, u32 place)
{
    u32 at = index * PLACES + place;
    return records.lookup(&at);
}

// The bucket of a bio and, where it is recorded, its place.
static __always_inline struct flight_t find(u64 bio)
{
    struct flight_t f;  // no initialiser: it would become a constant in memory, which BCC does not load
    f.place = NO_PLACE;
    f.index = (bio * 0x9e3779b97f4a7c15ull) >> (64 - BUCKET_BITS);
    f.bucket = buckets.lookup(&f.index);
    if (!f.bucket)
        return f;
#pragma unroll
    for (u32 i = 0; i < PLACES; i++)
        if (f.bucket->bio[i] == bio)
            f.place = i;
    return f;
}

static __always_inline struct record_t *find_record(u64 bio)
{
    struct flight_t f = find(bio);
    return f.place < PLACES ? record_at(f.index, f.place) : 0;
}

// Free the place of a bio; only one of several that try at once succeeds.
static __always_inline int release(struct flight_t *f, u64 bio)
{
    u32 place = f->place;
    return f->bucket && place < PLACES && __sync_val_compare_and_swap(&f->bucket->bio[place], bio, 0) == bio;
}

// The bio of this record has ended without being seen.
static __always_inline void count_missed(struct record_t *record)
{
    struct slot_t *s = record->parent ? 0 : slots.lookup(&record->slot);
    if (!s || s->epoch != record->epoch)
        return;
    __sync_fetch_and_add(&s->missed_bytes, record->bytes);
    __sync_fetch_and_add(&s->missed, 1);
}

// A bio starts at an address where an earlier one never ended: that one is over.
static __always_inline void forget(struct flight_t *f, u64 bio)
{
    struct record_t *record = f->place < PLACES ? record_at(f->index, f->place) : 0;
    if (!record)
        return;
    struct record_t old = *record;
    record->submitted = 0;
    if (release(f, bio))
        count_missed(&old);
}

static __always_inline u32 take_over_stale(struct flight_t *f, u64 bio, u64 now)
{
    for (u32 i = 0; i < PLACES; i++) {
        struct record_t *record = record_at(f->index, i);
        if (!record)
            return NO_PLACE;
        struct record_t old = *record;
        u64 holder = f->bucket->bio[i];
        if (!holder || !old.queued || old.submitted + STALE_NS > now)
            continue;
        if (__sync_val_compare_and_swap(&f->bucket->bio[i], holder, bio) != holder)
            continue;
        count_missed(&old);
        return i;
    }
    return NO_PLACE;
}

static __always_inline u32 claim(struct flight_t *f, u64 bio)
{
#pragma unroll
    for (u32 i = 0; i < PLACES; i++)
        if (!f->bucket->bio[i] && !__sync_val_compare_and_swap(&f->bucket->bio[i], 0, bio))
            return i;
    return NO_PLACE;
}

// Record a bio, which is in no place of its bucket.
static __always_inline void remember(struct control_t *c, struct flight_t *f, u64 bio, struct record_t *record)
{
    u32 place = claim(f, bio);
    if (place == NO_PLACE)
        place = take_over_stale(f, bio, record->submitted);
    struct record_t *mine = place < PLACES ? record_at(f->index, place) : 0;
    if (!mine) {
        __sync_fetch_and_add(&c->lost_in_flight, 1);
        return;
    }
    *mine = *record;
}
