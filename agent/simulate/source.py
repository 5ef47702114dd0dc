"""Where a job's reads go: an extent of a device, behind the cgroup's throttle and, through a file system, the cache."""

from __future__ import annotations

from collections.abc import Callable

from agent.simulate.blk_throttle import Throttle
from agent.simulate.events import Events
from agent.simulate.page_cache import PageCache
from agent.simulate.requests import Account, Request, Stage


class Source:
    """The data of one cgroup on one device: `length` bytes from `offset`, in blocks of `read_size`.

    `device` is the name in samples (`maj:min`, or the mount). `cache` None means direct reads. `file` is the data's
    identity in the cache. `copy_seconds` is what a read from memory takes.
    """

    __slots__ = (
        "_entry",
        "_events",
        "_op",
        "account",
        "blocks",
        "cache",
        "copy_seconds",
        "device",
        "file",
        "missed_bytes",
        "offset",
        "read_bytes",
        "read_size",
        "remote",
        "throttle",
    )

    def __init__(
        self,
        events: Events,
        device: str,
        account: Account,
        target: Stage,
        *,
        offset: int,
        length: int,
        read_size: int,
        remote: bool = False,
        cache: PageCache | None = None,
        file: int = 0,
        copy_bytes_per_second: float = 2e9,
        writes: bool = False,
    ) -> None:
        self._events = events
        self.device = device
        self.account = account
        self.throttle = None if remote else Throttle(events, target)
        self._entry: Stage = self.throttle or target
        self.offset = offset
        self.read_size = read_size
        self.blocks = max(1, length // read_size)
        self.remote = remote
        self.cache = cache
        self.file = file
        self.copy_seconds = read_size / copy_bytes_per_second
        self._op = int(writes)
        self.read_bytes = 0
        self.missed_bytes = 0

    def transfer(self, block: int, done: Callable[[Request], None]) -> bool:
        """Read or write a block; False when the cache had it (then `done` is not called)."""
        block %= self.blocks
        if self.cache is not None:
            self.read_bytes += self.read_size
            if self.cache.look_up(self.file, block, self.read_size):
                return False
            self.missed_bytes += self.read_size
            self.cache.insert(self.file, block, self.read_size)
        request = Request(self.account, self._op, self.read_size, self.offset + block * self.read_size, done)
        request.submit(self._events.now)
        self._entry.accept(request)
        return True
