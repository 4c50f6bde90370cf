#!/bin/sh
# Five machines on this one, to try it: five folders, five processes, one PostgreSQL, one test server for mail.
#   ROWPOST_CONTROL=postgresql://you@localhost/postgres sh local.sh          (PORT: of the test server, 2525)
# It plans the sample campaign of `engine init` in ./five, kills machine 2 with its folder, starts it anew, and merges.
set -eu
: "${ROWPOST_CONTROL:?set it to a PostgreSQL that you may write to}"
mkdir -p five && cd five
engine init >/dev/null
"${PYTHON:-python3}" - <<'END'
import pyarrow as pa, pyarrow.parquet as pq
sample = pq.read_table("campaign/list.parquet")
table = pa.concat_tables([sample] * 200)
for name, values in {"id": range(len(table)), "email": [f"person{n}@example.com" for n in range(len(table))]}.items():
    place = table.schema.get_field_index(name)
    if place >= 0:
        table = table.set_column(place, name, pa.array(values, table.schema.field(place).type))
pq.write_table(table, "campaign/list.parquet", row_group_size=500)
END
id="five-$$"
sed -i.bak -e "s/^id = .*/id = \"$id\"/" campaign/campaign.toml
port=${PORT:-2525}
engine sink --port "$port" --record sink.record >sink.out 2>&1 &
sink=$!
trap 'kill $sink 2>/dev/null || true' EXIT
sed -i.bak -e 's#^relay = .*#relay = "smtp://127.0.0.1:'"$port"'"#' campaign/campaign.toml
sed -i.bak -e 's/^\[list\]/[list]\
batch_rows = 500/' campaign/campaign.toml
printf '\n[control]\nlease = "3s"\n' >>campaign/campaign.toml
engine plan list.parquet --partitions 5 --control "$ROWPOST_CONTROL"
case $ROWPOST_CONTROL in *\?*) url="$ROWPOST_CONTROL&campaign=$id" ;; *) url="$ROWPOST_CONTROL?campaign=$id" ;; esac
start() {
    setsid engine send --partition "$1" --campaign "machine-$1" --control "$url" --name "machine-$1" --processes 1 \
        --max-wait 10s --yes >>"machine-$1.out" 2>&1 &
    eval "pid$1=$!"
}
for n in 0 1 2 3 4; do start $n; done
sleep 6
eval "kill -9 -- -\$pid2" 2>/dev/null || true
rm -rf machine-2
start 2
for n in 0 1 2 3 4; do eval "wait \$pid$n" || true; done
engine machines --control "$url"
engine merge-logs machine-?/ --control "$url" || true
