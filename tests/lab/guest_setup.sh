# Sourced inside the guest: what every guest needs before the first command.
set_up() {
  # The boot mounted /proc, /sys, tracefs, debugfs, cgroup v2 and tmpfs on /run and /dev/shm; /tmp, /var, /etc and
  # /usr are overlays over the host's whose upper side is memory: writes end with the guest.
  modprobe --all --quiet nvme virtio_scsi sd_mod ext4
  ip link set lo up
  echo +cpu +io +memory +pids >/sys/fs/cgroup/cgroup.subtree_control
  mountpoint -q /sys/fs/bpf || mount -t bpf none /sys/fs/bpf
  mkdir -p /run/lab-home
  udevadm settle --timeout=10
}
