#!/usr/bin/env bash
# Trains an EAGLE-3 drafter of the embedded target on the hidden states of vLLM, and beside it on the states of local layers.
#
#   crates/xtask/benches/states.sh VLLM_PYTHON
#
# VLLM_PYTHON has vLLM 0.31 or newer for the CPU, which stores states by `runtimes/states_connector.py`. The server writes the
# responses, in f32 and with one request at a time. One training is killed KILLS (4) times while states arrive, and must end with
# the weights of a training that is not. `runtimes/states_compare.py` then compares the drafters, also with two from local layers
# whose states are perturbed by 1e-6, and with one from a server in bf16. COUNT (200) is the number of prompts. Servers with
# other options must then be accepted, or refused with the cause. FAMILIES are families that draftsmith does not run. For a
# random model of each, served in DTYPES (`float32 bfloat16`), it proves the states of 16 answers, and trains a drafter with a head.
# Works in a temporary directory. The exit code is 1 if anything fails or is further apart than allowed.
set -euo pipefail
[ $# -eq 1 ] || { echo 'expected VLLM_PYTHON' >&2; exit 2; }
families="${FAMILIES-qwen3_moe}"
python="$1" count="${COUNT:-200}" kills="${KILLS:-4}" port="${PORT:-18379}"
. "$(dirname "$0")/runtimes/place.sh"
mkdir states
target="$root/checkpoints/tiny/target"

serve() { # DTYPE MODEL [OPTIONS]
    stop
    local dtype="$1" model="$2"
    shift 2
    setsid env PYTHONPATH="$checks" VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 "$python" \
        -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name served --host 127.0.0.1 --port "$port" \
        --max-model-len 256 --dtype "$dtype" --enforce-eager --no-enable-prefix-caching "$@" \
        --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": '"${layers:-[2, 4, 5, 8]}"'}}}' \
        --kv-transfer-config '{"kv_connector": "CpuStatesConnector", "kv_role": "kv_producer",
            "kv_connector_module_path": "states_connector",
            "kv_connector_extra_config": {"shared_storage_path": "'"$place/states"'"}}' > server.log 2>&1 &
    await_server "$port"
}

recipe() { # NAME TARGET FEATURES SERVER_KEYS
    cat > "$1.toml" <<TOML
name = "$1"
seed = 7
[models]
target = "$2"
[data]
prompts = ["$root/data/tiny/prompts/train.jsonl"]
num_prompts = $count
max_new_tokens = 64
temperature = 0
skip_long_prompts = true
$4
[drafters.e3]
kind = "eagle3"
initial = "random"
features = "$3"
optimizer = { num_epochs = 4, learning_rate = 2e-3, validation_fraction = 0.2 }
[tune]
prompts = ["$root/data/tiny/prompts/test.jsonl"]
num_prompts = 8
max_candidate_length = 6
[tune.costs]
target_ms = 20
draft_ms = { e3 = 2 }
[evaluate]
prompts = ["$root/data/tiny/prompts/test.jsonl"]
num_prompts = 8
max_new_tokens = 64
decodings = ["greedy", "sampled"]
TOML
}
on_server='responses = "server"
[data.server]
urls = ["http://127.0.0.1:'"$port"'/v1"]
model = "served"
concurrency = 1
[data.server.states]
dirs = ["'"$place"'/states"]'

serve float32 "$target"
recipe served "$target" server "$on_server"
"$binary" --quiet build-data served.toml
[ -z "$(ls states)" ] || { echo 'states beside responses are left' >&2; exit 1; }
"$binary" server states served.toml
recipe killed "$target" server "$on_server"
"$binary" --quiet build-data killed.toml
requests() { grep -c 'POST /v1/completions' server.log || true; }
before="$(requests)"
for number in $(seq "$kills"); do
    "$binary" train-drafter killed.toml > killed.log 2>&1 &
    training=$!
    for _ in $(seq 600); do
        [ "$(requests)" -lt $((before + count * number / (kills + 2))) ] || break
        sleep 0.05
    done
    kill -9 "$training" 2> /dev/null || { echo "kill $number came too late" >&2; exit 1; }
    wait "$training" 2> /dev/null || true
done
for name in served killed; do
    "$binary" --quiet train-drafter "$name.toml" 2>&1 | grep 'hidden states: proved' || true
done
cmp checkpoints/served/e3/model.safetensors checkpoints/killed/e3/model.safetensors
echo "after $kills kills: the same weights"
for stage in record tune replay; do
    "$binary" --quiet "$stage" served.toml > "$stage.txt"
    echo "$stage: $(grep -m 1 'e3' "$stage.txt" | tr -s ' ')"
done
rm -f states/*

"$python" "$checks/states_compare.py" perturb "$target" perturbed-1 1
"$python" "$checks/states_compare.py" perturb "$target" perturbed-2 2
for name in local perturbed-1 perturbed-2; do
    if [ "$name" = local ]; then from="$target"; else from="$place/$name"; fi
    recipe "$name" "$from" cache ''
    "$binary" --quiet build-data "$name.toml"
    "$binary" --quiet train-drafter "$name.toml"
done
serve bfloat16 "$target"
recipe bf16 "$target" server "$on_server"
"$binary" --quiet build-data bf16.toml
"$binary" --quiet train-drafter bf16.toml
stop
"$python" "$checks/states_compare.py" compare checkpoints

# Judges the server that was started last by its states.
expect() { # SERVER CAUSE; an empty cause if the states are right
    if "$binary" --quiet server states served.toml --set data.server.concurrency=8 > found.txt 2>&1; then
        [ -z "$2" ] || { echo "$1: not refused" >&2; exit 1; }
        echo "$1: accepted"
    else
        { [ -n "$2" ] && grep -q "$2" <(tr '\n' ' ' < found.txt); } || { echo "$1:" >&2; cat found.txt >&2; exit 1; }
        echo "$1: refused, $2"
    fi
}
serve float32 "$target" --max-num-batched-tokens 48 --max-num-seqs 8
expect 'prompts in chunks of 48 tokens' ''
serve float32 "$target" --enable-prefix-caching
expect 'a cache of prefixes' ''
serve bfloat16 "$target"
expect 'bf16' ''
STATES_FAULT=shifted serve bfloat16 "$target"
expect 'all but the last layer shifted by a token' 'differ from those of the local layers'
STATES_FAULT=swapped serve bfloat16 "$target"
expect 'two middle layers swapped' 'differ from those of the local layers'
layers='[1, 4, 5, 8]' serve float32 "$target"
expect 'another first layer' 'differ from those of the local layers'
layers='[2, 4, 5, 7]' serve float32 "$target"
expect 'no last layer' 'of another layer'
layers='[2, 4, 8]' serve float32 "$target"
expect 'three layers' 'has the shape'
"$python" "$checks/states_compare.py" perturb "$target" other 3 1
serve float32 "$place/other"
expect 'other weights' 'or of other weights'

for family in $families; do
    "$python" "$checks/states_families.py" "$target" "$place/$family" "$family" 2> make.log || { tail -5 make.log; exit 1; }
    for dtype in ${DTYPES:-float32 bfloat16}; do
        serve "$dtype" "$place/$family"
        count=60 recipe "$family-$dtype" "$place/$family" server "$on_server"
        cat >> "$family-$dtype.toml" <<TOML
[drafters.e3.head]
form = "look-ahead"
labels = "rollouts"
num_layers = 1
optimizer = { num_epochs = 1 }
TOML
        "$binary" --quiet build-data "$family-$dtype.toml"
        "$binary" --quiet server states "$family-$dtype.toml" --json > states.json
        error="$(grep -o '"mean_error":[^,]*' states.json)"
        "$binary" --quiet train-drafter "$family-$dtype.toml" > train.txt
        for stage in record tune replay; do "$binary" --quiet "$stage" "$family-$dtype.toml" > "$stage.txt"; done
        echo "$family in $dtype: $error, $(grep -m 1 -o 'agree.*' train.txt | tr -s ' ' | cut -c 1-60)"
    done
done
