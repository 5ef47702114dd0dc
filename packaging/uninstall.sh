#!/bin/sh
# Removes what install.sh put on the node, after every limit that prefetchd wrote has been released.
set -eu

PREFIX=/opt/prefetchd
CONFIG=/etc/prefetchd
UNIT=/etc/systemd/system/prefetchd.service
TMPFILES=/etc/tmpfiles.d/prefetchd.conf
LINK=/usr/local/bin/prefetchd
BASH_COMPLETION=/usr/local/share/bash-completion/completions/prefetchd
ZSH_COMPLETION=/usr/local/share/zsh/site-functions/_prefetchd
MANUAL=/usr/local/share/man/man8/prefetchd.8
MADE_FOLDERS=$PREFIX/share/made-folders
STATE=/run/prefetchd

usage() {
    cat <<'TEXT'
usage: uninstall.sh [--keep-config]

  --keep-config   leave /etc/prefetchd and the unit's drop-ins as they are

example: sudo /opt/prefetchd/share/uninstall.sh
exit status: 0 nothing is left, 1 limits could not be released (nothing was removed then), 2 wrong usage
TEXT
}

fail() {
    echo "uninstall.sh: $1" >&2
    exit "${2:-1}"
}

stop_service() {
    command -v systemctl >/dev/null || return 0
    if [ -d /run/systemd/system ]; then
        systemctl stop prefetchd.service 2>/dev/null || true
    fi
    systemctl disable --quiet prefetchd.service 2>/dev/null || true
}

release_limits() {
    [ -x "$PREFIX/bin/prefetchd" ] || return 0
    status=0
    "$PREFIX/bin/prefetchd" restore || status=$?
    # 3: this node has no cgroup v2 any more, so no limit can stand.
    [ "$status" = 0 ] || [ "$status" = 3 ] || fail "limits could not be released; see above, nothing was removed"
}

remove_files() {
    rm -f "$UNIT" "$TMPFILES" "$BASH_COMPLETION" "$ZSH_COMPLETION" "$MANUAL"
    rm -rf "$STATE"
    if [ "$(readlink "$LINK" 2>/dev/null)" = "$PREFIX/bin/prefetchd" ]; then
        rm -f "$LINK"
    fi
    [ "$keep_config" = yes ] || rm -rf "$CONFIG" "$UNIT.d"
    remove_folders
    rm -rf "$PREFIX"
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
        systemctl reset-failed prefetchd.service 2>/dev/null || true
    fi
}

# Only those that install.sh made, the deepest first, and none that holds something else by now.
remove_folders() {
    [ -e "$MADE_FOLDERS" ] || return 0
    tac "$MADE_FOLDERS" | while read -r folder; do
        rmdir "$folder" 2>/dev/null || true
    done
}

keep_config=no
while [ $# -gt 0 ]; do
    case $1 in
    --keep-config) keep_config=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && fail "unknown option '$1'; see above" 2 ;;
    esac
    shift
done

[ "$(id -u)" = 0 ] || fail "must run as root; use sudo"
stop_service
release_limits
remove_files
echo "prefetchd is removed"
