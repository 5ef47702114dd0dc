#!/bin/sh
# The life of the image on a node: mounted as the chart does, asked by `doctor`, run for $SECONDS_TO_RUN and asked by the
# health check meanwhile, restored as before its end. Called in mount and net namespaces of its own.
#   $ROOT    the image's root file system;  $POINT  an empty folder to mount it at
#   $LAYER   where given: what the image adds to $ROOT, which is then this machine's own but for the folder $HIDDEN
#   $ENTRYPOINT $CMD $HEALTHCHECK  as the Containerfile gives them
set -eu

mount_root() {
    mount --bind "$ROOT" "$POINT"
    mount -o remount,ro,bind "$POINT"
}

mount_own_root_and_layer() {
    mount -t tmpfs tmpfs "$POINT"
    mkdir "$POINT/upper" "$POINT/work" "$POINT/root"
    mount -t overlay -o "lowerdir=$ROOT,upperdir=$POINT/upper,workdir=$POINT/work" overlay "$POINT/root"
    POINT=$POINT/root
    [ ! -d "$POINT$HIDDEN" ] || mount -t tmpfs tmpfs "$POINT$HIDDEN"
    for folder in "$LAYER"/*/*; do
        added=$POINT${folder#"$LAYER"}
        mkdir -p "$added"
        mount --bind "$folder" "$added"
        mount -o remount,ro,bind "$added"
    done
    mount -o remount,ro "$POINT"
}

mount_pod() {
    if [ -n "${LAYER:-}" ]; then mount_own_root_and_layer; else mount_root; fi
    mount --rbind /sys "$POINT/sys"
    mount --rbind -o ro /dev "$POINT/dev"
    mount -t proc proc "$POINT/proc"
    mount -t tmpfs tmpfs "$POINT/run"
    mount -t tmpfs tmpfs "$POINT/tmp"
    ip link set lo up
}

inside() {
    chroot "$POINT" /usr/bin/env -i PATH=/usr/sbin:/usr/bin "$@"
}

wait_until_well() {
    for _ in $(seq 600); do
        kill -0 "$1" || return 1
        inside $HEALTHCHECK && return 0
        sleep 0.5
    done
}

# shellcheck disable=SC2086  # the commands have words
mount_pod
! inside /usr/bin/touch /opt/prefetchd/x 2>/dev/null || echo "the root can be written"
status=0
inside $ENTRYPOINT doctor || status=$?
echo "doctor: $status"
inside $ENTRYPOINT $CMD --duration "$SECONDS_TO_RUN" &
wait_until_well $! && echo "health check: 0"
status=0
wait $! || status=$?
echo "run: $status"
inside $ENTRYPOINT restore
echo "restore: $?"
