#!/bin/sh
# Makes the two databases of Temporal, or brings them to the schema of this image. Repeating it changes nothing.
# As temporalio/samples-server does it (compose/scripts/setup-postgres.sh). Where the database is comes from SQL_HOST, SQL_PORT, SQL_USER, SQL_PLUGIN.
set -eu

# In the environment and not an argument, which `ps` shows.
SQL_PASSWORD="$(cat "${PASSWORD_FILE:-/run/secrets/postgres_password}")"
export SQL_PASSWORD

for part in temporal visibility; do
    database=temporal
    [ "$part" = temporal ] || database=temporal_visibility
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0
    temporal-sql-tool --db "$database" update-schema -d "/etc/temporal/schema/postgresql/v12/$part/versioned"
done
