#!/bin/sh
# Installs prefetchd from an unpacked release archive, without a network: a virtual environment under /opt/prefetchd,
# the configuration, the systemd unit, the command's link, shell completions and the manual page. Run again to upgrade;
# a configuration that is there stays, and so does what --with-kube installed.
set -eu
# Whatever root's is: everybody may run `prefetchd top`.
umask 022

PREFIX=/opt/prefetchd
CONFIG=/etc/prefetchd
UNIT=/etc/systemd/system/prefetchd.service
TMPFILES=/etc/tmpfiles.d/prefetchd.conf
LINK=/usr/local/bin/prefetchd
BASH_COMPLETION=/usr/local/share/bash-completion/completions/prefetchd
ZSH_COMPLETION=/usr/local/share/zsh/site-functions/_prefetchd
MANUAL=/usr/local/share/man/man8/prefetchd.8
MADE_FOLDERS=$PREFIX/share/made-folders
HERE=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<'TEXT'
usage: install.sh [--with-kube] [--no-start | --program-only]

  --with-kube     also install what reads pod labels from the Kubernetes API server
  --no-start      install, but neither enable nor start the service
  --program-only  no systemd unit at all, for a container image

example: sudo ./install.sh --no-start && sudo prefetchd doctor
exit status: 0 installed, 1 something is missing or failed (the last line says what), 2 wrong usage
TEXT
}

fail() {
    echo "install.sh: $1" >&2
    exit "${2:-1}"
}

check_node() {
    [ "$(id -u)" = 0 ] || fail "must run as root; use sudo"
    [ -d "$HERE/wheels" ] || fail "no folder '$HERE/wheels'; run it from an unpacked release archive (make package)"
    /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "/usr/bin/python3 must be 3.11 or newer"
    /usr/bin/python3 -c 'from bcc import BPF' 2>/dev/null || fail "BCC is missing; run: apt-get install python3-bpfcc"
    /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || fail "venv is missing; run: apt-get install python3-venv"
}

stop_running() {
    # Files are not swapped under a running agent; ending it releases every limit.
    [ -d /run/systemd/system ] || return 0
    # One that is still compiling, or waits to be started again after a failure, is not `active`.
    case $(systemctl is-active prefetchd.service || true) in
    active | activating | deactivating | reloading) systemctl stop prefetchd.service ;;
    esac
}

# Makes a folder with its parents and notes which of them were not there, for uninstall.sh to take away again.
make_folder() {
    [ -n "$1" ] && [ ! -d "$1" ] || return 0
    make_folder "${1%/*}"
    echo "$1" >>"$MADE_FOLDERS"
    install -d -m 0755 "$1"
}

install_program() {
    extra=$1
    install -d -m 0755 "$PREFIX/share"
    [ -z "$(find "$PREFIX/lib" -maxdepth 3 -name lightkube 2>/dev/null)" ] || extra='[kube]'
    [ -z "$extra" ] || touch "$PREFIX/share/with-kube"
    [ ! -e "$PREFIX/share/with-kube" ] || extra='[kube]'
    # An environment of another Python version cannot be upgraded in place. `share` stays: whatever stops this half-way,
    # uninstall.sh is there, and knows what it has to take away.
    rm -rf "$PREFIX/bin" "$PREFIX/include" "$PREFIX/lib" "$PREFIX/lib64" "$PREFIX/pyvenv.cfg"
    /usr/bin/python3 -m venv --system-site-packages "$PREFIX"
    "$PREFIX/bin/pip" install --quiet --disable-pip-version-check --no-input --no-index --no-cache-dir \
        --find-links "$HERE/wheels" --constraint "$HERE/constraints.txt" "prefetchd$extra"
    install -m 0755 "$HERE/uninstall.sh" "$PREFIX/share/uninstall.sh"
    install -m 0644 "$HERE/README.md" "$HERE/runbook.md" "$HERE/prefetchd.toml" "$PREFIX/share/"
    ln -sfn "$PREFIX/bin/prefetchd" "$LINK"
}

install_help() {
    for file in "$BASH_COMPLETION" "$ZSH_COMPLETION" "$MANUAL"; do
        make_folder "${file%/*}"
    done
    "$PREFIX/bin/prefetchd" completion bash >"$BASH_COMPLETION"
    "$PREFIX/bin/prefetchd" completion zsh >"$ZSH_COMPLETION"
    "$PREFIX/bin/prefetchd" completion man >"$MANUAL"
    chmod 0644 "$BASH_COMPLETION" "$ZSH_COMPLETION" "$MANUAL"
}

install_config() {
    install -d -m 0755 "$CONFIG"
    # A link is the operator's too, wherever it leads and whether or not that is there now.
    if [ ! -e "$CONFIG/prefetchd.toml" ] && [ ! -L "$CONFIG/prefetchd.toml" ]; then
        install -m 0644 "$HERE/prefetchd.toml" "$CONFIG/prefetchd.toml"
    fi
}

install_unit() {
    make_folder "${UNIT%/*}"
    make_folder "${TMPFILES%/*}"
    install -m 0644 "$HERE/systemd/prefetchd.service" "$UNIT"
    install -m 0644 "$HERE/systemd/prefetchd.tmpfiles" "$TMPFILES"
    if command -v systemd-tmpfiles >/dev/null; then
        systemd-tmpfiles --create "$TMPFILES"
    else
        install -d -m 0755 /run/prefetchd
    fi
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
}

start_service() {
    command -v systemctl >/dev/null || fail "installed, but there is no systemd to start it; run: prefetchd run"
    systemctl enable --quiet prefetchd.service
    if [ -d /run/systemd/system ]; then
        # A predecessor that failed too often would be the reason not to start this one.
        systemctl reset-failed prefetchd.service 2>/dev/null || true
        systemctl restart prefetchd.service
        echo "prefetchd runs; next: prefetchd doctor, then curl http://127.0.0.1:9753/metrics"
    else
        echo "prefetchd is installed and starts at the next boot (systemd is not running here)"
    fi
}

extra=
then=start
while [ $# -gt 0 ]; do
    case $1 in
    --with-kube) extra='[kube]' ;;
    --no-start) then=stay ;;
    --program-only) then=end ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && fail "unknown option '$1'; see above" 2 ;;
    esac
    shift
done

check_node
stop_running
install_program "$extra"
install_config
[ "$then" != end ] || exit 0
install_unit
install_help
if [ "$then" = start ]; then
    start_service
else
    echo "prefetchd is installed, not started; next: prefetchd doctor, then systemctl enable --now prefetchd"
fi
