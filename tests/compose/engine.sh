#!/usr/bin/env bash
# A Docker engine on a machine that has none, in separate namespaces: no daemon, bridge, iptables
# rule or kernel module of the machine is touched. `make compose-test` uses it where none answers.
#   engine.sh up            make it (once, some 600 MB) and start it
#   engine.sh exec CMD...   run CMD in it: docker, docker compose
#   engine.sh online CMD... as exec, with package registries within reach, and only while CMD runs
#   engine.sh base          an image of Debian's packages, from which images/Dockerfile makes all
#   engine.sh down          stop it; its files stay
# STATE holds it; STATE/work is at the same path inside. Needs root and what `up` names.
set -euo pipefail
STATE=$(realpath -m "${STATE:-${XDG_CACHE_HOME:-$HOME/.cache}/relaunch/compose-test}")
SUITE=${SUITE:-forky}  # the first Debian with an engine of 28
ROOT=$STATE/$SUITE
here=$(dirname "$(realpath "$0")")
SEARCH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

fail() { echo "compose-test: $*" >&2; exit 2; }
pid() { cat "$STATE/pid" 2>/dev/null || true; }
alive() { local p; p=$(pid); [ -n "$p" ] && kill -0 "$p" 2>/dev/null; }
mirror() {
    sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb (\[[^]]*\] )?([^ ]+).*/\2/p' \
        /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v security | head -n 1
}
debian() { mmdebstrap --variant=minbase --quiet --aptopt='Acquire::Check-Valid-Until "false"' "$@"; }
inside() {
    nsenter -t "$(pid)" -m -p -n env -i PATH=$SEARCH HOME=/root BUILDKIT_PROGRESS=plain TERM=dumb \
        sh -c 'cd "$0" && exec "$@"' "$@"
}

# Runs as the first process of the namespaces.
start() {
    set -eu
    mount --make-rprivate /
    mount --bind "$1" "$1"
    mkdir -p "$1$3" "$1/oldroot"
    mount --bind "$3" "$1$3"
    mount -t proc proc "$1/proc"
    mount --rbind /sys "$1/sys"
    mount --rbind /dev "$1/dev"
    mount --bind "$2" "$1/run"
    cp /etc/resolv.conf "$1/etc/resolv.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"
    ip link set lo up
    cd "$1"
    pivot_root . oldroot
    umount -l /oldroot
    cd /
    PATH=$SEARCH exec dockerd
}

case "${1:-}" in
up)
    alive && exit 0
    [ "$(id -u)" = 0 ] || fail "no Docker engine answers, and to start one needs root"
    for program in mmdebstrap slirp4netns nsenter unshare ip; do
        command -v $program >/dev/null || fail "no Docker engine answers, and to start one needs" \
            "$program (apt-get install mmdebstrap slirp4netns util-linux iproute2)"
    done
    mkdir -p "$STATE/work"
    if ! [ -e "$ROOT/.made" ]; then
        rm -rf "$ROOT"
        packages=docker.io,docker-cli,docker-compose,docker-buildx,containerd,runc
        packages=$packages,iptables,iproute2,kmod,ca-certificates,procps
        debian --include=$packages "$SUITE" "$ROOT" "$(mirror)"
        touch "$ROOT/.made"
    fi
    rm -rf "$STATE/run"; mkdir -p "$STATE/run"
    setsid unshare --mount --net --pid --fork --kill-child \
        "$0" start "$ROOT" "$STATE/run" "$STATE/work" >"$STATE/dockerd.log" 2>&1 </dev/null &
    while kill -0 $! 2>/dev/null; do  # the child of unshare is the first process of the namespaces
        child=$(tr -d ' ' </proc/$!/task/$!/children 2>/dev/null) || true
        [ -z "$child" ] || echo "$child" >"$STATE/pid"
        [ -z "$child" ] || ! inside / docker info >/dev/null 2>&1 || exit 0
        sleep 0.3
    done
    fail "dockerd has ended: $(tail -n 3 "$STATE/dockerd.log")" ;;
start) shift; start "$@" ;;
exec) shift; alive || fail "the engine is not up"; inside "$PWD" "$@" ;;
online)
    shift; alive || fail "the engine is not up"
    slirp4netns --configure --mtu=1400 --disable-host-loopback "$(pid)" tap0 \
        >"$STATE/slirp.log" 2>&1 &
    slirp=$!
    trap 'kill $slirp 2>/dev/null || true; wait $slirp || true
          nsenter -t "$(pid)" -n ip link delete tap0 2>/dev/null || true' EXIT
    until nsenter -t "$(pid)" -n ip route | grep -q '^default'; do
        kill -0 $slirp 2>/dev/null || fail "slirp4netns has ended: $(tail -n 1 "$STATE/slirp.log")"
        sleep 0.1
    done
    inside "$PWD" "$@" ;;
base)
    alive || fail "the engine is not up"
    inside / docker image inspect debian:trixie-slim >/dev/null 2>&1 && exit 0
    debian --include=ca-certificates trixie "$STATE/base.tar" "$(mirror)"
    nsenter -t "$(pid)" -m -p -n docker import - debian:trixie-slim <"$STATE/base.tar" >/dev/null
    rm "$STATE/base.tar" ;;
down)
    alive || exit 0
    kill "$(pid)"
    while alive; do sleep 0.1; done
    rm -f "$STATE/pid" ;;
*) sed -n '2,9p' "$0"; exit 2 ;;
esac
