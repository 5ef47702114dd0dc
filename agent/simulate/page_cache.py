"""The page cache: blocks of files, least recently used out first, within the limit of a cgroup or of the node."""

from __future__ import annotations

from collections import OrderedDict


class PageCache:
    """Holds at most `capacity_bytes` of blocks; a block is (file, number) and has the size of one read.

    Not modelled: the kernel's two lists and refault distances (a scan evicts more here), writeback, readahead.
    """

    __slots__ = ("_blocks", "capacity_bytes", "hit_bytes", "missed_bytes", "used_bytes")

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.used_bytes = 0
        self.hit_bytes = 0
        self.missed_bytes = 0

    def look_up(self, file: int, block: int, size: int) -> bool:
        """Whether the block is here; one that is becomes the most recently used."""
        key = (file, block)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            self.hit_bytes += size
            return True
        self.missed_bytes += size
        return False

    def insert(self, file: int, block: int, size: int) -> None:
        """Add a block that was read; the oldest ones make room."""
        key = (file, block)
        self.used_bytes += size - self._blocks.pop(key, 0)
        self._blocks[key] = size
        while self.used_bytes > self.capacity_bytes and self._blocks:
            self.used_bytes -= self._blocks.popitem(last=False)[1]

    def drop(self, file: int) -> None:
        """Forget a file."""
        for key in [key for key in self._blocks if key[0] == file]:
            self.used_bytes -= self._blocks.pop(key)
