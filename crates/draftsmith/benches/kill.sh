#!/usr/bin/env bash
# Proves that a killed job goes on where it was and ends with the same bytes.
#
#   crates/draftsmith/benches/kill.sh [KILLS] [RECIPE]
#
# Builds the recipe's data once without interruption and once with KILLS (20) SIGKILLs at random moments, from the
# repository root's release binary, in a temporary copy of what the recipe names; then compares every file.
set -euo pipefail

kills=${1:-20}
recipe=${2:-recipes/tiny.toml}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
[ -x "$binary" ] || { echo "build first: cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=$(basename "$recipe" .toml)
for run in whole killed; do
    mkdir -p "$work/$run/data/$name" "$work/$run/checkpoints"
    cp -r "$root/data/$name/prompts" "$work/$run/data/$name/" 2>/dev/null || true
    cp -r "$root/checkpoints/$name" "$work/$run/checkpoints/" 2>/dev/null || true
    # The shared directory's models and prompts, for recipes that point beside the checkout.
    ln -sfn "$root/../shared" "$work/shared"
done

begun=$(date +%s.%N)
(cd "$work/whole" && "$binary" --quiet build-data "$root/$recipe")
whole=$(echo "$(date +%s.%N) - $begun" | bc)

compare() {
    diff -r "$work/whole/data" "$work/killed/data"
}

cd "$work/killed"
delivered=0
built=0
while [ "$delivered" -lt "$kills" ]; do
    "$binary" --quiet build-data "$root/$recipe" &
    pid=$!
    # At some moment of the first third of what a whole run takes.
    sleep "$(echo "scale=3; $whole * $((RANDOM % 1000)) / 3000" | bc)"
    if kill -9 "$pid" 2>/dev/null; then
        delivered=$((delivered + 1))
        wait "$pid" 2>/dev/null || true
    else
        # It ended before it was killed: all is there. Compare, and begin anew.
        wait "$pid"
        compare
        built=$((built + 1))
        find data -name '*.parquet' -delete
    fi
done
"$binary" --quiet build-data "$root/$recipe"
compare
echo "$delivered kills over $((built + 1)) builds of $whole s each: the same bytes every time"
