#!/usr/bin/env bash
# The tiny road and generation on a CUDA GPU, against the CPU: the same greedy tokens, and figures; then
# both trainings in bf16.
#
#   crates/draftsmith/benches/cuda.sh [BINARY]
#
# From the repository's root. Without BINARY it builds one with the feature `cuda`. NVRTC and the CUDA
# headers must be found (LD_LIBRARY_PATH, CUDA_PATH). Works in a temporary directory; the repository is
# not touched. Ends with 1 where any greedy token differs.
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
binary="${1:-}"
if [ -z "$binary" ]; then
    cargo build --release --features cuda --manifest-path "$root/crates/draftsmith/Cargo.toml"
    binary="$root/target/release/draftsmith"
fi
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
mkdir checkpoints
ln -s "$root/data" data-of-repository
ln -s "$root/checkpoints/tiny" models
sed -e 's|checkpoints/tiny/|models/|; s|"data/tiny/|"data-of-repository/tiny/|' \
    "$root/recipes/tiny.toml" > tiny.toml

echo "== the road on each device"
for device in cpu cuda; do
    sed "s|^name = .*|name = \"$device\"|" tiny.toml > "$device.toml"
    "$binary" run "$device.toml" --device "$device"
done

echo "== greedy tokens, one device against the other"
tokens() {
    "$binary" generate --device "$1" --json --greedy --max-new-tokens 100 \
        --target models/target "${@:2}" 2> /dev/null |
        sed -n '/"token_ids"/,/\]/p' | tr -d ' \n'
}
status=0
for prompt in 'What is 47 + 85? Show the steps.' 'Convert 3 km to m.' \
    'Reverse this list: lamp, cup, chair, box, spoon.'; do
    expected="$(tokens cpu --prompt "$prompt")"
    for extra in '' '--draft models/draft --candidate-length 4' \
        '--adapter checkpoints/cpu/adapter'; do
        # shellcheck disable=SC2086
        found="$(tokens cuda --prompt "$prompt" $extra)"
        if [ "$found" = "$expected" ] && [ -n "$found" ]; then
            echo "same: $prompt $extra"
        else
            echo "DIFFERENT: $prompt $extra"
            status=1
        fi
    done
done

echo "== both trainings in bf16 (f32's scores are above)"
for stage in train-head train-adapter; do
    "$binary" "$stage" cuda.toml --device cuda --set head.dtype=bf16 --set adapter.dtype=bf16
done
exit "$status"
