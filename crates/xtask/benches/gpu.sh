#!/usr/bin/env bash
# A bounded look at a GPU: its tokens beside the CPU's, the time to the first one, decoding and both trainings at the
# shapes of a 7B model in turn with torch, and whether it computes what the CPU computes. Prints as it goes; the first
# results come within a minute. Writes a table, and every run as a line of JSON.
#
#   crates/xtask/benches/gpu.sh pack DIR
#       builds the binary and the bench with the feature `cuda` and leaves `gpu.tar.xz` in DIR, for a machine without a
#       toolchain. Arguments after DIR go to cargo.
#   crates/xtask/benches/gpu.sh run [--programs gpu.tar.xz] [--python PATH] [--out DIR] [--device cuda] [--rounds 1]
#                                        [--limit 540] [--model DIR] [-- SHAPES]
#       Without `--programs` both are built. PATH is a Python with torch; without it only draftsmith runs. SHAPES go to
#       both sides, as in `--layers 4 --seq 512`. `--out` gets `runs.jsonl` and `table.md`. After `--limit` seconds the
#       rest is skipped by name. With a checkpoint as `--model` it also measures how far rounding moves its choices.
#
# NVRTC and CUDA's headers come from CUDA_PATH or /usr/local/cuda, otherwise from torch's packages. The exit code
# is 1 if the GPU's tokens, logits, losses or gradients differ from the CPU's, if rounding moves choices by more
# than the tolerance, if a side's operation count differs, or if no time was left to compare tokens or check.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

fail() {
    echo "gpu.sh: $*" >&2
    exit 2
}

pack() {
    [ $# -ge 1 ] || fail 'pack: expected a directory'
    local dir="$1" programs binary bench
    shift
    mkdir -p "$dir/programs"
    programs="$("$here/programs.sh" gpu --features draftsmith-cli/cuda,xtask/cuda "$@")"
    binary="${programs%$'\n'*}" bench="${programs#*$'\n'}"
    strip -o "$dir/programs/draftsmith" "$binary"
    strip -o "$dir/programs/gpu" "$bench"
    # They share most code.
    tar c -C "$dir/programs" draftsmith gpu | xz --lzma2=preset=4,dict=192MiB > "$dir/gpu.tar.xz"
    rm -r "$dir/programs"
    ls -l "$dir/gpu.tar.xz"
}

# The path in which cubecl looks for NVRTC and for the headers of kernels.
find_cuda() {
    local of_torch=''
    if [ -n "$python" ]; then
        of_torch="$("$python" - << 'END' || true
import glob
import importlib.util

spec = importlib.util.find_spec("nvidia")
for place in spec.submodule_search_locations if spec else []:
    found = glob.glob(f"{place}/*/lib/libnvrtc.so*")
    headers = glob.glob(f"{place}/*/include/cuda_fp16.h")
    if found and headers:
        print(found[0], headers[0])
        break
END
        )"
    fi
    if [ -z "${CUDA_PATH:-}" ] && [ ! -e /usr/local/cuda ] && [ -n "$of_torch" ]; then
        CUDA_PATH="$(dirname "$(dirname "${of_torch#* }")")"
        export CUDA_PATH
    fi
    local library="${of_torch%% *}" cuda="${CUDA_PATH:-/usr/local/cuda}" found
    for found in "$cuda"/lib64/libnvrtc.so* "$cuda"/lib/libnvrtc.so*; do
        [ -e "$found" ] && library="$found" && break
    done
    if [ -n "$library" ]; then
        # By its plain name, because packages only have a name with a version.
        mkdir -p "$place/nvrtc"
        ln -sf "$library" "$place/nvrtc/libnvrtc.so"
        export LD_LIBRARY_PATH="$place/nvrtc:$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
    echo "NVRTC ${library:-not found}, headers in $cuda/include"
}

# Runs a command for at most so many seconds, within what is left of all; says how it went.
step() { # SECONDS LABEL COMMAND...
    local seconds="$1" label="$2" begun=$SECONDS status=0
    shift 2
    [ $((limit - SECONDS)) -ge "$seconds" ] || seconds=$((limit - SECONDS))
    if [ "$seconds" -lt 5 ]; then
        echo "[$SECONDS s] $label: no time left"
        return 1
    fi
    timeout -k 3 "$seconds" "$@" || status=$?
    echo "[$SECONDS s] $label: $((SECONDS - begun)) s$([ "$status" = 0 ] || echo ", FAILED ($status)")"
    return "$status"
}

# A step that prints a line of JSON, which is kept with the card's peak memory.
measured() { # SECONDS LABEL COMMAND...
    local log="$place/memory" sampler='' status=0
    if [ "$device" != cpu ] && command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=200 > "$log" &
        sampler=$!
    fi
    step "$@" > "$place/line" || status=$?
    if [ -n "$sampler" ]; then
        kill "$sampler"
        wait "$sampler" 2> /dev/null || true
    fi
    grep -v '^{' "$place/line" || true
    local line
    line="$(grep '^{' "$place/line" | tail -n 1 || true)"
    [ -n "$line" ] || return 0
    if [ -n "$sampler" ] && [ -s "$log" ]; then
        line="${line%\}},\"card_bytes\":$(($(sort -n "$log" | tail -n 1) * 1048576))}"
    fi
    echo "$line" | tee -a "$out/runs.jsonl"
}

run() {
    local programs='' rounds=1 shapes=() status=0 round work bench draftsmith name
    device=cuda python='' out=. model='' limit=540
    while [ $# -gt 0 ]; do
        case "$1" in
        --)
            shift
            shapes=("$@")
            break
            ;;
        --programs | --python | --out | --device | --rounds | --limit | --model)
            [ $# -ge 2 ] || fail "$1: expected a value"
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        *) fail "\`$1\`: expected an option or \`--\`" ;;
        esac
    done
    place="$(mktemp -d)"
    trap 'rm -rf "$place"' EXIT
    mkdir -p "$out"
    : > "$out/runs.jsonl"
    if [ -n "$programs" ]; then
        tar xJf "$programs" -C "$place"
        draftsmith="$place/draftsmith" bench="$place/gpu"
    else
        local features=()
        [ "$device" = cpu ] || features=(--features draftsmith-cli/cuda,xtask/cuda)
        programs="$("$here/programs.sh" gpu "${features[@]}")"
        draftsmith="${programs%$'\n'*}" bench="${programs#*$'\n'}"
    fi
    [ "$device" = cpu ] || find_cuda
    SECONDS=0

    echo '== the first tokens, and the CPU beside them'
    for name in cpu "$device"; do
        step 120 "generate on $name" "$draftsmith" generate --device "$name" --greedy --max-new-tokens 60 --quiet \
            --target "$here/../../../checkpoints/tiny/target" --prompt 'What is 47 + 85? Show the steps.' > "$place/$name" || status=1
        grep '^\[' "$place/$name"
        sed -i '/^\[/d' "$place/$name"
    done
    if [ ! -s "$place/cpu" ] || [ ! -s "$place/$device" ]; then
        echo 'NOT COMPARED: a device gave no words'
        status=1
    elif cmp "$place/cpu" "$place/$device"; then
        echo "same: all $(wc -w < "$place/cpu") words"
    else
        echo "DIFFERENT: the words on \`$device\`"
        status=1
    fi

    echo '== decoding'
    for dtype in bf16 f32; do
        [ "$device" != cpu ] || [ "$dtype" = f32 ] || continue
        measured 60 "decode, $dtype" "$bench" --device "$device" --work decode --dtype "$dtype" --json "${shapes[@]}"
    done

    echo '== trainings in turn'
    for ((round = 1; round <= rounds; round++)); do
        for work in adapter head eagle3; do
            measured 90 "$work, ours" "$bench" --device "$device" --work "$work" --json "${shapes[@]}"
            [ -n "$python" ] || continue
            measured 60 "$work, torch eager" "$python" "$here/peers/gpu.py" --device "$device" --work "$work" "${shapes[@]}"
            measured 90 "$work, torch compiled" "$python" "$here/peers/gpu.py" --device "$device" --work "$work" --compile "${shapes[@]}"
        done
    done

    echo '== compare decoding and training with the CPU'
    step 120 check "$bench" --device "$device" --check || status=1
    if [ -n "$model" ]; then
        for dtype in f32 bf16; do
            step 60 "rounding, $dtype" "$bench" --device "$device" --dtype "$dtype" --rounding "$model" || status=1
        done
    fi

    echo '== the table'
    # Printing it needs no torch.
    if [ -n "$python" ] || python="$(command -v python3)"; then
        "$python" "$here/peers/gpu.py" --table "$out/runs.jsonl" | tee "$out/table.md" || status=1
    fi
    exit "$status"
}

case "${1:-}" in
pack | run)
    command="$1"
    shift
    "$command" "$@"
    ;;
*) fail 'expected `pack DIR` or `run`' ;;
esac
