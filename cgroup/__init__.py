"""cgroup v2 tree, io files, actuators, journal and guardian. Imports nothing else of prefetchd."""
