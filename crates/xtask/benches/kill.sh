#!/usr/bin/env bash
# Proves that a killed job resumes and ends with the same bytes.
#
#   crates/xtask/benches/kill.sh [KILLS] [RECIPE] [STORE]
#
# Builds the recipe's data once without interruption and once with KILLS (20) SIGKILLs at random moments, with the
# release binary of the repository's root and in a temporary copy of the embedded models and prompts; then compares every
# file. Another RECIPE must name its models and prompts by absolute paths. With the address of an object STORE
# (`s3://BUCKET/PATH`) the killed builds put their shards there, each build under its number, and a process with an empty
# directory reads each completed build. The binary then needs the feature `object-store`.
set -euo pipefail

kills=${1:-20}
recipe=${2:-recipes/tiny-full.toml}
store=${3:-}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
[ -x "$binary" ] || { echo "build first: cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for run in whole killed reader; do
    mkdir -p "$work/$run/data/tiny" "$work/$run/checkpoints"
    cp -r "$root/data/tiny/prompts" "$work/$run/data/tiny/"
    cp -r "$root/checkpoints/tiny" "$work/$run/checkpoints/"
done

begun=$(date +%s.%N)
(cd "$work/whole" && "$binary" --quiet build-data "$root/$recipe")
whole=$(echo "$(date +%s.%N) - $begun" | bc)

built=0
# Runs in a subshell, whose process becomes the job.
build() {
    exec "$binary" --quiet build-data "$root/$recipe" ${store:+--set "data.store=$store/$built"}
}
clear_data() {
    find data -type f -not -path '*/prompts/*' -delete
}
# Data directories keep the recipe they were built from, including the store's address.
compare() {
    diff -r "$work/whole/data" "$work/killed/data" --exclude=recipe.toml --exclude='.*.lock'
    if [ -n "$store" ]; then
        (cd "$work/reader" && (build) && diff -r data "$work/killed/data" --exclude=recipe.toml --exclude='.*.lock')
        (cd "$work/reader" && clear_data)
    fi
}

cd "$work/killed"
delivered=0
while [ "$delivered" -lt "$kills" ]; do
    build &
    pid=$!
    # At a random moment within the first third of a whole run's time.
    sleep "$(echo "scale=3; $whole * $((RANDOM % 1000)) / 3000" | bc)"
    if kill -9 "$pid" 2>/dev/null; then
        delivered=$((delivered + 1))
        wait "$pid" 2>/dev/null || true
    else
        # The build ended before the kill and is complete. Compare it and start again.
        wait "$pid"
        compare
        built=$((built + 1))
        clear_data
    fi
done
(build)
compare
echo "$delivered kills over $((built + 1)) builds of $whole s each: the same bytes every time${store:+, in $store}"
