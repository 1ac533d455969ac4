#!/usr/bin/env bash
# Builds data from a real server on loopback, without the target's weights, and reports how close it is to the weights.
#
#   crates/xtask/benches/served.sh MODEL PROMPTS llama.cpp LLAMA_SERVER MODEL.gguf
#   crates/xtask/benches/served.sh MODEL PROMPTS vllm VLLM_PYTHON
#
# MODEL is a checkpoint directory. The server serves it and it is also the draft, so draft tokens are rejected only where
# the server's numbers differ from ours. PROMPTS is a prompt file. LLAMA_SERVER is llama.cpp's `llama-server`, VLLM_PYTHON
# has vLLM for the CPU. One build is killed and resumed; the server is killed and restarted while another build waits; then
# rollouts are recorded, and a rule is tuned and replayed. NUM (24) prompts of at most LENGTH (48) tokens. Works in a
# temporary directory. The exit code is 1 if a request is repeated or a stage fails.
set -euo pipefail
[ $# -ge 4 ] || { echo 'expected MODEL PROMPTS llama.cpp LLAMA_SERVER MODEL.gguf, or MODEL PROMPTS vllm VLLM_PYTHON' >&2; exit 2; }
model="$(cd "$1" && pwd)" prompts="$(realpath "$2")" kind="$3" server="$4" gguf="${5:-}"
num="${NUM:-24}" length="${LENGTH:-48}" port="${PORT:-18377}"
. "$(dirname "$0")/runtimes/place.sh"
mkdir target
for file in "$model"/*.json "$model"/*.jinja; do
    case "$file" in *.index.json | *'*'*) ;; *) cp "$file" target/ ;; esac
done

serve() {
    case "$kind" in
        llama.cpp) setsid "$server" -m "$gguf" --host 127.0.0.1 --port "$port" -c $((8 * 2048)) --parallel 8 > server.log 2>&1 & ;;
        vllm) setsid env VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 "$server" \
            -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name served --host 127.0.0.1 --port "$port" --max-model-len 2048 --dtype bfloat16 --enforce-eager > server.log 2>&1 & ;;
        *) echo "unknown server '$kind'" >&2; exit 2 ;;
    esac
    await_server "$port"
}

recipe() { # NAME KEYS SERVER_KEYS
    cat > "$1.toml" <<TOML
name = "$1"
seed = 7
[models]
target = "target"
[drafters.draft]
kind = "model"
model = "$model"
[data]
prompts = ["$prompts"]
num_prompts = $num
max_new_tokens = $length
skip_long_prompts = true
responses = "server"
$2
[data.server]
urls = ["http://127.0.0.1:$port/v1"]
model = "served"
concurrency = 8
retries = 30
$3
[tune]
num_prompts = 8
[tune.costs]
draft_ms = 5
target_ms = 20
[evaluate]
prompts = ["$prompts"]
num_prompts = 4
max_new_tokens = $length
skip_long_prompts = true
decodings = ["greedy"]
TOML
}
journal() { if [ -f "data/$1/served.jsonl" ]; then wc -l < "data/$1/served.jsonl"; else echo 0; fi; }
# Waits until a build has written a number of responses.
reach() { # NAME RESPONSES
    while [ "$(journal "$1")" -lt "$2" ]; do
        kill -0 "$build" 2> /dev/null || { cat "$1.log" >&2; exit 1; }
        sleep 0.1
    done
}
tell() { # NAME
    "$binary" --json inspect "data/$1" | python3 -c '
import json, sys
name, shown = sys.argv[1], json.load(sys.stdin)
keys = ["num_rows", "num_response_tokens", "greedy_agreement", "mean_overlap", "mean_acceptance_prob", "mean_outside_mass"]
print(name + ": " + ", ".join(f"{key} {shown[key]:.6g}" for key in keys if shown.get(key) is not None))' "$1"
}
once() { # NAME
    python3 - "data/$1/served.jsonl" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1]) if line.strip()]
requests = {line["request"] for line in lines}
if len(requests) < len(lines):
    sys.exit(f"{len(lines) - len(requests)} responses were asked for twice")
print(f"{len(lines)} responses, each asked for once")
PY
}

serve
recipe greedy 'temperature = 0.0' ''
"$binary" build-data greedy.toml > /dev/null 2> greedy.log &
build=$!
reach greedy $((num / 3))
kill -9 "$build"
wait "$build" 2> /dev/null || true
echo "killed after $(journal greedy) responses"
"$binary" build-data greedy.toml 2>&1 | grep -v '^servers\|^build-data  ' || true
once greedy
tell greedy
recipe sampled 'temperature = 1.0' 'max_outside_mass = 1.0'
"$binary" build-data sampled.toml > /dev/null 2> sampled.log &
build=$!
reach sampled $((num / 3))
stop
echo "the server was killed after $(journal sampled) responses, and came back"
serve
wait "$build" || { cat sampled.log >&2; exit 1; }
grep 'known but for' sampled.log
once sampled
tell sampled
recipe nucleus $'temperature = 0.8\ntop_p = 0.9' ''
"$binary" build-data nucleus.toml 2>&1 | grep 'known but for\|left out' || true
tell nucleus
for stage in record tune replay; do
    "$binary" --quiet "$stage" greedy.toml > "$stage.txt"
    echo "$stage: $(grep -m 1 -i 'draft' "$stage.txt" | tr -s ' ')"
done
