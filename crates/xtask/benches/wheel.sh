#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh virtual environment and uses it there: `draftsmith --version`, `generate` on the
# embedded pair, the manual. Prints the wheel's size.
#
#   crates/xtask/benches/wheel.sh [WHEEL]
#
# With WHEEL, that file is installed and nothing is built. Installs maturin and zig (PyPI, `maturin[zig]`) in a virtual
# environment of their own. On Linux, a glibc of 2012 is enough to run what is built.
set -euo pipefail
trap 'echo "failed at line $LINENO" >&2' ERR

root=$(cd "$(dirname "$0")/../../.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheel=${1:+$(realpath "$1")}
cd "$root"

if [ -z "$wheel" ]; then
    "$python" -m venv "$work/tools"
    "$work/tools/bin/pip" install --quiet 'maturin[zig]'
    PATH=$work/tools/bin:$PATH cargo run --release -p xtask -- wheel --out "$work/dist"
    wheel=$(echo "$work"/dist/draftsmith-*.whl)
    mkdir -p target/wheel/dist
    cp "$wheel" target/wheel/dist/
fi

"$python" -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet --no-index "$wheel"
installed=$work/fresh/bin/draftsmith
"$installed" --version
answer=$("$installed" generate --quiet --target checkpoints/tiny/target --draft checkpoints/tiny/draft \
    --prompt 'What is 2 + 2?' --max-new-tokens 24)
[ -n "$answer" ] || { echo "generate wrote nothing" >&2; exit 1; }
echo "generate: $answer"
num_pages=$(find "$work/fresh/share/man/man1" -name 'draftsmith*.1' | wc -l)
[ "$num_pages" -gt 10 ] || { echo "the manual has $num_pages pages" >&2; exit 1; }
echo "manual: $num_pages pages"
if command -v readelf > /dev/null; then
    glibc=$(readelf --version-info "$installed" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
    echo "needs at most $glibc"
fi
echo "$(basename "$wheel"): $(($(stat -c %s "$wheel") / 1000)) kB, installed $(($(stat -c %s "$installed") / 1000)) kB"
