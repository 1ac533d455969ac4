#!/usr/bin/env bash
# Proves that missing, duplicate or changed inputs never go into an output.
#
#   crates/xtask/benches/faults.sh [FAULTS] [SEED]
#
# Builds data and trains a head and an adapter on the embedded pair in a temporary directory, with the release binary of
# the repository's root. Then, FAULTS (60) times, it breaks or changes one input, runs every command that reads it, and
# restores the input. Each command must exit with code 1 and one message that names the file or the key, and write nothing.
# A changed byte in a shard may leave readable rows: then earlier trainings must not count as trained on them. At the end
# all files must be as at the beginning, and the commands must accept them.
set -euo pipefail

faults=${1:-60}
RANDOM=${2:-1}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
[ -x "$binary" ] || { echo "build first: cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work" "$work.whole" "$work.tree"' EXIT
cd "$work"
cp -r "$root/checkpoints/tiny" models
cp -r models/target other-target
cp -r models/draft other-draft
head -n 150 "$root/data/tiny/prompts/train.jsonl" > train.jsonl
head -n 6 "$root/data/tiny/prompts/test.jsonl" > test.jsonl
cat > faults.toml <<'RECIPE'
[models]
target = "models/target"
[data]
prompts = ["train.jsonl"]
max_new_tokens = 16
[drafters.draft]
kind = "model"
model = "models/draft"
[drafters.draft.head]
num_layers = 1
[drafters.draft.head.optimizer]
num_epochs = 1
validation_fraction = 0.2
[drafters.adapter]
kind = "adapter"
exit_layer = 2
[drafters.adapter.optimizer]
num_epochs = 1
validation_fraction = 0.2
[tune]
num_prompts = 4
[evaluate]
prompts = ["test.jsonl"]
max_new_tokens = 16
decodings = ["greedy"]
RECIPE

draftsmith() { "$binary" --quiet "$@"; }
# Flips a bit of one byte of a file, at a position that readers are sure to read.
flip() { # FILE FROM TO
    local at=$(($2 + (RANDOM * 32768 + RANDOM) % ($3 - $2)))
    local byte
    byte=$(od -An -tu1 -j "$at" -N1 "$1" | tr -d ' ')
    printf "\\x$(printf %x $((byte ^ 1)))" | dd of="$1" bs=1 seek="$at" conv=notrunc status=none
}
flip_weight() { local size; size=$(stat -Lc %s "$1"); flip "$1" $((size / 2)) "$size"; }
tree() { find data checkpoints -type f ! -name '.*.lock' -exec sha256sum {} + | sort -k2; }

draftsmith build-data faults.toml
shards=$(find data/faults -name 'responses-*.parquet' | wc -l)
draftsmith train-head faults.toml > /dev/null
draftsmith train-adapter faults.toml > /dev/null
draftsmith record faults.toml > /dev/null
cp -r . "$work.whole"
tree > "$work.tree"

readers=("train-head faults.toml" "train-adapter faults.toml" "record faults.toml" "replay faults.toml")
builder="build-data faults.toml"
head_users=("generate --target models/target --draft models/draft --head checkpoints/faults/draft/head --prompt x"
    "check checkpoints/faults/draft/head" "evaluate faults.toml")
adapter_users=("generate --target models/target --adapter checkpoints/faults/adapter --prompt x"
    "check checkpoints/faults/adapter")
commands=0
tree > before

# Runs a command, which must fail and name every given text.
refused() { # COMMAND TEXT...
    local command=$1 text code=0
    shift
    # shellcheck disable=SC2086
    draftsmith $command > out 2> err || code=$?
    commands=$((commands + 1))
    [ "$code" = 1 ] || { echo "$fault: \`$command\` ended with $code"; cat err; exit 1; }
    [ "$(grep -c '^error: ' err)" = 1 ] || { echo "$fault: \`$command\` said"; cat err; exit 1; }
    for text in "$@"; do
        grep -qF -- "$text" err || { echo "$fault: \`$command\` does not name $text"; cat err; exit 1; }
    done
}
readers_refuse() { local command; for command in "${readers[@]}"; do refused "$command" "$@"; done; }
users_refuse() {
    local command
    for command in "${head_users[@]}" "${adapter_users[@]}"; do refused "$command" "$@"; done
}
name_of() { printf 'responses-%05d.parquet' "$1"; }

declare -A counts
for ((n = 0; n < faults; n++)); do
    one=$((RANDOM % shards))
    other=$(((one + 1 + RANDOM % (shards - 1)) % shards))
    kinds=(missing copied extra renamed cut byte target draft index eos special template tokenizer prompts setting pair)
    kind=${kinds[$((n % ${#kinds[@]}))]}
    fault="fault $n, $kind"
    counts[$kind]=$((${counts[$kind]:-0} + 1))
    shard=data/faults/$(name_of $one)
    case $kind in
        missing)
            rm "$shard"
            tree > before
            readers_refuse "$(name_of $one)" --incomplete-data
            ;;
        copied)
            cp "data/faults/$(name_of $other)" "$shard"
            tree > before
            readers_refuse "$(name_of $one)" "$(name_of $other)"
            refused "$builder" "$(name_of $one)" "$(name_of $other)"
            ;;
        extra)
            cp "$shard" "data/faults/$(name_of "$shards")"
            tree > before
            readers_refuse "$(name_of "$shards")"
            refused "$builder" "$(name_of "$shards")"
            ;;
        renamed)
            mv "$shard" "data/faults/responses-$one.parquet"
            tree > before
            readers_refuse "responses-$one.parquet"
            refused "$builder" "responses-$one.parquet"
            ;;
        cut)
            truncate -s $((RANDOM % $(stat -c %s "$shard"))) "$shard"
            tree > before
            readers_refuse "$(name_of $one)"
            refused "$builder" "$(name_of $one)"
            ;;
        byte)
            whole=$(draftsmith inspect data/faults --json | jq -r .hash)
            flip "$shard" 0 "$(stat -c %s "$shard")"
            tree > before
            if draftsmith inspect data/faults --json > out 2> err && [ "$(jq -r .hash out)" != "$whole" ]; then
                # The rows are readable but different, so the head is trained again.
                draftsmith train-head faults.toml --json > out
                commands=$((commands + 1))
                [ "$(jq .kept out)" = false ] || { echo "$fault: the head is kept"; exit 1; }
                tree > before
            elif [ -s err ]; then
                readers_refuse "$(name_of $one)"
            fi
            ;;
        target | draft)
            flip_weight "models/$kind/model.safetensors"
            readers_refuse "\`$kind\` = "
            refused "$builder" "\`$kind\` = "
            for command in "${head_users[@]}"; do refused "$command" "another $kind"; done
            if [ $kind = target ]; then
                for command in "${adapter_users[@]}"; do refused "$command" "another target"; done
            fi
            ;;
        index)
            # The same weights under a name without an extension, and through a link.
            mkdir blobs
            mv models/target/model.safetensors blobs/6a1f
            ln -s ../../blobs/6a1f models/target/weights
            length=$(od -An -tu8 -N8 blobs/6a1f | tr -d ' ')
            head -c $((8 + length)) blobs/6a1f | tail -c "$length" |
                jq '{weight_map: (del(.__metadata__) | map_values("weights"))}' > models/target/model.safetensors.index.json
            readers_refuse "\`target\` = "
            find data checkpoints -type f -delete
            draftsmith build-data faults.toml
            draftsmith train-head faults.toml > /dev/null
            tree > before
            flip_weight blobs/6a1f
            refused "train-head faults.toml" "\`target\` = "
            refused "evaluate faults.toml" "another target"
            ;;
        eos)
            echo "{\"eos_token_id\": [1, $((RANDOM % 1000 + 2))]}" > models/target/generation_config.json
            readers_refuse "\`eos_token_ids\` = [1], which is [1,"
            refused "$builder" "\`eos_token_ids\` = [1], which is [1,"
            users_refuse "\`eos_token_ids\` = [1], which is [1,"
            ;;
        special)
            sed -i "s/\"<s>\"/\"<s$RANDOM>\"/" models/target/tokenizer_config.json
            readers_refuse "\`special_tokens\` = "
            users_refuse "\`special_tokens\` = "
            ;;
        template)
            echo "{# $RANDOM #}" >> models/target/chat_template.jinja
            readers_refuse "\`chat_template\` = "
            users_refuse "\`chat_template\` = "
            ;;
        tokenizer)
            sed -i 's/"individual_digits": true/"individual_digits": false/' models/target/tokenizer.json
            readers_refuse "\`tokenizer\` = "
            users_refuse "\`tokenizer\` = "
            ;;
        prompts)
            sed -i "$((RANDOM % 150 + 1))s/\"prompt\":\"/&$RANDOM /" train.jsonl
            readers_refuse "\`prompts[0]\` = " train.jsonl
            refused "$builder" "\`prompts[0]\` = "
            ;;
        setting)
            sets=(data.temperature=0.5 data.top_p=0.9 data.top_k=5 data.max_new_tokens=17 data.num_prompts=149)
            keys=(temperature top_p top_k max_new_tokens limit)
            which=$((RANDOM % 5))
            for command in "${readers[@]}" "$builder"; do
                refused "$command --set ${sets[$which]}" "\`${keys[$which]}\` = "
            done
            ;;
        pair)
            pair=(target draft)
            keys=(models.target drafters.draft.model)
            at=$((RANDOM % 2))
            which=${pair[$at]} key=${keys[$at]}
            flip_weight "other-$which/model.safetensors"
            for command in "${readers[@]}" "$builder"; do
                refused "$command --set $key=other-$which" "\`$which\` = "
            done
            refused "evaluate faults.toml --set $key=other-$which" "another $which"
            ;;
    esac
    tree > after
    diff before after > /dev/null || { echo "$fault: something was written"; diff before after; exit 1; }
    find . -mindepth 1 -delete
    cp -r "$work.whole/." .
    tree > before
done

diff "$work.tree" before > /dev/null || { echo "a file differs from the beginning"; exit 1; }
for command in train-head train-adapter; do
    draftsmith $command faults.toml --json > out
    [ "$(jq '[..|objects|.kept|select(. != null)] | unique == [true]' out)" = true ] || { echo "$command: not kept"; exit 1; }
done
summary=$(for kind in "${!counts[@]}"; do echo "${counts[$kind]} $kind"; done | sort -k2 | paste -sd, | sed 's/,/, /g')
echo "$faults faults ($summary), $commands commands: each was refused by name or noticed, and nothing was written"
