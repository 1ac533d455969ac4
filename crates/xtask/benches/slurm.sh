#!/usr/bin/env bash
# Proves on a real Slurm that an array of tasks, some killed and requeued, builds the same bytes as one process.
#
#   crates/xtask/benches/slurm.sh [RECIPE]
#
# Run it as root on a Debian or Ubuntu machine. It installs slurm-wlm and munge if they are missing (apt-get), starts
# separate munged, slurmctld and slurmd processes in a temporary directory and on other ports, and stops them at the end.
# Submits recipes/cluster/slurm.sh unchanged, with 16 tasks; kills the process of one running task (SIGKILL) and requeues
# it, requeues another while it runs, and submits the array again when all tasks have ended. Then compares all files with
# those of one process, built before with the release binary of the repository's root.
set -euo pipefail
trap 'echo "failed at line $LINENO" >&2' ERR

recipe=${1:-recipes/tiny-full.toml}
root=$(cd "$(dirname "$0")/../../.." && pwd)
binary=$root/target/release/draftsmith
[ -x "$binary" ] || { echo "build first: cargo build --release" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "run as root: Slurm's daemons need it" >&2; exit 1; }
if ! command -v slurmctld slurmd munged sbatch > /dev/null; then
    apt-get update -qq && apt-get install -y --no-install-recommends slurm-wlm munge
fi

work=$(mktemp -d)
chmod 755 "$work"
daemons=()
stop() {
    for pid in "${daemons[@]}"; do kill "$pid" 2> /dev/null || true; done
    for pid in "${daemons[@]}"; do wait "$pid" 2> /dev/null || true; done
    rm -rf "$work"
}
trap stop EXIT

for run in whole array; do
    mkdir -p "$work/$run/data/tiny" "$work/$run/checkpoints"
    cp -r "$root/data/tiny/prompts" "$work/$run/data/tiny/"
    cp -r "$root/checkpoints/tiny" "$work/$run/checkpoints/"
done
(cd "$work/whole" && env -u SLURM_ARRAY_TASK_ID "$binary" --quiet build-data "$root/$recipe")
num_shards=$(find "$work/whole/data" -name '*.parquet' | wc -l)

# Slurm with one node that claims more processors than exist, so that four tasks run at a time.
mkdir -p "$work"/{state,spool,munge}
host=$(hostname -s)
head -c 1024 /dev/urandom > "$work/munge/key"
chmod 600 "$work/munge/key"
chmod 755 "$work/munge"
cat > "$work/slurm.conf" << END
ClusterName=draftsmith
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=36817
SlurmdPort=36818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF=$work/slurm.conf
munged --foreground --force --num-threads=2 --key-file="$work/munge/key" --socket="$work/munge/socket" \
    --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed" > "$work/munge.out" 2>&1 &
daemons+=($!)
slurmctld -D -c -f "$work/slurm.conf" > "$work/slurmctld.out" 2>&1 &
daemons+=($!)
slurmd -D -c -f "$work/slurm.conf" > "$work/slurmd.out" 2>&1 &
daemons+=($!)

# Waits until a command succeeds, up to a number of seconds.
await() {
    local seconds=$1
    shift
    for _ in $(seq $((seconds * 10))); do
        if "$@"; then return 0; fi
        sleep 0.1
    done
    echo "no success in $seconds s: $*" >&2
    tail -n 20 "$work"/*.log "$work"/*.out >&2 || true
    return 1
}
is_up() { [ "$(sinfo --noheader --format=%t 2> /dev/null)" = idle ]; }
await 60 is_up

submit() {
    (cd "$work/array" && RECIPE=$root/$recipe DRAFTSMITH=$binary sbatch --parsable "$root/recipes/cluster/slurm.sh")
}
# The state of a task: RUNNING, PENDING, FAILED, COMPLETED, …
state() {
    scontrol show job "$1" 2> /dev/null | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1
}
in_state() { [ "$(state "$1")" = "$2" ]; }
# The process of a task that has started to build.
process() {
    local pid
    for pid in $(pgrep -x draftsmith); do
        if tr '\0' '\n' 2> /dev/null < "/proc/$pid/environ" | grep -qx "SLURM_ARRAY_TASK_ID=$1" \
            && tr '\0' '\n' 2> /dev/null < "/proc/$pid/environ" | grep -qx "SLURM_CONF=$SLURM_CONF"; then
            echo "$pid"
            return 0
        fi
    done
    return 1
}
builds() { process "$1" > /dev/null; }
ended() { [ -z "$(squeue --noheader --format=%i)" ]; }

begun=$(date +%s.%N)
job=$(submit)
# One of the second four tasks, because the first four are complete.
await 300 builds 5
sleep 0.2
kill -9 "$(process 5)"
await 60 in_state "${job}_5" FAILED
killed_after=$(find "$work/array/data" -name '*.parquet' | wc -l)
scontrol requeue "${job}_5"
await 300 builds 9
scontrol requeue "${job}_9"
requeued_after=$(find "$work/array/data" -name '*.parquet' | wc -l)
await 1200 ended
seconds=$(echo "$(date +%s.%N) - $begun" | bc)
diff -r "$work/whole/data" "$work/array/data" --exclude='.*.lock'
restarts=$(scontrol show job "$job" | grep -o 'Restarts=[0-9]*' | sort | uniq -c | tr '\n' ' ')

job=$(submit)
await 600 ended
diff -r "$work/whole/data" "$work/array/data" --exclude='.*.lock'
[ "$(cat "$work/array"/draftsmith-data-*.log | grep -c 'of `SLURM_ARRAY_TASK_ID`')" -ge 32 ]

echo "16 tasks, $num_shards shards, $seconds s: one killed with $killed_after shards there, one requeued as it ran with" \
    "$requeued_after; restarts of tasks: $restarts"
echo "the same bytes as one process, and again when the array was submitted twice ($(slurmctld -V))"
