# Sourced inside the guest: what every guest needs before the first command. Uses the folders PROJECT, CACHE and, where set, WRITABLE.

set_up() {
  # The boot mounted /proc, /sys, tracefs, debugfs, cgroup v2 and tmpfs on /run and /dev/shm; /tmp, /var and /etc are
  # overlays over the host's whose upper side is memory: writes end with the guest.
  modprobe --all --quiet nvme virtio_scsi sd_mod ext4
  cache_reads
  ip link set lo up
  echo +cpu +io +memory +pids >/sys/fs/cgroup/cgroup.subtree_control
  mountpoint -q /sys/fs/bpf || mount -t bpf none /sys/fs/bpf
  mkdir -p /run/lab-home
  udevadm settle --timeout=10
}

# The root's 9p mount asks the host for every page again. The same tree, mounted once more with a cache, makes
# programs start in half the time; what is below /usr, the project and the cache is read-only.
cache_reads() {
  mkdir /run/lab-root /run/lab-writable
  mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000,access=any lab-root /run/lab-root || return
  [ -z "$WRITABLE" ] || mount --bind "$WRITABLE" /run/lab-writable
  mount --bind /run/lab-root/usr /usr
  mount --bind "/run/lab-root$PROJECT" "$PROJECT"
  mount --bind "/run/lab-root$CACHE" "$CACHE"
  [ -z "$WRITABLE" ] || mount --bind /run/lab-writable "$WRITABLE" # it may lie in the project
}
