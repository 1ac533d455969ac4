#!/usr/bin/env bash
# Compares the device path on Mesa's software Vulkan with the CPU (`device.sh`), on a machine without a GPU.
#
#   crates/xtask/benches/vulkan.sh [BINARY DIFFERENCES]
#
# Needs Debian's mesa-vulkan-drivers (lavapipe), and takes many minutes. Without arguments it builds both with the
# feature `wgpu`. The exit code is 1 if anything differs.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# Builds with cargo and prints the path of the executable.
built() { # ARGUMENT...
    cargo "$@" --features draftsmith-cli/wgpu,xtask/wgpu --manifest-path "$here/../../../Cargo.toml" -p xtask -p draftsmith-cli --message-format json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}
[ $# -eq 2 ] || set -- "$(built build --release --bin draftsmith)" "$(built bench --no-run --bench differences)"
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR="$(mktemp -d)"
    export XDG_RUNTIME_DIR
fi
exec "$here/device.sh" wgpu "$@"
