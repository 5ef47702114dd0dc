#!/bin/sh
# Makes the image's root file system in a folder, without a container engine: debootstrap, then the steps of image.sh.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
SOURCE=$(cd "$HERE/../.." && pwd)

usage() {
    cat <<'TEXT'
usage: rootfs.sh [--archive FILE] [--mirror URL] DIR

  --archive   release archive, default: built now with package.py
  --mirror    Debian mirror, default: debootstrap's own

example: sudo packaging/container/rootfs.sh /var/tmp/prefetchd-root
exit status: 0 built, 1 failed, 2 wrong usage
TEXT
}

fail() {
    echo "rootfs.sh: $1" >&2
    exit "${2:-1}"
}

archive=
mirror=
root=
while [ $# -gt 0 ]; do
    case $1 in
    --archive | --mirror)
        [ $# -gt 1 ] || fail "option '$1' needs a value" 2
        [ "$1" = --archive ] && archive=$2 || mirror=$2
        shift
        ;;
    -h | --help) usage && exit 0 ;;
    -*) usage >&2 && fail "unknown option '$1'; see above" 2 ;;
    *) root=$1 ;;
    esac
    shift
done
[ -n "$root" ] || { usage >&2 && fail "no folder given; see above" 2; }
[ "$(id -u)" = 0 ] || fail "must run as root; use sudo"
command -v debootstrap >/dev/null || fail "debootstrap is missing; run: apt-get install debootstrap"
[ ! -e "$root" ] || [ -z "$(ls -A "$root")" ] || fail "folder '$root' is not empty; give a new one"

# A mount namespace of its own: whatever is mounted for the steps is gone when they end.
if [ "${IN_NAMESPACE:-}" != yes ]; then
    mkdir -p "$root"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT INT TERM
    archive=${archive:-$("${PYTHON:-python3}" "$SOURCE/packaging/package.py" --output "$scratch")}
    IN_NAMESPACE=yes unshare --mount --propagation private "$0" --archive "$archive" ${mirror:+--mirror "$mirror"} "$root"
    exit 0
fi

# shellcheck disable=SC2086  # no mirror means no argument
debootstrap --variant=minbase bookworm "$root" $mirror >"$root.log" 2>&1 || fail "debootstrap failed; see $root.log"
rm -f "$root.log"
mkdir -p "$root/setup/release"
tar xf "$archive" -C "$root/setup/release" --strip-components 1
cp "$root/setup/release/debian-run.txt" "$HERE/image.sh" "$root/setup/"
mount -t proc proc "$root/proc"
for step in packages program; do
    chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root /bin/sh /setup/image.sh "$step"
done
chroot "$root" apt-get purge -qq -y -o Dpkg::Use-Pty=0 --autoremove python3-venv >/dev/null
chroot "$root" /bin/sh /setup/image.sh tidy
umount "$root/proc"
echo "$root"
