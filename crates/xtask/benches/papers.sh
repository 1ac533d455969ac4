#!/usr/bin/env bash
# Runs the recipes of the papers' tables and fails unless every table is filled: papers.sh [RECIPE]... Recipes that need files
# of yours run on the embedded pair, and on three kinds of its prompts as data sets.
set -euo pipefail
cd "$(dirname "$0")/../../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release
binary=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/draftsmith
cp -r checkpoints data recipes "$work"
cd "$work"
if [ $# = 0 ]; then set -- recipes/papers/*.toml; fi
for kind in code lists sums; do
    grep "\"category\":\"$kind\"" data/tiny/prompts/test.jsonl > "$kind.jsonl"
done
embedded=(
    models.target=checkpoints/tiny/target drafters.draft.model=checkpoints/tiny/draft
    drafters.draft.head.optimizer='{ learning_rate = 6e-3, num_epochs = 2, gradient_accumulation = 2 }'
    data.prompts='["data/tiny/prompts/train.jsonl"]' data.num_prompts=400 data.max_new_tokens=112
    tune.prompts='["data/tiny/prompts/tune.jsonl"]'
    evaluate.prompts='["code.jsonl", "lists.jsonl", "sums.jsonl"]' evaluate.max_new_tokens=112
)
for recipe in "$@"; do
    SECONDS=0
    sets=()
    if grep -q '"path/to/' "$recipe"; then
        for set in "${embedded[@]}"; do sets+=(--set "$set"); done
    fi
    "$binary" run "$recipe" "${sets[@]}" > printed.txt 2> messages.txt || { tail -5 messages.txt; exit 1; }
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
