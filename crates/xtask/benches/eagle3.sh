#!/usr/bin/env bash
# Holds EAGLE-3 drafters that draftsmith trained to a reference in torch, to llama.cpp and to vLLM.
#
#   crates/xtask/benches/eagle3.sh PYTHON [LLAMA_CPP] [VLLM_PYTHON]
#
# PYTHON has torch, transformers 5.23 or newer and safetensors; for LLAMA_CPP, a source of llama.cpp with a built
# `build/bin/llama-server`, also gguf and sentencepiece. VLLM_PYTHON has vLLM 0.32 for the CPU. Either may be empty.
# Trains drafters of the embedded target, over all tokens, over 400, and two with windows and EAGLE-3.1's norms, makes a wider
# one of the second, exports them,
# and compares tokens, rounds, drafted and accepted tokens per prompt, in vLLM by position too. With TARGET, DRAFTER and
# PROMPTS in the environment, two directories and a file, it compares that drafter instead. Works in a temporary
# directory. The exit code is 1 if anything differs.
set -euo pipefail
[ $# -ge 1 ] || { echo 'expected PYTHON [LLAMA_CPP] [VLLM_PYTHON]' >&2; exit 2; }
python="$1" llama_cpp="${2:-}" vllm_python="${3:-}"
. "$(dirname "$0")/runtimes/place.sh"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1
target="${TARGET:-$root/checkpoints/tiny/target}" prompts="${PROMPTS:-$root/data/tiny/prompts/test.jsonl}" count="${COUNT:-12}"
train() {
    cat > eagle3.toml <<TOML
name = "eagle3"
seed = 42
[models]
target = "$target"
[data]
prompts = ["$root/data/tiny/prompts/train.jsonl"]
num_prompts = 600
temperature = 1.0
max_new_tokens = 96
[drafters.all]
kind = "eagle3"
num_steps = 3
optimizer = { learning_rate = 2e-3, num_epochs = 6 }
[drafters.narrow]
kind = "eagle3"
num_steps = 5
draft_vocabulary = 400
optimizer = { learning_rate = 2e-3, num_epochs = 6 }
[drafters.windowed]
kind = "eagle3"
num_steps = 5
window = 16
norm_before_fc = true
norm_output = true
optimizer = { learning_rate = 2e-3, num_epochs = 6 }
[drafters.normed]
kind = "eagle3"
num_steps = 5
window = 9
fc_norm = true
head_norms = true
optimizer = { learning_rate = 2e-3, num_epochs = 6 }
TOML
    "$binary" --quiet build-data eagle3.toml
    "$binary" --quiet train-adapter eagle3.toml
    for drafter in all narrow windowed normed; do
        "$binary" --quiet export --for eagle3 "checkpoints/eagle3/$drafter" "$drafter" > export.log
    done
    "$python" "$checks/eagle3_wider.py" "$target" narrow wider
}
if [ -n "${DRAFTER:-}" ]; then
    drafters=given
    cp -r "$DRAFTER" given
else
    drafters='all narrow wider windowed normed'
    train
fi
failed=0
check() { # WHAT COMMAND...
    echo "$1"
    "${@:2}" 2> check.log || { failed=1; tail -5 check.log; }
}
for drafter in $drafters; do
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
        models=("$target" "$drafter" "$prompts" "$count")
        check "$drafter, K = $length, torch" "$python" "$checks/eagle3_reference.py" "$binary" "${models[@]}" \
            -- "${drafting[@]}" --rule "fixed=$length"
        # llama.cpp computes no windows.
        [ -z "$llama_cpp" ] || [ "$drafter" = windowed ] || [ "$drafter" = normed ] || check "$drafter, K = $length, llama.cpp" \
            "$python" "$checks/eagle3_llama.py" "$binary" "$llama_cpp" "${models[@]}" "$length"
        [ -z "$vllm_python" ] || check "$drafter, K = $length, vLLM" \
            "$vllm_python" "$checks/eagle3_vllm.py" "$binary" "${models[@]}" "$length"
    done
done
[ -n "$llama_cpp" ] || echo "llama.cpp: not compared, no source was given"
[ -n "$vllm_python" ] || echo "vLLM: not compared, no Python with it was given"
exit "$failed"
