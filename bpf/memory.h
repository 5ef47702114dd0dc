// SPDX-License-Identifier: GPL-2.0
// Kernel memory at an address, 0 where it cannot be read. Compiled in front of the programs that need it; addresses come
// from offsets of the running kernel's BTF.

static __always_inline u64 pointer_at(u64 address)
{
    u64 value = 0;
    bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
    return value;
}

static __always_inline u32 word_at(u64 address)
{
    u32 value = 0;
    bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
    return value;
}
