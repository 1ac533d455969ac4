#!/usr/bin/env bash
# Compares what `export` writes with draftsmith in the runtimes that load it, on the embedded pair.
#
#   crates/xtask/benches/runtimes.sh PYTHON [VLLM_PYTHON]
#
# PYTHON has torch and transformers 5.23, VLLM_PYTHON has vLLM 0.32 or 0.33 for the CPU. Trains two heads and an adapter
# with a head, exports them, and compares tokens, rounds and logits. torch also reads the exports for the authors' classes.
# Works in a temporary directory. The exit code is 1 if anything differs.
set -euo pipefail
[ $# -ge 1 ] || { echo 'expected PYTHON [VLLM_PYTHON]' >&2; exit 2; }
python="$1" vllm_python="${2:-}"
. "$(dirname "$0")/runtimes/place.sh"
mkdir -p checkpoints/tiny data/tiny
cp -r "$root"/checkpoints/tiny/{target,draft} checkpoints/tiny
cp -r "$root/data/tiny/prompts" data/tiny
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
target=checkpoints/tiny/target draft=checkpoints/tiny/draft prompts=data/tiny/prompts/test.jsonl

recipe() { # NAME HEAD_KEYS
    cat > "$1.toml" <<TOML
name = "$1"
seed = 42
[models]
target = "$target"
[data]
prompts = ["data/tiny/prompts/train.jsonl"]
num_prompts = 400
temperature = 1.0
max_new_tokens = 96
[drafters.draft]
kind = "model"
model = "$draft"
[drafters.draft.head]
$2
[drafters.draft.head.optimizer]
learning_rate = 4e-3
num_epochs = 2
[drafters.adapter]
kind = "adapter"
exit_layer = 2
architecture = "decoder-layer"
initial = "target"
max_candidate_length = 8
[drafters.adapter.optimizer]
learning_rate = 4e-3
num_epochs = 2
[drafters.adapter.head]
form = "look-ahead"
inputs = ["entropy", "top_prob"]
labels = "rollouts"
num_layers = 1
[drafters.adapter.head.optimizer]
learning_rate = 4e-3
num_epochs = 2
[tune]
num_prompts = 20
[evaluate]
prompts = ["$prompts"]
num_prompts = 20
decodings = ["greedy"]
TOML
}
run() { "$binary" --quiet "$@"; }
failed=0
check() { # WHAT COMMAND...
    local what="$1"
    shift
    echo "$what"
    "$@" 2> check.log || { failed=1; echo "DIFFERENT: $what"; tail -5 check.log; }
}

recipe paper $'num_layers = 3\ninputs = ["entropy"]'
recipe ahead $'form = "look-ahead"\ninputs = ["entropy", "top_prob"]\nlabels = "overlap"\nnum_layers = 1'
for name in paper ahead; do
    run build-data $name.toml > /dev/null
    run train-head $name.toml > /dev/null
done
run train-adapter paper.toml > /dev/null
adapter=checkpoints/paper/adapter
rounds() { # DRAFT ARGUMENTS...
    local exported="$1"
    shift
    "$python" "$checks/transformers_rounds.py" "$binary" "$target" "$exported" "$prompts" 20 -- --target "$target" "$@"
}
for name in paper ahead; do
    run export --for transformers "checkpoints/$name/draft/head" "$name-draft" --stop-threshold 0.5 > /dev/null
    check "transformers, the draft with its $name head" rounds "$name-draft" --draft "$draft" \
        --head "checkpoints/$name/draft/head" --rule head=0.5
done
run export --for transformers $adapter adapter-draft --stop-threshold 0.5 > /dev/null
check 'transformers, the draft model of an adapter with its head' rounds adapter-draft --adapter $adapter \
    --rule head=0.5 --max-candidate-length 20
run export --for draft-model $adapter draft-model > /dev/null
"$python" - draft-model 5 0.6 <<'PY'
import json, sys
path = sys.argv[1] + "/generation_config.json"
keys = json.load(open(path)) | {"num_assistant_tokens": int(sys.argv[2]), "assistant_confidence_threshold": float(sys.argv[3])}
json.dump(keys, open(path, "w"))
PY
check 'transformers, the draft model of an adapter' rounds draft-model --adapter $adapter --max-candidate-length 5 \
    --rule confidence=0.6
check 'transformers, its logits' "$python" "$checks/transformers_logits.py" $target $adapter draft-model
run train-adapter paper.toml --set 'drafters.adapter.architecture="attention"' > /dev/null
run export --for kangaroo $adapter kangaroo > /dev/null
run train-head paper.toml --set drafters.draft.head.inputs=[] > /dev/null
run export --for specdec-pp checkpoints/paper/draft/head specdec_pp > /dev/null
check "torch, the authors' forms" "$python" "$checks/authors_forms.py" $adapter kangaroo checkpoints/paper/draft/head specdec_pp
if [ -n "$vllm_python" ]; then
    # Runs vLLM's engine in the observing process, on the CPU, with a cache of 1 GB.
    vllm=(env PYTHONPATH="$place" VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
        "$vllm_python")
    run train-head paper.toml > /dev/null
    for name in paper ahead; do
        run export --for vllm "checkpoints/$name/draft/head" "vllm_$name" --stop-threshold 0.5 > /dev/null
        check "vLLM, the draft with its $name head" "${vllm[@]}" "$checks/vllm_rounds.py" "$binary" $target \
            "vllm_$name" $prompts 20 -- --target $target --draft "$draft" --head "checkpoints/$name/draft/head" \
            --rule head=0.5
    done
    check 'vLLM, the draft with its ahead head, sampled' "${vllm[@]}" "$checks/vllm_sampled.py" "$binary" $target \
        vllm_ahead 'Tell me.' 300
    check 'vLLM, the draft model of an adapter' "${vllm[@]}" "$checks/vllm_draft_model.py" "$binary" $target \
        draft-model $prompts 20
fi
exit $failed
