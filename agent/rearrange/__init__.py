"""Rearrangement on disks with moving parts: reading ahead for jobs that starve, making fragmented files contiguous.

The agent's side decides and watches (`read_ahead`, `mending`, on the pure `stop` and `pay`); two helper processes do
the work (`helper` reads ahead, `mover` moves files), each in a cgroup of its own, and tell the agent through a socket
(`process`, `child`).
"""
