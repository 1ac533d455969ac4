#!/usr/bin/env bash
# Holds block drafters that draftsmith trained and exported to llama.cpp's server.
#
#   crates/xtask/benches/dspark.sh PYTHON LLAMA_CPP
#
# PYTHON has torch, transformers 5.23 or newer, safetensors, gguf and sentencepiece. LLAMA_CPP is a source of llama.cpp with a
# built `build/bin/llama-server`. Trains drafters of the embedded target: with a Markov head (`block`), with a confidence head
# too (`confident`), without a Markov head (`plain`) and over 400 tokens (`narrow`). A copy of each in the fill-in layout
# drafts worse, since its rows are shifted by one, but must draft the same in both programs. `dflash` is the fill-in copy of
# `plain` without our export's zero Markov head. Compares tokens, and drafted and accepted tokens per prompt. With TARGET,
# DRAFTER and PROMPTS in the environment, two directories and a file, it compares that exported drafter instead. COUNT is the
# number of prompts. Works in a temporary directory. The exit code is 1 if anything differs.
set -euo pipefail
[ $# -eq 2 ] || { echo 'expected PYTHON LLAMA_CPP' >&2; exit 2; }
python="$1" llama_cpp="$2"
. "$(dirname "$0")/runtimes/place.sh"
target="${TARGET:-$root/checkpoints/tiny/target}" prompts="${PROMPTS:-$root/data/tiny/prompts/test.jsonl}" count="${COUNT:-12}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error OMP_NUM_THREADS=1
run() { "$binary" --quiet "$@" > run.log; }
failed=0
compare() { # DRAFTER EXPORT
    "$python" "$checks/dspark_llama.py" "$binary" "$llama_cpp" "$target" "$1" "$2" "$prompts" "$count" 2> check.log \
        || { failed=1; tail -5 check.log; }
}
if [ -n "${DRAFTER:-}" ]; then
    compare "$DRAFTER" "$DRAFTER"
    exit "$failed"
fi
fill_in() { # DRAFTER COPY
    cp -r "$1" "$2"
    "$python" - "$2/config.json" <<'PY'
import json, sys
keys = json.load(open(sys.argv[1]))
keys |= {"sample_from_anchor": False, "block_size": keys["block_size"] + 1}
json.dump(keys, open(sys.argv[1], "w"))
PY
}
cat > block.toml <<TOML
name = "block"
seed = 42
[models]
target = "$target"
[data]
prompts = ["$root/data/tiny/prompts/train.jsonl"]
num_prompts = 400
temperature = 1.0
max_new_tokens = 96
[training]
optimizer = { learning_rate = 2e-3, num_epochs = 4 }
[drafters.block]
kind = "block"
[drafters.plain]
kind = "block"
markov_rank = 0
[drafters.narrow]
kind = "block"
draft_vocabulary = 400
TOML
trained=checkpoints/block
run build-data block.toml
run train-drafter block.toml
run attach-head block.toml "$trained/confident" --drafter block
mkdir exported
for name in block confident plain narrow; do
    fill_in "$trained/$name" "$trained/$name-fill-in"
    for layout in "$name" "$name-fill-in"; do
        run export --for dspark "$trained/$layout" "exported/$layout"
        compare "$trained/$layout" "exported/$layout"
    done
done
cp -r "$trained/plain-fill-in" dflash
compare dflash dflash
exit "$failed"
