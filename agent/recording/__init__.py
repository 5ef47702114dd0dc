"""Recordings: what the agent saw and decided, in a compact file that survives being torn.

The file is a row of frames. Each frame is

    4 bytes  length of the payload, little-endian
    4 bytes  CRC-32 of the payload (zlib's), little-endian
    payload  1 byte kind, then the contents

Kind 1, head: MessagePack map with `format` ("prefetchd"), `version` (2), `software`, `started` (Unix seconds),
`policy`, `mode` and `config` (the configuration in force). A head begins a segment: each start of the agent appends
one, and nothing that follows needs what stood before it.

Kind 2, passes: a piece of one zlib stream per segment, ended by a sync flush. Uncompressed it is a MessagePack array
of passes of the loop, each an array itself:

    [time, wall, names, ids, values, gone, events, jobs, devices]

`time` is CLOCK_MONOTONIC in seconds (float), `wall` Unix time in ms less that of the pass before (the first: in full).
`names` are the paths of values seen for the first time in this segment; a path's id is its place in the order of
appearance. `ids` and `values` say what changed: where old and new value are both integers the value is the difference,
else it is the new value. `gone` are ids of values that are no more. `events` are [job, stream, iterations] with
iterations as [time_ns less that of the sample, wait_ns, depth, takeable]. `jobs` and `devices` are written when they
change.

Paths begin with `i` (input: counters of a job, exact), `o` (output: what was made of them, rounded to the scale in
`agent.recording.outputs`), `n` (of the node). Inputs are written at every pass, outputs of a job at the end of its
iterations, at least once a second. So a replay runs on exactly what the agent had.

Version 1 had no `takeable`, in streams and iterations: there the depth stands for it, as when it was written.

A frame that is cut short, or whose CRC is wrong, makes what is left of its segment unreadable; all before it is good,
and reading goes on at the next head. So a file that was torn is continued at its very end, and nothing is cut off.
"""

from agent.recording.reader import Moment, RecordingError, Segment, read
from agent.recording.recorder import Recorder, refuse_other_file

__all__ = ["Moment", "Recorder", "RecordingError", "Segment", "read", "refuse_other_file"]
