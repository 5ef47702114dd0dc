// SPDX-License-Identifier: GPL-2.0
// Which managed cgroup pays for what the current task does. Compiled in front of the programs that need it (owners.py).

#ifndef MAX_CGROUPS
#define MAX_CGROUPS 4096
#endif
#ifndef MAX_OWNERS
#define MAX_OWNERS 16384
#endif
#ifndef MAX_DEPTH
#define MAX_DEPTH 16
#endif

struct owner_t {
    u64 cgroup;  // the innermost managed ancestor, 0 where there is none
    u64 generation;
};

BPF_HASH(managed, u64, u32, MAX_CGROUPS);
BPF_TABLE("lru_hash", u64, struct owner_t, owners, MAX_OWNERS);
BPF_ARRAY(owners_generation, u64, 1);

// Managed cgroup of the current task or 0; one look-up where the same cgroup was seen before.
static __always_inline u64 current_owner(void)
{
    u32 zero = 0;
    u64 self = bpf_get_current_cgroup_id(), *generation = owners_generation.lookup(&zero);
    if (!generation)
        return 0;
    struct owner_t *known = owners.lookup(&self);
    if (known && known->generation == *generation)
        return known->cgroup;
    struct owner_t found = {.generation = *generation};
    for (u32 level = 0; level < MAX_DEPTH; level++) {
        u64 id = bpf_get_current_ancestor_cgroup_id(level);
        if (!id)
            break;
        if (managed.lookup(&id))
            found.cgroup = id;
    }
    owners.update(&self, &found);
    return found.cgroup;
}
