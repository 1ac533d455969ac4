#!/usr/bin/env bash
# Compares the device path on Mesa's software Vulkan with the CPU (`device.sh`), on a machine without a GPU.
#
#   crates/xtask/benches/vulkan.sh [BINARY DIFFERENCES]
#
# Needs Debian's mesa-vulkan-drivers (lavapipe), and takes many minutes. Without arguments it builds both with the
# feature `wgpu`. The exit code is 1 if anything differs.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ $# -ne 2 ]; then
    programs="$("$here/programs.sh" differences --features draftsmith-cli/wgpu,xtask/wgpu)"
    set -- "${programs%$'\n'*}" "${programs#*$'\n'}"
fi
if [ -z "${XDG_RUNTIME_DIR:-}" ]; then
    XDG_RUNTIME_DIR="$(mktemp -d)"
    export XDG_RUNTIME_DIR
fi
exec "$here/device.sh" wgpu "$@"
