"""Rearrangement on disks with moving parts: reading ahead for jobs that starve, making fragmented files contiguous.

The agent's side decides and watches; two helper processes do the work, each in a cgroup of its own, and tell the agent
through a socket (`process` at the agent's end, `child` at theirs). The policy says for whom.

| | reading ahead | making contiguous |
|---|---|---|
| in the agent, once a pass | `read_ahead` | `mending` |
| when to start and to stop (pure) | `stop` | `pay` |
| what to do next, and what to leave (pure) | `window`, `order`, `index` | `defragment` |
| the helper process | `helper`, with `follow` and `asker` for each job | `mover`, `move` |

Both helpers look through `files` at what jobs have open and through `places` at where that lies; `facts` is what the
mover asks besides. `metrics` shows what came of it.
"""
