#!/bin/sh
# enter_root.sh run COMMAND…: runs a command in the root file system $BASE/root, an overlay of $LOWER whose upper side is
#   $BASE/upper, $BASE/shared is /mnt there.
# enter_root.sh boot: starts the systemd of that root file system as process 1 of a container without a network.
# Called in a mount namespace of its own (for `boot` also in new pid, net, uts and ipc namespaces).
set -eu

mount_root() {
    mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$BASE/upper,workdir=$BASE/work" "$BASE/root"
    cd "$BASE/root"
    mount -t proc proc proc
    mount --rbind /dev dev
    mount -t tmpfs -o mode=0755 tmpfs run
    mount --bind "$BASE/shared" mnt
}

run_command() {
    mount_root
    mount --rbind /sys sys
    ip link set lo up
    for file in resolv.conf hosts; do
        touch etc/$file
        mount --bind /etc/$file etc/$file
    done
    exec chroot . "$@"
}

# Its own cgroup is the root of the tree that the container sees; the group goes with its last process (see roots.py).
boot() {
    mkdir -p "$CGROUP"
    echo 0 >"$CGROUP/cgroup.procs"
    exec unshare --cgroup --mount "$0" boot-in-cgroup
}

# What would set up the kernel and its devices: they are this machine's.
leave_the_machine_alone() {
    mkdir -p run/systemd/system
    for unit in systemd-udevd systemd-udev-trigger systemd-sysctl systemd-modules-load systemd-binfmt systemd-random-seed \
        systemd-remount-fs systemd-hwdb-update kmod-static-nodes systemd-tmpfiles-setup-dev systemd-timesyncd; do
        ln -s /dev/null "run/systemd/system/$unit.service"
    done
}

boot_in_cgroup() {
    mount_root
    mount -t sysfs sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    for folder in fs/bpf kernel/tracing kernel/debug; do
        mountpoint -q /sys/$folder && mount --bind /sys/$folder sys/$folder
    done
    mount --bind proc/sys proc/sys
    mount -o remount,ro,bind proc/sys
    leave_the_machine_alone
    ip link set lo up
    mkdir run/old
    pivot_root . run/old
    umount -l /run/old
    rmdir /run/old
    exec /usr/bin/env -i container=other PATH="$PATH" /lib/systemd/systemd --log-target=journal --show-status=no --unit=basic.target
}

case $1 in
run) shift && run_command "$@" ;;
boot) boot ;;
boot-in-cgroup) boot_in_cgroup ;;
esac
