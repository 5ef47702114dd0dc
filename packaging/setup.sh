#!/bin/sh
# setup.sh run|test: install the Debian packages listed beside this script, create .venv and install the project.
# Running it again is quick and changes nothing: a stamp remembers the files it was made from.
set -eu

tier=${1:-run}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

lists=packaging/debian-run.txt
extras=
if [ "$tier" = test ]; then
    lists="$lists packaging/debian-test.txt"
    extras='[dev,kube,torch]'
fi
# shellcheck disable=SC2086  # two file names at most, without blanks
packages=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' $lists | sort -u | tr '\n' ' ')

fail() {
    echo "setup: $1" >&2
    exit "${2:-1}"
}

case $tier in run | test) ;; *) fail "unknown tier '$tier'; use run or test." 2 ;; esac

# shellcheck disable=SC2086
stamp=$(cat $lists pyproject.toml packaging/setup.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/prefetchd ] && [ "$(cat ".venv/stamp-$tier" 2>/dev/null)" = "$stamp $root" ]; then
    exit 0
fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    fail "this machine is not Debian-like; install the equivalents of: ${packages}and run again."
fi

sudo=
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "not root and no sudo; run as root once to install: $packages"
    sudo=sudo
fi

missing=
for package in $packages; do
    case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
    'install ok installed') ;;
    *) missing="$missing $package" ;;
    esac
done
if [ -n "$missing" ]; then
    echo "setup: installing Debian packages:$missing"
    # Servers that come with the packages (prometheus, NFS) stay off: policy-rc.d refuses to start them.
    policy=/usr/sbin/policy-rc.d
    made=
    if [ ! -e $policy ]; then
        made=yes
        printf '#!/bin/sh\nexit 101\n' | $sudo tee $policy >/dev/null
        $sudo chmod 755 $policy
        trap '$sudo rm -f $policy' EXIT INT TERM
    fi
    log=$(mktemp)
    # shellcheck disable=SC2086
    if ! { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail "apt-get failed (all of it in $log); mend the package sources and run again."
    fi
    rm -f "$log"
    if [ -n "$made" ]; then
        for unit in prometheus nfs-server rpcbind nfs-kernel-server; do
            case " $missing " in *" ${unit%-server}"*) $sudo systemctl disable "$unit" >/dev/null 2>&1 || true ;; esac
        done
    fi
fi

# One that was interrupted while it was made has a python, but no pip.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "setup: creating .venv from /usr/bin/python3 (with Debian's bcc)"
    /usr/bin/python3 -m venv --clear --system-site-packages .venv
fi
echo "setup: installing the project${extras:+ with $extras}"
log=$(mktemp)
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$extras" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "pip failed (all of it in $log); mend the network or the package index and run again."
fi
rm -f "$log"
# shellcheck disable=SC2086
echo "$stamp $root" >".venv/stamp-$tier"
if [ "$tier" = test ]; then
    echo "$(cat packaging/debian-run.txt pyproject.toml packaging/setup.sh | sha256sum | cut -d' ' -f1) $root" >.venv/stamp-run
fi
