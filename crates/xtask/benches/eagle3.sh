#!/usr/bin/env bash
# Holds EAGLE-3 drafters that draftsmith trained to a reference in torch and to llama.cpp, on the embedded target.
#
#   crates/xtask/benches/eagle3.sh PYTHON [LLAMA_CPP]
#
# PYTHON has torch, transformers 5.23 or newer and safetensors; for LLAMA_CPP, a source of llama.cpp with a built
# `build/bin/llama-server`, also gguf and sentencepiece. Trains two drafters, over all tokens and over 400, exports them,
# and compares tokens, rounds, drafted and accepted tokens per prompt. Works in a temporary directory. The exit code is 1
# if anything differs.
set -euo pipefail
[ $# -ge 1 ] || { echo 'expected PYTHON [LLAMA_CPP]' >&2; exit 2; }
python="$1" llama_cpp="${2:-}"
root="$(cd "$(dirname "$0")/../../.." && pwd)"
checks="$root/crates/xtask/benches/runtimes"
binary="${BINARY:-}"
if [ -z "$binary" ]; then
    (cd "$root" && cargo build --release --workspace --bins)
    binary="$root/target/release/draftsmith"
fi
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
mkdir -p checkpoints/tiny data/tiny
cp -r "$root"/checkpoints/tiny/target checkpoints/tiny
cp -r "$root/data/tiny/prompts" data/tiny
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
target=checkpoints/tiny/target prompts=data/tiny/prompts/test.jsonl count="${COUNT:-12}"

cat > eagle3.toml <<TOML
name = "eagle3"
seed = 42
[models]
target = "$target"
[data]
prompts = ["data/tiny/prompts/train.jsonl"]
num_prompts = 400
temperature = 1.0
max_new_tokens = 96
[drafters.all]
kind = "eagle3"
num_steps = 3
optimizer = { learning_rate = 2e-3, num_epochs = 2, batch_size = 8 }
[drafters.narrow]
kind = "eagle3"
num_steps = 5
draft_vocabulary = 400
optimizer = { learning_rate = 2e-3, num_epochs = 2, batch_size = 8 }
TOML
"$binary" --quiet build-data eagle3.toml
"$binary" --quiet train-adapter eagle3.toml
failed=0
for drafter in all narrow; do
    "$binary" --quiet export --for eagle3 "checkpoints/eagle3/$drafter" "$drafter" > export.log
    cat > "$drafter.toml" <<TOML
name = "$drafter"
[models]
target = "$target"
[drafters.$drafter]
kind = "eagle3"
path = "$drafter"
TOML
    drafting=(--recipe "$drafter.toml" --drafter "$drafter")
    for length in 3 5; do
        echo "$drafter, K = $length, torch"
        "$python" "$checks/eagle3_reference.py" "$binary" "$target" "$drafter" "$prompts" "$count" \
            -- "${drafting[@]}" --rule "fixed=$length" 2> check.log || { failed=1; tail -5 check.log; }
        if [ -n "$llama_cpp" ]; then
            echo "$drafter, K = $length, llama.cpp"
            "$python" "$checks/eagle3_llama.py" "$binary" "$llama_cpp" "$target" "$drafter" "$prompts" "$count" "$length" \
                2> check.log || { failed=1; tail -5 check.log; }
        fi
    done
done
[ -n "$llama_cpp" ] || echo "llama.cpp: not compared, no source was given"
exit "$failed"
