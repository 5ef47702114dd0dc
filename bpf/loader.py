"""The only place that knows BCC: headers, BTF offsets, compilation, attaching, maps.

A `Loader` is made once and lent to every probe; it owns what compiling needs (headers, mounts, BTF) and gives all of
it back on `close`. Features are tried, never asked for: each `attach_*` either attaches or raises `ProbeError` with one
sentence, and the probe goes down its ladder.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bpf.btf import BtfError, KernelBtf
from bpf.caught import Caught, caught_stderr
from bpf.headers import Headers, find_headers
from bpf.tracing import load_tracing, open_tracing

RUN = Path("/run/prefetchd")
HISTOGRAM_HEADER = Path(__file__).with_name("histogram.h")
MEMORY_HEADER = Path(__file__).with_name("memory.h")
TYPED_HEADER = Path(__file__).with_name("typed.h")
TRACEFS = Path("/sys/kernel/tracing")
DEBUGFS = Path("/sys/kernel/debug")

Macros = Mapping[str, int | str]


class ProbeError(RuntimeError):
    """A program cannot be compiled, loaded or attached here; the message is one sentence."""


class RefusedError(ProbeError):
    """The compiler or the kernel refuses a program; the message quotes what they said."""


class Loader:
    """Compiles program files for the running kernel.

    Not thread safe: BCC changes the working directory while it compiles, and the process's standard error is caught
    for that time unless `verbose`. `btf` answers questions about the running kernel's types; `mounted` lists the file
    systems that had to be mounted.
    """

    def __init__(self, *, verbose: bool = False, cache: Path | None = RUN) -> None:
        self.btf = KernelBtf(cache=cache)
        self.mounted: list[Path] = []
        self._verbose = verbose
        self._headers: Headers | None = None
        self._programs: list[Program] = []

    @property
    def headers(self) -> Headers:
        """The headers in use; ProbeError where there are none."""
        if self._headers is None:
            self._headers = find_headers()
        if self._headers is None:
            release = os.uname().release
            raise ProbeError(f"no kernel headers for {release}: install linux-headers-{release}, or any in /usr/src")
        return self._headers

    def load(self, source: Path, macros: Macros | None = None, shared: Sequence[Path] = ()) -> Program:
        """Compile a program file with macros defined; nothing is attached yet. ProbeError where it does not compile.

        `shared` files go before it: BCC knows maps only in the main file, so they cannot be included.
        """
        text = "".join(f'#line 1 "{path.name}"\n{path.read_text()}\n' for path in (*shared, source))
        if "tracepoint__" in text:
            self.require_tracefs()
        flags = ["-w", *(f"-D{name}={value}" for name, value in (macros or {}).items())]
        with self._compiler(), self.caught() as caught:
            try:
                bpf = _bcc_module()(text=text.encode(), cflags=flags)
            except Exception as error:  # bcc raises bare Exception
                raise RefusedError(f"cannot compile {source.name}: {caught.reason() or error}") from error
        program = Program(bpf, source.name, self)
        self._programs.append(program)
        return program

    def require_tracefs(self) -> None:
        """Mount tracefs where it is missing (containers, minimal systems)."""
        if (TRACEFS / "events").is_dir() or (DEBUGFS / "tracing/events").is_dir():
            return
        done = subprocess.run(
            ["mount", "-t", "tracefs", "none", str(TRACEFS)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ProbeError(f"cannot mount tracefs on {TRACEFS}: {done.stderr.strip()}; run as root")
        self.mounted.append(TRACEFS)

    def tracepoint_exists(self, name: str) -> bool:
        """Whether the kernel, with the modules loaded now, has the tracepoint `category:event`."""
        return bool(self._tracepoint_format(name))

    def tracepoint_has_field(self, name: str, field: str) -> bool:
        """Whether the tracepoint `category:event` exists and has a field of that name."""
        declared = (line.partition(";")[0].split() for line in self._tracepoint_format(name).splitlines())
        return any(words[:1] and words[0].startswith("field:") and words[-1] == field for words in declared)

    def _tracepoint_format(self, name: str) -> str:
        self.require_tracefs()
        for root in (TRACEFS, DEBUGFS / "tracing"):
            with contextlib.suppress(OSError):
                return (root / "events" / name.replace(":", "/") / "format").read_text()
        return ""

    def caught(self) -> contextlib.AbstractContextManager[Caught]:
        """Standard error of the C libraries, caught unless verbose."""
        return caught_stderr(self._verbose)

    @contextlib.contextmanager
    def _compiler(self) -> Iterator[None]:
        """BCC takes the place of borrowed headers from the environment."""
        tree, before = self.headers.tree, os.environ.get("BCC_KERNEL_SOURCE")
        if tree is not None:
            os.environ["BCC_KERNEL_SOURCE"] = str(tree)
        try:
            yield
        finally:
            os.environ.pop("BCC_KERNEL_SOURCE", None)
            if before is not None:
                os.environ["BCC_KERNEL_SOURCE"] = before

    def close(self) -> None:
        """Close every program, remove borrowed headers, unmount what was mounted. May be called twice."""
        for program in self._programs:
            program.close()
        self._programs.clear()
        if self._headers is not None:
            self._headers.remove()
            self._headers = None
        while self.mounted:
            subprocess.run(["umount", str(self.mounted.pop())], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Program:
    """One compiled program file: its functions, to be attached one by one, and its maps."""

    def __init__(self, bpf: Any, name: str, loader: Loader) -> None:
        self._bpf = bpf
        self._name = name
        self._loader = loader
        self._views: list[mmap.mmap] = []
        self._deliveries = 0
        self._detach: dict[str, Callable[[], object]] = {}
        self._attached_by: dict[str, Callable[[], object]] = {}

    @property
    def attached(self) -> tuple[str, ...]:
        """What is attached now: `raw_tracepoint:block_rq_issue`, and so on."""
        return tuple(self._detach)

    def attach_tracepoint(self, name: str, function: str) -> None:
        """Attach to the tracepoint `category:event`."""
        self._loader.require_tracefs()
        self._attach(
            f"tracepoint:{name}",
            lambda: self._bpf.attach_tracepoint(tp=name.encode(), fn_name=function.encode()),
            lambda: self._bpf.detach_tracepoint(name.encode()),
        )

    def attach_raw_tracepoint(self, name: str, function: str) -> None:
        """Attach to the raw tracepoint `event`, whose arguments are the kernel's own pointers."""
        self._attach(
            f"raw_tracepoint:{name}",
            lambda: self._bpf.attach_raw_tracepoint(tp=name.encode(), fn_name=function.encode()),
            lambda: self._bpf.detach_raw_tracepoint(name.encode()),
        )

    def attach_btf_tracepoint(self, name: str, function: str) -> None:
        """Attach to the tracepoint `event` with BTF: what the function is called with has types (typed.h)."""
        opened: list[int] = []
        self._attach(
            f"btf_tracepoint:{name}",
            lambda: opened.append(open_tracing(self._load_tracing(name, function))),
            lambda: os.close(opened.pop()),
        )

    def _load_tracing(self, name: str, function: str) -> int:
        known = self._bpf.funcs.get(function.encode())
        if known is not None:
            return int(known.fd)
        code = self._bpf.dump_func(function.encode())
        fd = load_tracing(function, code, self._loader.btf.tracepoint_type(name))
        self._bpf.funcs[function.encode()] = self._bpf.Function(self._bpf, function.encode(), fd)
        return fd

    def attach_fentry(self, kernel_function: str) -> None:
        """Attach the program written as `KFUNC_PROBE(kernel_function, …)`."""
        name = self._trampoline("kfunc", kernel_function)
        self._attach(
            f"fentry:{kernel_function}",
            lambda: self._bpf.attach_kfunc(fn_name=name),
            lambda: self._bpf.detach_kfunc(name),
        )

    def attach_fexit(self, kernel_function: str) -> None:
        """Attach the program written as `KRETFUNC_PROBE(kernel_function, …)`."""
        name = self._trampoline("kretfunc", kernel_function)
        self._attach(
            f"fexit:{kernel_function}",
            lambda: self._bpf.attach_kretfunc(fn_name=name),
            lambda: self._bpf.detach_kretfunc(name),
        )

    def attach_kprobe(self, kernel_function: str, function: str) -> None:
        """Attach to the entry of a kernel function."""
        self._attach(
            f"kprobe:{kernel_function}",
            lambda: self._bpf.attach_kprobe(event=kernel_function.encode(), fn_name=function.encode()),
            lambda: self._bpf.detach_kprobe(kernel_function.encode(), function.encode()),
        )

    def attach_kretprobe(self, kernel_function: str, function: str) -> None:
        """Attach to the return of a kernel function."""
        self._attach(
            f"kretprobe:{kernel_function}",
            lambda: self._bpf.attach_kretprobe(event=kernel_function.encode(), fn_name=function.encode()),
            lambda: self._bpf.detach_kretprobe(kernel_function.encode(), function.encode()),
        )

    def attach_uprobe(self, binary: Path, symbol: str, function: str, *, pid: int = -1) -> None:
        """Attach to the entry of a user-space function, in one process or (-1) in all."""
        self._attach(
            f"uprobe:{binary}:{symbol}:{pid}",
            lambda: self._bpf.attach_uprobe(
                name=str(binary).encode(), sym=symbol.encode(), fn_name=function.encode(), pid=pid
            ),
            lambda: self._bpf.detach_uprobe(name=str(binary).encode(), sym=symbol.encode(), pid=pid),
        )

    def attach_uretprobe(self, binary: Path, symbol: str, function: str, *, pid: int = -1) -> None:
        """Attach to the return of a user-space function, in one process or (-1) in all."""
        self._attach(
            f"uretprobe:{binary}:{symbol}:{pid}",
            lambda: self._bpf.attach_uretprobe(
                name=str(binary).encode(), sym=symbol.encode(), fn_name=function.encode(), pid=pid
            ),
            lambda: self._bpf.detach_uretprobe(name=str(binary).encode(), sym=symbol.encode(), pid=pid),
        )

    def _trampoline(self, kind: str, kernel_function: str) -> bytes:
        """Name of the program that KFUNC_PROBE or KRETFUNC_PROBE makes: BCC 0.27 put the module into it."""
        name = f"{kind}__vmlinux__{kernel_function}".encode()
        try:
            self._bpf.dump_func(name)
        except Exception:  # noqa: BLE001  # bcc raises bare Exception
            return f"{kind}__{kernel_function}".encode()
        return name

    def _attach(self, target: str, attach: Callable[[], object], detach: Callable[[], object]) -> None:
        if target in self._detach:
            raise ProbeError(f"{target} is already attached by {self._name}")
        with self._loader.caught() as caught:
            try:
                attach()
            except Exception as error:  # bcc raises bare Exception
                raise RefusedError(f"cannot attach {self._name} to {target}: {caught.reason() or error}") from error
        self._detach[target], self._attached_by[target] = detach, attach

    def detach(self, target: str) -> None:
        """Detach one of `attached`; what is not attached is left alone."""
        if detach := self._detach.pop(target, None):
            with self._loader.caught(), contextlib.suppress(Exception):  # gone with its module or file: detached
                detach()

    def detach_all(self) -> None:
        """Detach everything; maps keep their contents."""
        for target in self.attached:
            self.detach(target)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Everything is detached within; what happens meanwhile is missed."""
        again = [(target, self._attached_by[target], self._detach[target]) for target in self.attached]
        self.detach_all()
        try:
            yield
        finally:
            for target, attach, detach in again:
                self._attach(target, attach, detach)

    def run_statistics(self) -> dict[str, tuple[int, int]]:
        """By loaded function: runs and ns, as far as kernel.bpf_stats_enabled was on (proc_pid_fdinfo(5))."""
        found = {}
        for name, function in self._bpf.funcs.items():
            lines = Path(f"/proc/self/fdinfo/{function.fd}").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            found[name.decode()] = int(fields["run_cnt"]), int(fields["run_time_ns"])
        return found

    def map(self, name: str) -> Any:
        """BCC's table object of a map."""
        return self._bpf[name.encode()]

    def map_fd(self, name: str) -> int:
        """File descriptor of a map, valid until `close`."""
        return int(self.map(name).map_fd)

    def view(self, name: str, length: int) -> mmap.mmap:
        """Memory of a BPF_F_MMAPABLE array map of `length` bytes, shared with the kernel."""
        pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            view = mmap.mmap(self.map_fd(name), pages, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise RefusedError(f"cannot map {name} of {self._name} into memory: {error.strerror}") from error
        self._views.append(view)
        return view

    def open_ring(self, name: str, callback: Callable[[int], object]) -> None:
        """Send each record of a ring buffer to `callback(address)` when `drain_rings` is called."""

        def deliver(_context: object, data: int, _size: int) -> int:
            callback(data)
            self._deliveries -= 1
            return 0 if self._deliveries > 0 else -1  # libbpf stops behind this record

        self.map(name).open_ring_buffer(deliver)

    def drain_rings(self, most: int) -> None:
        """Deliver what the ring buffers hold, without waiting, at most so many records: they may fill as fast."""
        self._deliveries = most
        self._bpf.ring_buffer_consume()

    def close(self) -> None:
        """Detach, unmap and free; harmless when repeated."""
        if self._bpf is None:
            return
        self.detach_all()
        for view in self._views:
            with contextlib.suppress(BufferError):  # a numpy view still refers to it: freed with that
                view.close()
        with self._loader.caught(), contextlib.suppress(Exception):  # where a signal broke off a detach, it fails again
            self._bpf.cleanup()
        atexit.unregister(self._bpf.cleanup)
        self._bpf = None


def _bcc_module() -> Any:
    """BCC's class, told to attach nothing by itself; imported late, since it brings LLVM with it (some 100 MB)."""
    try:
        import bcc  # noqa: PLC0415
    except ImportError as error:
        raise ProbeError(
            f"BCC cannot be imported ({error}): install python3-bpfcc and use /usr/bin/python3's environment"
        ) from error

    class Module(bcc.BPF):  # type: ignore[misc]
        def _trace_autoload(self) -> None:
            """Which functions are attached, and in which order, is the probe's decision."""

    return Module


__all__ = ["BtfError", "Loader", "ProbeError", "Program"]
