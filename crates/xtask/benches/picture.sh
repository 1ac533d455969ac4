#!/usr/bin/env bash
# Draws the README's picture, checkpoints/speed.svg, again from the tiny recipe, on a quiet machine.
set -euo pipefail
cd "$(dirname "$0")/../../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release
binary=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/draftsmith
git archive HEAD checkpoints data recipes | tar x -C "$work"
(cd "$work" && "$binary" run recipes/tiny.toml)
cp "$work/checkpoints/tiny/evaluation/speed.svg" checkpoints/speed.svg
