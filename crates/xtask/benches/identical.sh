#!/usr/bin/env bash
# Compares what two builds of the program write: trained drafters, recordings, exports, JSON documents and generated tokens.
#
#   crates/xtask/benches/identical.sh OLD NEW
#
# OLD and NEW are binaries. Both train one drafter of each architecture on the embedded target, are stopped after three steps and
# resumed, record, tune at given costs, replay, export in every form and generate. Every file must have the same bytes, without
# times and paths. Works in a temporary directory. The exit code is 1 if a file differs.
set -euo pipefail
[ $# -eq 2 ] || { echo 'expected OLD NEW' >&2; exit 2; }
old="$(realpath "$1")" new="$(realpath "$2")"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
optimizer='optimizer = { num_epochs = 2, learning_rate = 2e-3, validation_fraction = 0.3 }'
adapters='decoder-layer attention mlp-only attention-with-head'
drafters="$adapters eagle narrow block markov"

recipe() {
    cat <<TOML
name = "kinds"
seed = 7
[models]
target = "$root/checkpoints/tiny/target"
[data]
prompts = ["$root/data/tiny/prompts/train.jsonl"]
num_prompts = 30
max_new_tokens = 24
temperature = 0
[tune]
prompts = ["$root/data/tiny/prompts/tune.jsonl"]
num_prompts = 6
max_candidate_length = 4
[tune.costs]
target_ms = 20
draft_ms = { $(for name in $drafters; do printf '%s = 2, ' "$name"; done | sed 's/, $//') }
[evaluate]
prompts = ["$root/data/tiny/prompts/test.jsonl"]
num_prompts = 6
max_new_tokens = 24
decodings = ["greedy", "sampled"]
[drafters.eagle]
kind = "eagle3"
$optimizer
[drafters.narrow]
kind = "eagle3"
draft_vocabulary = 300
num_steps = 3
$optimizer
[drafters.block]
kind = "block"
block_size = 3
markov_rank = 0
$optimizer
[drafters.markov]
kind = "block"
block_size = 4
markov_rank = 8
num_layers = 1
loss = "dspark"
$optimizer
TOML
    for architecture in $adapters; do
        printf '[drafters.%s]\nkind = "adapter"\narchitecture = "%s"\n%s\n' "$architecture" "$architecture" "$optimizer"
    done
}

# Removes times, speeds and paths from JSON.
plain() { sed -E 's/"[a-z_]*(duration|seconds|per_second|_ms|elapsed)[a-z_]*":[^,}]*,?//g; s#"[^"]*/(old|new)/#"#g'; }

for build in old new; do
    binary="${!build}"
    mkdir "$place/$build"
    cd "$place/$build"
    recipe > kinds.toml
    run() { "$binary" --quiet "$@"; }
    run build-data kinds.toml
    for name in $drafters; do
        run train-drafter kinds.toml "$name" --steps 3 > /dev/null 2>&1 || true
        run train-drafter kinds.toml "$name" --json | plain > "train-$name.json"
    done
    for stage in record tune replay; do run "$stage" kinds.toml --json | plain > "$stage.json"; done
    for name in $drafters; do
        for form in draft-model eagle3 dspark transformers vllm kangaroo; do
            run export --for "$form" "checkpoints/kinds/$name" "exported/$form-$name" > /dev/null 2> "refused-$form-$name.txt" || true
        done
        run generate --target "$root/checkpoints/tiny/target" --drafter "checkpoints/kinds/$name" --raw --prompt 'def add(a, b):' \
            --max-new-tokens 48 --json | plain > "generated-$name.json"
        run inspect "checkpoints/kinds/$name" --json | plain > "inspected-$name.json"
        run server doctor "checkpoints/kinds/$name" --target "$root/checkpoints/tiny/target" --json 2> /dev/null | plain > "doctor-$name.json" || true
    done
    find . -name '*.json' -not -path '*/tuning/*' | while read -r file; do plain < "$file" > "$file.plain" && mv "$file.plain" "$file"; done
    find . -type f \( -name '*.safetensors' -o -name '*.json' -o -name '*.parquet' -o -name 'refused-*' \) -not -path '*/tuning/*' \
        | sort | xargs sha256sum > ../"$build.sums"
done
cd "$place"
if diff old.sums new.sums; then
    echo "$(wc -l < old.sums) files are identical"
else
    exit 1
fi
