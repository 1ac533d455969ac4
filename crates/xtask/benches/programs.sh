#!/usr/bin/env bash
# Builds the binary and a bench, and prints the path of each on a line, the binary's first.
#
#   crates/xtask/benches/programs.sh BENCH [CARGO_ARGUMENT]...
#
# One command builds both, because another selection of packages has other features and compiles burn again. Cargo also
# reports the binary of the bench's package, so names and kinds tell programs apart.
set -euo pipefail
[ $# -ge 1 ] || { echo 'expected BENCH' >&2; exit 2; }
bench="$1"
shift
cargo build --release --manifest-path "$(dirname "$0")/../../../Cargo.toml" -p draftsmith-cli -p xtask --bin draftsmith \
    --bench "$bench" --message-format json "$@" | python3 -c '
import json, sys
found = {}
for line in sys.stdin:
    artifact = json.loads(line)
    if artifact.get("executable"):
        found[artifact["target"]["name"], artifact["target"]["kind"][0]] = artifact["executable"]
print(found["draftsmith", "bin"], found[sys.argv[1], "bench"], sep="\n")' "$bench"
