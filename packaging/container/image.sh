#!/bin/sh
# image.sh packages|program|tidy: the steps that make a bare Debian root file system into prefetchd's image. Run inside
# it, by the Containerfile or by rootfs.sh; /setup holds debian-run.txt and, for `program`, the release in /setup/release.
set -eu

SETUP=${SETUP:-/setup}
export DEBIAN_FRONTEND=noninteractive

install_packages() {
    apt-get update -qq
    # The headers come below, without the compiler that their package asks for; venv is needed for building only.
    wanted=$(sed -e 's/#.*//' "$SETUP/debian-run.txt" | grep -v -e '^linux-headers-' -e '^python3-venv$')
    # shellcheck disable=SC2086  # a list of package names
    apt-get install -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends $wanted >/dev/null
    unpack_headers
    forget_downloads
}

forget_downloads() {
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
}

# Any recent kernel's headers will do for compiling the probes, which take no struct layout from them; nodes often have none.
unpack_headers() {
    specific=$(dependency "linux-headers-$(dpkg --print-architecture)" 'linux-headers-[0-9]')
    common=$(dependency "$specific" 'linux-headers-.*-common')
    download=$(mktemp -d)
    (cd "$download" && apt-get download -qq -o APT::Sandbox::User=root "$specific" "$common")
    # Not into / itself: their ./lib folder would take the place of the link to usr/lib.
    for package in "$download"/*.deb; do
        dpkg --extract "$package" "$download/tree"
    done
    mkdir -p /usr/src
    cp -a "$download"/tree/usr/src/linux-headers-* /usr/src/
    rm -rf "$download"
}

dependency() {
    apt-cache depends "$1" | sed -n "s/^ *Depends: \($2.*\)$/\1/p" | head -n 1
}

install_program() {
    apt-get update -qq
    apt-get install -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends python3-venv >/dev/null
    "$SETUP/release/install.sh" --program-only --with-kube
    install -m 0644 "$SETUP/release/container/healthcheck.py" /opt/prefetchd/share/healthcheck.py
    /opt/prefetchd/bin/python -m pip uninstall --quiet --yes setuptools pip
}

tidy() {
    dpkg-query --show --showformat '${Package} ${Version}\n' >/opt/prefetchd/share/debian-packages.txt
    rm -rf "$SETUP"
    forget_downloads
}

case ${1:-} in
packages) install_packages ;;
program) install_program ;;
tidy) tidy ;;
*)
    echo "image.sh: unknown step '${1:-}'; use packages, program or tidy" >&2
    exit 2
    ;;
esac
