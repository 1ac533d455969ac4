#!/usr/bin/env bash
# Proves on an S3 server that processes with separate directories build the same bytes as one process, although
# processes and the server fail.
#
#   crates/xtask/benches/store.sh [RECIPE]
#
# Build with `cargo build --release --features object-store` first. Installs moto (PyPI, `moto[server]`) in a virtual
# environment and serves it on loopback. Four processes build a quarter of the shards each. One is killed (SIGKILL) and
# started again; the server stops for ten seconds (SIGSTOP) and is then restarted, which loses all its objects. Restarted
# processes upload what they have. A fifth process with an empty directory then reads all shards. At the end kill.sh kills
# one process twenty times.
set -euo pipefail
trap 'echo "failed at line $LINENO" >&2' ERR

recipe=${1:-recipes/tiny-full.toml}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
python=${PYTHON:-python3}
port=${PORT:-36900}
cd "$root"
"$binary" build-data /dev/null --help > /dev/null 2>&1 || { echo "build first: cargo build --release --features object-store" >&2; exit 1; }

work=$(mktemp -d)
server=
stop_server() {
    [ -z "$server" ] || { kill -CONT "$server"; kill "$server"; wait "$server"; } 2> /dev/null || true
    server=
}
trap 'stop_server; rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet 'moto[server]'
export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_ALLOW_HTTP=true AWS_REGION=us-east-1
export AWS_ACCESS_KEY_ID=nobody AWS_SECRET_ACCESS_KEY=nothing
start_server() {
    "$work/venv/bin/moto_server" --host 127.0.0.1 --port "$port" > "$work/server.log" 2>&1 &
    server=$!
    for _ in $(seq 200); do
        if curl --silent --fail --request PUT "$AWS_ENDPOINT_URL/data" > /dev/null; then return 0; fi
        sleep 0.1
    done
    cat "$work/server.log" >&2
    return 1
}

for run in whole 0 1 2 3 reader; do
    mkdir -p "$work/$run/data/tiny" "$work/$run/checkpoints"
    cp -r data/tiny/prompts "$work/$run/data/tiny/"
    cp -r checkpoints/tiny "$work/$run/checkpoints/"
done
(cd "$work/whole" && "$binary" --quiet build-data "$root/$recipe")
name=$(basename "$recipe" .toml)
num_shards=$(find "$work/whole/data/$name" -name '*.parquet' | wc -l)

# build MACHINE SHARD: a process with a separate directory, in a subshell whose process becomes the job.
build() {
    cd "$work/$1"
    exec "$binary" --quiet build-data "$root/$recipe" --shard "$2" --set "data.store=s3://data/$name"
}
objects() {
    curl --silent "$AWS_ENDPOINT_URL/data?list-type=2&prefix=$name/responses-" | grep -o '<Key>' | wc -l
}

start_server
begun=$(date +%s.%N)
pids=()
for i in 0 1 2 3; do
    build "$i" "$i/4" &
    pids+=($!)
done
until [ "$(objects)" -gt 2 ]; do sleep 0.1; done
kill -9 "${pids[1]}"
wait "${pids[1]}" || true
killed_after=$(objects)
build 1 1/4 &
pids[1]=$!
kill -STOP "$server"
sleep 10
kill -CONT "$server"
for pid in "${pids[@]}"; do wait "$pid"; done
[ "$(objects)" = "$num_shards" ]
stop_server
start_server
[ "$(objects)" = 0 ]
for i in 0 1 2 3; do (build "$i" "$i/4"); done
[ "$(objects)" = "$num_shards" ]
(build reader 0/1)
seconds=$(echo "$(date +%s.%N) - $begun" | bc)
diff -r "$work/whole/data/$name" "$work/reader/data/$name" --exclude=recipe.toml --exclude='.*.lock'

echo "4 processes, $num_shards shards, $seconds s: one killed with $killed_after objects there, the server still for 10 s," \
    "then restarted empty: the same bytes as one process ($("$work/venv/bin/pip" list 2> /dev/null | grep -i '^moto '))"
"$root/crates/xtask/benches/kill.sh" 20 "$recipe" s3://data/kills
