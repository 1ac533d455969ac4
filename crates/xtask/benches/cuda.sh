#!/usr/bin/env bash
# Compares a CUDA GPU with the CPU on the tiny recipe and on generation: greedy tokens must be equal. Then runs
# the recipe in bf16, where speculative output must equal plain output.
#
#   crates/xtask/benches/cuda.sh [BINARY]
#
# Run it from the repository's root. Without BINARY it builds one with the feature `cuda`. NVRTC and the CUDA
# headers must be found (LD_LIBRARY_PATH, CUDA_PATH). Works in a temporary directory and leaves the repository
# unchanged. The exit code is 1 if a greedy token differs, except for ties that rounding breaks the other way,
# which are counted.
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
binary="${1:-}"
if [ -z "$binary" ]; then
    cargo build --release --features cuda --manifest-path "$root/crates/draftsmith-cli/Cargo.toml"
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

echo "== the recipe on each device and in each type"
for name in cpu cuda cuda-bf16; do
    sed "s|^name = .*|name = \"$name\"|" tiny.toml > "$name.toml"
done
"$binary" run cpu.toml
"$binary" run cuda.toml --device cuda
"$binary" run cuda-bf16.toml --device cuda --dtype bf16

echo "== greedy tokens of both devices"
tokens() {
    "$binary" generate --device "$1" --json --greedy --max-new-tokens 100 \
        --target models/target "${@:2}" 2> /dev/null |
        sed -n '/"token_ids"/,/\]/p' | tr -d ' \n'
}
status=0
for prompt in 'What is 47 + 85? Show the steps.' 'Convert 3 km to m.' \
    'Reverse this list: lamp, cup, chair, box, spoon.'; do
    expected="$(tokens cpu --prompt "$prompt")"
    for extra in '' '--draft models/draft --rule fixed=4' \
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

echo "== losslessness in each type"
for name in cuda cuda-bf16; do
    results="checkpoints/$name/evaluation/results.json"
    awk -F '"num_forgiven_ties":' -v name="$name" '
        /"category":"all".*"lossless":(true|false)/ { settings++; ties += $2 }
        /"category":"all".*"lossless":false/ { different++ }
        END {
            printf "%s: %d settings, %d not lossless, %d ties forgiven\n", name, settings, different, ties
            exit !(settings && !different)
        }' "$results" || status=1
done
for export in draft/head adapter; do
    "$binary" check "checkpoints/cuda-bf16/$export" --device cuda --dtype bf16 || status=1
done

echo "== data of one type is refused in another"
if "$binary" train-head cuda-bf16.toml --device cuda 2> refused; then
    echo "DIFFERENT: data in bf16 was accepted in f32"
    status=1
else
    grep 'dtype' refused || status=1
fi

echo "== speed in each type"
for dtype in f32 bf16; do
    for extra in '' '--draft models/draft --head checkpoints/cuda/draft/head'; do
        # shellcheck disable=SC2086
        "$binary" generate --device cuda --dtype "$dtype" --max-new-tokens 200 \
            --target models/target --prompt 'What is 47 + 85? Show the steps.' $extra \
            2>&1 > /dev/null | sed "s/^/$dtype ${extra:+with a draft }/"
    done
done
exit "$status"
