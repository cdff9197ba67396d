#!/bin/bash
# In the manner of docker-library/postgres.
set -Eeo pipefail
if [ "$1" = postgres ] && [ "$(id -u)" = 0 ]; then
    chmod 700 "$PGDATA"
    chown -R postgres "$PGDATA" /var/run/postgresql
    exec gosu postgres "${BASH_SOURCE[0]}" "$@"
fi
if [ "$1" = postgres ] && [ ! -s "$PGDATA/PG_VERSION" ]; then
    password=$(<"$POSTGRES_PASSWORD_FILE")
    initdb --username="$POSTGRES_USER" --pwfile=<(echo "$password") \
        --auth-host=scram-sha-256 --auth-local=trust
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses='*'" >>"$PGDATA/postgresql.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses='' -p 5432" -w start
    psql -U "$POSTGRES_USER" -d postgres -c "CREATE DATABASE \"$POSTGRES_USER\""
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec "$@"
