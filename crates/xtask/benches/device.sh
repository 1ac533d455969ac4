#!/usr/bin/env bash
# Checks that a device computes what the CPU computes.
#
#   crates/xtask/benches/device.sh DEVICE BINARY DIFFERENCES
#
# BINARY is a `draftsmith` with the device, DIFFERENCES the bench of that name. Greedy tokens must equal the CPU's, for
# every checkpoint in tests/fixtures (all families) and for the embedded pair, plain and with its draft, head, adapter
# and EAGLE-3 drafter. So must responses, draft tokens, recorded candidates and the counts of an evaluation. Labels and the weights of
# short trainings may differ within the tolerances below. Works in a temporary directory and leaves the repository
# unchanged. The exit code is 1 if anything differs.
set -euo pipefail
[ $# -eq 3 ] || { echo 'expected DEVICE BINARY DIFFERENCES' >&2; exit 2; }
device="$1" binary="$(realpath "$2")" differences="$(realpath "$3")"
root="$(cd "$(dirname "$0")/../../.." && pwd)"

# Tolerances for f32 sums in another order: of numbers near 1 after some layers, and of weights after a few steps of AdamW.
labels=1e-4 weights=1e-6

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
status=0
# Prints the output of a check and records a failure.
compared() { # WHAT COMMAND...
    local what="$1" said
    shift
    if said="$("$@" 2>&1)"; then
        echo "same: $what${said:+ ($said)}"
    else
        echo "DIFFERENT: $what: $said"
        status=1
    fi
}
equal() { [ -n "$1" ] && [ "$1" = "$2" ] || { echo "$2 for $1"; return 1; }; }
tokens() { # DEVICE ARGUMENT...
    "$binary" generate --quiet --device "$1" --json --greedy "${@:2}" |
        sed -n '/"token_ids"/,/\]/p' | tr -d ' \n'
}
same_tokens() { # WHAT ARGUMENT...
    compared "$1" equal "$(tokens cpu "${@:2}")" "$(tokens "$device" "${@:2}")"
}

echo "== every family on \`$device\`"
# The words of these tokenizers are their ids.
words="$(for id in {0..95}; do printf '"t%d": %d, ' "$id" "$id"; done)"
cat > tokenizer.json <<END
{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
 "model": {"type": "WordLevel", "vocab": {${words%, }}, "unk_token": "t0"}}
END
prompt="$(for nth in {1..20}; do printf 't%d ' $((nth * 37 % 93 + 3)); done)"
for fixture in "$root"/tests/fixtures/*/config.json; do
    name="$(basename "$(dirname "$fixture")")"
    cp -r "$(dirname "$fixture")" "$name"
    cp tokenizer.json "$name"
    same_tokens "$name" --target "$name" --raw --prompt "$prompt" --max-new-tokens 40
done

echo '== the embedded pair'
ln -s "$root/checkpoints/tiny" models
head -n 12 "$root/data/tiny/prompts/train.jsonl" > train.jsonl
head -n 2 "$root/data/tiny/prompts/test.jsonl" > test.jsonl
for name in cpu "$device"; do
    cat > "$name.toml" <<END
name = "$name"
[models]
target = "models/target"
[data]
prompts = ["train.jsonl"]
max_new_tokens = 24
[drafters.draft]
kind = "model"
model = "models/draft"
[drafters.draft.head]
num_layers = 1
[drafters.draft.head.optimizer]
num_epochs = 2
gradient_accumulation = 2
validation_fraction = 0.2
[drafters.adapter]
kind = "adapter"
exit_layer = 2
draft_vocabulary = 512
rules = { fixed = [2], confidence = [0.6] }
[drafters.adapter.optimizer]
num_epochs = 2
validation_fraction = 0.2
[drafters.eagle]
kind = "eagle3"
num_steps = 2
rules = { fixed = [2] }
[drafters.eagle.optimizer]
num_epochs = 2
validation_fraction = 0.2
[tune]
num_prompts = 2
[evaluate]
prompts = ["test.jsonl"]
max_new_tokens = 16
decodings = ["greedy"]
[evaluate.rules]
fixed = [3]
head = [0.5]
END
    for stage in build-data train-head train-adapter record evaluate; do
        begun=$SECONDS
        "$binary" "$stage" "$name.toml" --device "$name" --quiet > /dev/null
        echo "$stage on $name: $((SECONDS - begun)) s"
    done
done
compared 'responses and labels' "$differences" "data/$device" data/cpu "$labels"
for part in draft/head adapter eagle; do
    compared "the $part" "$differences" {"checkpoints/$device",checkpoints/cpu}/"$part"/model.safetensors "$weights"
done
for rollouts in data/cpu/rollouts-*.parquet; do
    compared "$(basename "$rollouts")" "$differences" "data/$device/$(basename "$rollouts")" "$rollouts" "$labels"
done
counts() {
    sed -n 's/.*\("drafter":.*"num_discarded":[0-9]*\).*\("lossless":[a-z]*\).*/\1 \2/p' \
        "checkpoints/$1/evaluation/results.json"
}
compared 'what the evaluation counts' equal "$(counts cpu)" "$(counts "$device")"

echo '== generation'
for prompt in 'What is 47 + 85? Show the steps.' 'Convert 3 km to m.'; do
    for with in '' '--draft models/draft' '--draft models/draft --head checkpoints/cpu/draft/head' \
        '--adapter checkpoints/cpu/adapter'; do
        # shellcheck disable=SC2086
        same_tokens "${with:-alone}: $prompt" --target models/target --prompt "$prompt" --max-new-tokens 60 $with
    done
    same_tokens "EAGLE-3: $prompt" --recipe cpu.toml --drafter eagle --prompt "$prompt" --max-new-tokens 60
done
exit "$status"
