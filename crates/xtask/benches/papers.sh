#!/usr/bin/env bash
# Runs the recipes of the papers' tables and fails unless every table is filled: papers.sh [RECIPE]...
set -euo pipefail
cd "$(dirname "$0")/../../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release
binary=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/draftsmith
cp -r checkpoints data recipes "$work"
cd "$work"
if [ $# = 0 ]; then set -- recipes/papers/*.toml; fi
for recipe in "$@"; do
    SECONDS=0
    if grep -q '"path/to/' "$recipe"; then
        echo "== $recipe: skipped, because it needs files of yours: $(grep -o '"path/to/[^"]*"' "$recipe" | tr '\n' ' ')"
        continue
    fi
    "$binary" run "$recipe" > printed.txt 2> messages.txt || { tail -5 messages.txt; exit 1; }
    wanted=$(grep -c '^\[\[papers\]\]' "$recipe")
    name=$(basename "$recipe" .toml)
    filled=$(grep -c '^here: ' printed.txt)
    sed -n '/^report: /,$p' printed.txt
    if [ "$filled" -lt "$wanted" ]; then echo "$recipe: $filled blocks for $wanted tables"; exit 1; fi
    if sed -n '/^here: /,/^paper: /p' printed.txt | grep -v ' by itself ' | grep -E '^  .* -( |$)'; then
        echo "$recipe: a figure is missing"
        exit 1
    fi
    echo "== $name: $wanted tables in $SECONDS s"
done
