# Sourced by the scripts that compare with other programs. Sets `root`, `checks` and `binary`, builds the binary unless BINARY
# names one, and enters a temporary directory, `place`. Ends a server and removes the directory at the end.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)"
checks="$root/crates/xtask/benches/runtimes"
binary="${BINARY:-}"
if [ -z "$binary" ]; then
    (cd "$root" && cargo build --release --workspace --bins)
    binary="$root/target/release/draftsmith"
fi
place="$(mktemp -d)"
served=
# Ends a server with all processes that it started.
stop() { [ -z "$served" ] || { kill -9 -- "-$served" 2> /dev/null || true; wait "$served" 2> /dev/null || true; }; served=; }
trap 'stop; rm -rf "$place"' EXIT
cd "$place"
# Waits until the server that was started last, in a session of its own, answers.
await_server() { # PORT
    served=$!
    for _ in $(seq 600); do
        curl -sf "http://127.0.0.1:$1/health" > /dev/null && return
        kill -0 "$served" 2> /dev/null || break
        sleep 0.5
    done
    echo 'the server did not start:' >&2
    tail -5 server.log >&2
    exit 1
}
