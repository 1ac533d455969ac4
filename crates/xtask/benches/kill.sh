#!/usr/bin/env bash
# Proves that a killed job resumes and ends with the same bytes.
#
#   crates/xtask/benches/kill.sh [KILLS] [RECIPE]
#
# Builds the recipe's data once without interruption and once with KILLS (20) SIGKILLs at random moments, with the
# release binary of the repository's root and in a temporary copy of the embedded models and prompts; then compares every
# file. Another RECIPE must name its models and prompts by absolute paths.
set -euo pipefail

kills=${1:-20}
recipe=${2:-recipes/tiny-full.toml}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
[ -x "$binary" ] || { echo "build first: cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for run in whole killed; do
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
    exec "$binary" --quiet build-data "$root/$recipe"
}
compare() {
    diff -r "$work/whole/data" "$work/killed/data" --exclude='.*.lock'
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
        find data -type f -not -path '*/prompts/*' -delete
    fi
done
(build)
compare
echo "$delivered kills over $((built + 1)) builds of $whole s each: the same bytes every time"
