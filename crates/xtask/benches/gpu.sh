#!/usr/bin/env bash
# Times both trainings at the shapes of real models on a GPU, in turn with torch eager and compiled on the same
# machine, and decoding in f32 and bf16. Writes a table, and every run as a line of JSON. First it checks that the
# GPU computes correctly.
#
#   crates/xtask/benches/gpu.sh pack DIR
#       builds with the feature `cuda` and leaves `draftsmith.xz` and `gpu.xz` in DIR, for a machine without a
#       toolchain. Arguments after DIR go to cargo.
#   crates/xtask/benches/gpu.sh run [--bench FILE] [--draftsmith FILE] [--python PATH] [--out DIR]
#                                        [--device cuda] [--rounds 2] [--model DIR] [-- SHAPES]
#       FILE is a binary or an .xz of one. Without `--bench` one is built; without `--draftsmith` greedy tokens are
#       not compared (`cuda.sh`). PATH is a Python with torch; without it only draftsmith runs. SHAPES go to both
#       sides, as in `--layers 4 --seq 512`. `--out` gets `runs.jsonl` and `table.md`. With a checkpoint as
#       `--model` it also measures how far rounding moves the checkpoint's choices.
#
# NVRTC and CUDA's headers come from CUDA_PATH or /usr/local/cuda, otherwise from torch's packages. The exit code
# is 1 if the GPU's tokens, logits, losses or gradients differ from the CPU's, if rounding moves choices by more
# than the tolerance, or if a side's operation count differs.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
manifest="$here/../Cargo.toml"

fail() {
    echo "gpu.sh: $*" >&2
    exit 2
}

# The path of the executable that cargo built last.
executable() {
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

build_bench() {
    cargo bench --no-run --bench gpu --manifest-path "$manifest" --message-format json "$@" |
        executable
}

pack() {
    [ $# -ge 1 ] || fail 'pack: expected a directory'
    local dir="$1"
    shift
    mkdir -p "$dir"
    local bench binary
    bench="$(build_bench --features cuda "$@")"
    binary="$(cargo build --release --bin draftsmith --features cuda --manifest-path "$here/../../draftsmith-cli/Cargo.toml" \
        --message-format json "$@" | executable)"
    [ -n "$bench" ] && [ -n "$binary" ] || fail 'cargo built no executable'
    local name file
    for name in gpu draftsmith; do
        [ "$name" = gpu ] && file="$bench" || file="$binary"
        strip -o "$dir/$name" "$file"
        xz -T0 -f "$dir/$name"
    done
    ls -l "$dir"
}

# An executable binary, unpacked if necessary.
unpacked() {
    case "$1" in
    *.xz)
        xz -dc "$1" > "$place/$2"
        chmod +x "$place/$2"
        echo "$place/$2"
        ;;
    *) realpath "$1" ;;
    esac
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

# Runs a command that prints a line of JSON, adds the card's peak memory, and keeps the line.
measured() {
    local label="$1" log="$place/memory" sampler='' line status=0
    shift
    if [ "$device" != cpu ] && command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=200 > "$log" &
        sampler=$!
    fi
    echo "-- $label" >&2
    line="$("$@")" || status=$?
    if [ -n "$sampler" ]; then
        kill "$sampler"
        wait "$sampler" 2> /dev/null || true
    fi
    if [ "$status" -ne 0 ] || [ "${line#\{}" = "$line" ]; then
        echo "$label failed, or printed no figures" >&2
        return 0
    fi
    if [ -n "$sampler" ]; then
        local most
        most="$(sort -n "$log" | tail -n 1)"
        line="${line%\}},\"card_bytes\":$((most * 1048576))}"
    fi
    echo "$line" | tee -a "$out/runs.jsonl" >&2
}

run() {
    local bench='' draftsmith='' rounds=2 shapes=() status=0 round work
    device=cuda python='' out=. model=''
    while [ $# -gt 0 ]; do
        case "$1" in
        --)
            shift
            shapes=("$@")
            break
            ;;
        --bench | --draftsmith | --python | --out | --device | --rounds | --model)
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
    if [ -z "$bench" ]; then
        local features=()
        [ "$device" = cpu ] || features=(--features cuda)
        bench="$(build_bench "${features[@]}")"
    fi
    bench="$(unpacked "$bench" gpu)"
    [ "$device" = cpu ] || find_cuda

    echo '== compare decoding and training with the CPU'
    "$bench" --device "$device" --check || status=1
    if [ -n "$model" ]; then
        for dtype in f32 bf16; do
            "$bench" --device "$device" --dtype "$dtype" --rounding "$model" || status=1
        done
    fi
    if [ -n "$draftsmith" ]; then
        "$here/cuda.sh" "$(unpacked "$draftsmith" draftsmith)" || status=1
    fi

    echo '== in turn'
    for ((round = 1; round <= rounds; round++)); do
        for work in adapter head; do
            measured "$work, ours" \
                "$bench" --device "$device" --work "$work" --json "${shapes[@]}"
            if [ -n "$python" ]; then
                measured "$work, torch eager" \
                    "$python" "$here/peers/gpu.py" --device "$device" --work "$work" "${shapes[@]}"
                measured "$work, torch compiled" "$python" "$here/peers/gpu.py" \
                    --device "$device" --work "$work" --compile "${shapes[@]}"
            fi
        done
    done

    echo '== decoding'
    for dtype in f32 bf16; do
        measured "decode, $dtype" \
            "$bench" --device "$device" --work decode --dtype "$dtype" --json "${shapes[@]}"
    done

    echo '== the table'
    if [ -n "$python" ]; then
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
