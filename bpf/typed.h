// SPDX-License-Identifier: GPL-2.0
// Fields of kernel structs behind a pointer whose type the verifier may know. Compiled in front of the programs that need
// it, after memory.h.
//
// Arguments of traced functions and of tracepoints attached with BTF are typed, and so is every pointer read through one:
// a field is one load, where reading it through a helper costs some 25 ns. `typed` is a constant of the program; where it
// is 0 pointers are plain numbers. The verifier allows no hash of a typed pointer, but the difference of two pointers is a
// number: with the address of a map's element, which that element holds, it gives the pointer's own.

#define LOAD_FROM(type, base, offset)                                                                                  \
    ({                                                                                                                 \
        u64 loaded_;                                                                                                   \
        asm volatile("%0 = *(" type " *)(%1 + %2)" : "=r"(loaded_) : "r"(base), "i"(offset));                          \
        loaded_;                                                                                                       \
    })

#define POINTER_IN(typed, base, offset) ((typed) ? LOAD_FROM("u64", base, offset) : pointer_at((base) + (offset)))
#define HALF_IN(typed, base, offset) ((typed) ? (u16)LOAD_FROM("u16", base, offset) : (u16)word_at((base) + (offset)))
#define WORD_IN(typed, base, offset) ((typed) ? (u32)LOAD_FROM("u32", base, offset) : word_at((base) + (offset)))

static __always_inline u64 number_of(int typed, void *element, u64 address_of_element, u64 pointer)
{
    if (!typed)
        return pointer;
    u64 difference;
    asm volatile("%0 = %1\n\t%0 -= %2" : "=&r"(difference) : "r"(pointer), "r"(element));
    return difference + address_of_element;
}
