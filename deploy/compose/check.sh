#!/bin/sh
# Says what `docker compose up` would miss, one sentence each, or nothing: run it where docker-compose.yml is.
set -eu
bad=0
say() { echo "check.sh: $*" >&2; bad=1; }
here=$(dirname "$0")

engine=$(docker version --format '{{.Server.Version}}' 2>/dev/null) || engine=
compose=$(docker compose version --short 2>/dev/null) || compose=
at_least() { printf '%s\n%s\n' "$2" "${1#v}" | sort -C -V; }
if [ -z "$engine" ]; then
    say "no Docker engine answers: expected Engine 28 or newer"
elif ! at_least "$engine" 28; then
    say "Docker Engine $engine: expected 28 or newer, which alone keeps other machines of this network from ports that are" \
        "published on 127.0.0.1"
fi
at_least "${compose:-0}" 2.24 || say "Docker Compose ${compose:-is not installed}: expected 2.24 or newer"

password=$here/secrets/postgres_password
if ! [ -s "$password" ]; then
    say "$password is missing or empty: expected letters and digits"
elif tr -d '\n' <"$password" | grep -q '[^A-Za-z0-9]'; then
    say "$password: expected letters and digits only, as the server's image writes it into YAML"
fi
for folder in secrets ssh; do
    [ -d "$here/$folder" ] || continue
    case $(stat -c %a "$here/$folder") in
    *00) ;;
    *) say "$here/$folder can be entered by others: expected chmod 700" ;;
    esac
done
[ -d "$here/ssh" ] || say "$here/ssh is missing: expected a folder with the key and known_hosts of the nodes"
set -- "$here"/fleets/*.yaml
[ -e "$1" ] || say "$here/fleets has no *.yaml: expected a fleet file"
exit $bad
