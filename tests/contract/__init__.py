"""One suite over every implementation of the cgroup files: the fake in memory and the kernel's."""
