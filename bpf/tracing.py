"""Programs attached to tracepoints with BTF (`tp_btf`), which BCC cannot load: their arguments have types.

The system call bpf(2) itself, with the layouts of include/uapi/linux/bpf.h; Linux 5.5 and later.
"""

from __future__ import annotations

import ctypes
import os
import platform

_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_PROG_LOAD, _RAW_TRACEPOINT_OPEN = 5, 17
_TYPE_TRACING, _ATTACH_RAW_TRACEPOINT = 26, 23
_INSTRUCTION_BYTES = 8
_LOG_BYTES = 1 << 20


class _Load(ctypes.Structure):
    """The part of union bpf_attr that BPF_PROG_LOAD reads, up to attach_btf_id."""

    _fields_ = (
        ("prog_type", ctypes.c_uint32),
        ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64),
        ("kern_version", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_name", ctypes.c_char * 16),
        ("prog_ifindex", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32),
        ("func_info_rec_size", ctypes.c_uint32),
        ("func_info", ctypes.c_uint64),
        ("func_info_cnt", ctypes.c_uint32),
        ("line_info_rec_size", ctypes.c_uint32),
        ("line_info", ctypes.c_uint64),
        ("line_info_cnt", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
    )


class _Open(ctypes.Structure):
    """The part of union bpf_attr that BPF_RAW_TRACEPOINT_OPEN reads."""

    _fields_ = (("name", ctypes.c_uint64), ("prog_fd", ctypes.c_uint32), ("unused", ctypes.c_uint32))


def load_tracing(name: str, code: bytes, type_id: int) -> int:
    """Load a program for the tracepoint whose BTF typedef `btf_trace_NAME` has this id; gives its file descriptor.

    OSError with the last line of the verifier where the kernel refuses it.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    text, log = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(_LOG_BYTES)
    asked = _Load(
        prog_type=_TYPE_TRACING,
        insn_cnt=len(code) // _INSTRUCTION_BYTES,
        insns=ctypes.addressof(instructions),
        license=ctypes.addressof(text),
        prog_name=name.encode()[:15],
        expected_attach_type=_ATTACH_RAW_TRACEPOINT,
        attach_btf_id=type_id,
    )
    try:
        return _bpf(_PROG_LOAD, asked)
    except OSError as error:  # once more for the reason: with a log the kernel takes longer
        asked.log_level, asked.log_size, asked.log_buf = 1, _LOG_BYTES, ctypes.addressof(log)
        try:
            return _bpf(_PROG_LOAD, asked)
        except OSError:
            lines = [line for line in log.value.decode(errors="replace").splitlines() if line.strip()]
            telling = [line for line in lines if not line.startswith("processed ")]
            raise OSError(error.errno, telling[-1] if telling else os.strerror(error.errno or 0)) from None


def open_tracing(program: int) -> int:
    """Attach a program that `load_tracing` gave; it runs until the descriptor is closed. OSError where it cannot."""
    return _bpf(_RAW_TRACEPOINT_OPEN, _Open(prog_fd=program))


def _bpf(command: int, attributes: ctypes.Structure) -> int:
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(0, f"the number of bpf(2) is not known for {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    result = int(call(number, command, ctypes.byref(attributes), ctypes.sizeof(attributes)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
