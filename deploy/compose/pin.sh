#!/bin/sh
# Writes docker-compose.digests.yml: every image of docker-compose.yml and Dockerfile by the digest that its tag has now. It is for a
# release, and needs the registry. To use what it wrote: COMPOSE_FILE=docker-compose.yml:docker-compose.digests.yml in .env.
set -eu
cd "${1:-$(dirname "$0")/../..}"
pinned() {
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1")
    case $digest in
    sha256:*) echo "$1@$digest" ;;
    *) echo "pin.sh: expected a digest of $1 from the registry, not '$digest'" >&2; return 1 ;;
    esac
}
config=$(docker compose --file docker-compose.yml --profile metrics config --format json)
images=$(printf %s "$config" | python3 -c 'import json, sys
for name, service in sorted(json.load(sys.stdin)["services"].items()):
    if service.get("pull_policy") != "never":  # those are built here
        print(name, service["image"])')
base=$(sed -n 's/^FROM //p' Dockerfile)
{
    echo "# Written by deploy/compose/pin.sh: images by digest."
    echo "services:"
    echo "$images" | while read -r service image; do
        found=$(pinned "$image")
        echo "  $service: {image: \"$found\"}"
    done
    found=$(pinned "$base")
    echo "  namespace: {build: {additional_contexts: {\"$base\": \"docker-image://$found\"}}}"
} >docker-compose.digests.yml.new
mv docker-compose.digests.yml.new docker-compose.digests.yml
