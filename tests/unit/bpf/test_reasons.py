"""Why a probe sees less: the clause for people and what the tools said are kept apart."""

from bpf.btf import BtfError
from bpf.loader import ProbeError, RefusedError
from bpf.reasons import NONE_TAKEN, failed, partly

REFUSAL = "cannot attach block.c to fentry:bio_endio: bpf: Failed to load program: Operation not permitted"


def test_what_compiler_and_kernel_said_is_detail():
    assert failed(RefusedError("cannot compile nfs.c: no")) == (NONE_TAKEN, "cannot compile nfs.c: no")
    assert failed(RefusedError("last"), ["first"]) == (NONE_TAKEN, "first; last")


def test_our_own_sentences_are_the_reason():
    assert failed(BtfError("this kernel's BTF has no 'bio.bi_bdev'")) == ("this kernel's BTF has no 'bio.bi_bdev'", "")
    assert failed(ProbeError("no tier works here"), [REFUSAL]) == ("no tier works here", REFUSAL)


def test_a_part_tells_what_it_does_not_see():
    assert partly("stalls are seen on the pipes only", [REFUSAL, "b"]) == (
        "stalls are seen on the pipes only",
        f"{REFUSAL}; b",
    )
    assert partly("stalls are seen on the pipes only", []) == ("stalls are seen on the pipes only: asked for", "")
