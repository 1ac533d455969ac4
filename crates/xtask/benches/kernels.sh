#!/usr/bin/env bash
# Counts the kernels that software Vulkan compiles, which is what a user waits for, and fails above the bounds.
#
#   crates/xtask/benches/kernels.sh [BINARY]
#
# Needs Debian's mesa-vulkan-drivers (lavapipe). Without BINARY it builds one with the feature `wgpu`. Prints distinct
# kernels, launches, and seconds from empty caches and from full ones. Works in a temporary directory.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../../.." && pwd)"

# Distinct kernels. The aims for the last three are 80, 90 and 120.
declare -A bound=([generate]=20 [build-data]=20 [train-head]=85 [adapter]=104 [eagle3]=128)

binary="${1:-}"
if [ -z "$binary" ]; then
    # As `vulkan.sh` builds it, so that either finds what the other compiled.
    binary="$("$here/programs.sh" differences --features draftsmith-cli/wgpu,xtask/wgpu | head -n 1)"
fi
binary="$(realpath "$binary")"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
mkdir runtime
chmod 700 runtime
export XDG_RUNTIME_DIR="$place/runtime"
ln -s "$root/checkpoints/tiny" models
head -n 12 "$root/data/tiny/prompts/train.jsonl" > train.jsonl

optimizer='optimizer = { num_epochs = 2, validation_fraction = 0.2 }'
recipe() { # NAME DRAFTER
    cat > "$1.toml" <<END
name = "$1"
[models]
target = "models/target"
[data]
prompts = ["train.jsonl"]
max_new_tokens = 24
$2
END
}
recipe head "[drafters.draft]
kind = 'model'
model = 'models/draft'
[drafters.draft.head]
num_layers = 1
optimizer = { num_epochs = 2, validation_fraction = 0.2, gradient_accumulation = 2 }"
recipe adapter "[drafters.adapter]
kind = 'adapter'
exit_layer = 2
draft_vocabulary = 512
$optimizer"
recipe eagle3 "[drafters.eagle]
kind = 'eagle3'
num_steps = 2
$optimizer"

status=0
printf '%-12s %8s %8s %9s %8s %8s\n' work kernels bound launches empty full
# Runs a command from empty caches and from full ones.
counted() { # WORK COMMAND...
    local work="$1" begun line kernels empty seconds tenths turn
    shift
    rm -rf cache
    mkdir cache
    export XDG_CACHE_HOME="$place/cache" MESA_SHADER_CACHE_DIR="$place/cache"
    for turn in empty full; do
        rm -rf data/again checkpoints
        begun="${EPOCHREALTIME/./}"
        "$binary" "$@" --device wgpu --verbose > log 2>&1 || { cat log; exit 1; }
        tenths=$(((${EPOCHREALTIME/./} - begun) / 100000))
        seconds="$((tenths / 10)).$((tenths % 10))"
        [ "$turn" = full ] || empty="$seconds"
    done
    line="$(grep 'distinct kernels' log)"
    kernels="${line%% *}"
    line="${line##*; }"
    printf '%-12s %8s %8s %9s %6s s %6s s\n' "$work" "$kernels" "${bound[$work]}" "${line%% *}" "$empty" "$seconds"
    [ "$kernels" -le "${bound[$work]}" ] || status=1
}
counted generate generate --target models/target --greedy --max-new-tokens 40 --prompt 'What is 47 + 85? Show the steps.'
for name in head adapter eagle3; do
    "$binary" build-data "$name.toml" --quiet > /dev/null
done
cp -r data built
rm -rf data/head
sed 's/^name = .*/name = "again"/' head.toml > again.toml
counted build-data build-data again.toml
cp -r built/head data/head
counted train-head train-head head.toml
counted adapter train-adapter adapter.toml
counted eagle3 train-adapter eagle3.toml
exit "$status"
