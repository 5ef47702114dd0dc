#!/bin/sh
# Builds the container image with whichever engine is here: buildah, podman or docker.
set -eu

HERE=$(cd "$(dirname "$0")" && pwd)
SOURCE=$(cd "$HERE/../.." && pwd)

usage() {
    cat <<'TEXT'
usage: build.sh [--engine buildah|podman|docker] [--tag NAME:TAG] [--base IMAGE] [--archive FILE] [--print]

  --engine    default: the first of the three that is installed
  --tag       default: prefetchd:VERSION
  --base      base image, default debian:bookworm-slim
  --archive   release archive, default: built now with package.py
  --print     print the engine's command line instead of running it

example: packaging/container/build.sh --engine podman --tag YOUR-REGISTRY/prefetchd:0.1.0
exit status: 0 built, 1 failed, 2 wrong usage
TEXT
}

fail() {
    echo "build.sh: $1" >&2
    exit "${2:-1}"
}

find_engine() {
    for name in buildah podman docker; do
        if command -v "$name" >/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "no buildah, podman or docker here; install one, or use rootfs.sh"
}

# podman and buildah keep the health check only in docker's image format.
build_command() {
    case $engine in
    buildah) echo "buildah build --format docker" ;;
    podman) echo "podman build --format docker" ;;
    docker) echo "docker build" ;;
    *) fail "unknown engine '$engine'; use buildah, podman or docker" 2 ;;
    esac
}

engine=
tag=
base=debian:bookworm-slim
archive=
run=
while [ $# -gt 0 ]; do
    case $1 in
    --engine | --tag | --base | --archive)
        [ $# -gt 1 ] || fail "option '$1' needs a value" 2
        case $1 in
        --engine) engine=$2 ;;
        --tag) tag=$2 ;;
        --base) base=$2 ;;
        --archive) archive=$2 ;;
        esac
        shift
        ;;
    --print) run=echo ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && fail "unknown option '$1'; see above" 2 ;;
    esac
    shift
done

engine=${engine:-$(find_engine)}
command=$(build_command)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$SOURCE/pyproject.toml")
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT INT TERM
if [ -z "$run" ]; then
    archive=${archive:-$("${PYTHON:-python3}" "$SOURCE/packaging/package.py" --output "$context/archive")}
    tar xf "$archive" -C "$context" --strip-components 1
fi
# shellcheck disable=SC2086  # the command has words
$run $command --tag "${tag:-prefetchd:$version}" --build-arg "BASE=$base" --file "$HERE/Containerfile" "$context"
