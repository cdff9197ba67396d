#!/bin/sh
# Starts Temporal's dev server where Temporal's own would start, if PostgreSQL takes the password
# and has the schema.
set -eu
PGPASSWORD=$POSTGRES_PWD psql --host="$POSTGRES_SEEDS" --port="$DB_PORT" --username="$POSTGRES_USER" \
    --dbname=temporal --quiet --command 'SELECT folder FROM schema_version' >/dev/null
# key: / - value: V, two lines a setting
options=$(sed -nE '/^[^# ]/{s/:.*//;h}; /- value:/{s/.*value: *//;H;x;s/\n/=/p}' "$DYNAMIC_CONFIG_FILE_PATH" |
    sed 's/^/--dynamic-config-value /')
# shellcheck disable=SC2086
exec temporal server start-dev --ip "$BIND_ON_IP" --http-port 7243 --ui-port 8233 \
    --db-filename /data/temporal.db --log-level error \
    --sqlite-pragma journal_mode=WAL --sqlite-pragma synchronous=FULL $options
