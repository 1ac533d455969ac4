#!/usr/bin/env bash
# The device path on Mesa's software Vulkan against the CPU (`device.sh`), where there is no GPU.
#
#   crates/draftsmith/benches/vulkan.sh [BINARY DIFFERENCES]
#
# Needs Debian's mesa-vulkan-drivers (lavapipe), and many minutes. Without arguments it builds both with the feature
# `wgpu`. Ends with 1 where anything differs.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# The executable that cargo builds.
built() { # ARGUMENT...
    cargo "$@" --features wgpu --manifest-path "$here/../Cargo.toml" --message-format json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}
[ $# -eq 2 ] || set -- "$(built build --release --bin draftsmith)" "$(built bench --no-run --bench differences)"
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR="$(mktemp -d)"
    export XDG_RUNTIME_DIR
fi
exec "$here/device.sh" wgpu "$@"
