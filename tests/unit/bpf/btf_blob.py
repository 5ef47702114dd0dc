"""A small writer of BTF, for blobs with known contents (Documentation/bpf/btf.rst)."""

import struct

INT, PTR, ARRAY, STRUCT, UNION, ENUM, TYPEDEF, CONST = 1, 2, 3, 4, 5, 6, 8, 10
FUNC_PROTO, VAR, DATASEC, FLOAT, DECL_TAG, TYPE_TAG, ENUM64 = 13, 14, 15, 16, 17, 18, 19


class BlobWriter:
    """Collects types; each `add_*` gives the id of its type."""

    def __init__(self):
        self.strings = b"\0"
        self.types = b""
        self.count = self.first = 0

    def name(self, text):
        if not text:
            return 0
        at = self.first + len(self.strings)
        self.strings += text.encode() + b"\0"
        return at

    def add(self, kind, name="", *, entries=0, size_or_type=0, extra=b"", flag=0):
        info = flag << 31 | kind << 24 | entries
        self.types += struct.pack("=III", self.name(name), info, size_or_type) + extra
        self.count += 1
        return self.count

    def integer(self, name, size):
        return self.add(INT, name, size_or_type=size, extra=struct.pack("=I", size * 8))

    def pointer(self, target):
        return self.add(PTR, size_or_type=target)

    def array(self, element, length, index=1):
        return self.add(ARRAY, extra=struct.pack("=III", element, index, length))

    def record(self, name, size, members, kind=STRUCT, flag=0):
        """`members` are (name, type id, bit offset, bit-field width)."""
        extra = b"".join(
            struct.pack("=III", self.name(member), type_id, (width << 24 | bits) if flag else bits)
            for member, type_id, bits, width in members
        )
        return self.add(kind, name, entries=len(members), size_or_type=size, extra=extra, flag=flag)

    def enum(self, name, values, kind=ENUM):
        pack = {ENUM: lambda v: struct.pack("=I", v), ENUM64: lambda v: struct.pack("=II", v & 0xFFFFFFFF, v >> 32)}
        extra = b"".join(struct.pack("=I", self.name(key)) + pack[kind](value) for key, value in values.items())
        return self.add(kind, name, entries=len(values), size_or_type=8 if kind == ENUM64 else 4, extra=extra)

    def prototype(self, parameters):
        extra = b"".join(struct.pack("=II", 0, type_id) for type_id in parameters)
        return self.add(FUNC_PROTO, entries=len(parameters), extra=extra)

    def module(self):
        """A writer of a module's types, whose ids and string offsets go on where these end (split BTF)."""
        split = BlobWriter()
        split.count, split.first = self.count, len(self.strings)
        split.strings = b""
        return split

    def blob(self, magic=0xEB9F, version=1):
        header = struct.pack("=HBBIIIII", magic, version, 0, 24, 0, len(self.types), len(self.types), len(self.strings))
        return header + self.types + self.strings
