// SPDX-License-Identifier: GPL-2.0
// Histograms of times. Compiled in front of the programs that need it; mirrored by HISTOGRAM_BUCKETS in samples.py.

#define HISTOGRAM_BUCKETS 32

// The verifier of Linux 6.1 forgets the bound of a register that was copied; a mask it cannot lose, and the barrier
// keeps the compiler from leaving the mask out as superfluous.
static __always_inline u64 bounded(u64 bucket)
{
    asm volatile("" : "+r"(bucket));
    return bucket & (HISTOGRAM_BUCKETS - 1);
}

// Histogram bucket of a time: floor of the binary logarithm of its microseconds, 0 for 0. Counts the bits below the
// highest one, free of branches, since the verifier follows every path of every loop.
static __always_inline u64 log2_bucket(u64 us)
{
    u32 v = us >> 32 ? ~0u : us;
    v |= v >> 1;
    v |= v >> 2;
    v |= v >> 4;
    v |= v >> 8;
    v |= v >> 16;
    v >>= 1;
    v -= (v >> 1) & 0x55555555;
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333);
    v = (v + (v >> 4)) & 0x0f0f0f0f;
    return bounded((v * 0x01010101) >> 24);
}
