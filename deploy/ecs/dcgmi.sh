#!/bin/sh
# dcgmi of the node image. It needs a host engine, and the node may have none, or one of another version: so the container has its own,
# on a socket that no other process uses. It ends with the container.
set -eu

socket=${RELAUNCH_DCGM_SOCKET:-/run/relaunch-dcgm.sock}
real=${RELAUNCH_DCGMI:-/usr/bin/dcgmi}

# -v, --help and whatever else is no question to a host engine.
case "${1:-}" in
'' | -*) exec "$real" "$@" ;;
esac
what=$1
shift

answers() {
    "$real" discovery -l --host "unix://$socket" >/dev/null 2>&1
}

if ! answers; then
    # It goes into the background by itself. What it says must not get between the lines of dcgmi.
    nv-hostengine --domain-socket "$socket" --pid "$socket.pid" --log-filename "$socket.log" >&2
    tries=0
    # Some seconds where it has to initialise eight GPUs without persistence mode.
    until answers || [ "$tries" -ge 30 ]; do
        tries=$((tries + 1))
        sleep 1
    done
fi
exec "$real" "$what" --host "unix://$socket" "$@"
