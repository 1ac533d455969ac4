#!/usr/bin/env bash
# Builds a recipe's data in an array of Slurm tasks, each a share of the shards. Put your names in their places:
# the recipe, the binary, and a directory that all nodes see, in which data/ and checkpoints/ are made.
#
#   sbatch recipes/cluster/slurm.sh
#
# A task that fails, is preempted or killed goes on where it stopped when it is requeued (`scontrol requeue ID`), and
# the whole array may be submitted again: what is there is skipped. No gaps in `--array`: tasks count themselves.
#SBATCH --job-name=draftsmith-data
#SBATCH --array=0-15
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=draftsmith-data-%a.log
#SBATCH --signal=TERM@60
set -euo pipefail

recipe=${RECIPE:-recipes/gsm8k.toml}
draftsmith=${DRAFTSMITH:-draftsmith}
cd "${SHARED_DIR:-${SLURM_SUBMIT_DIR:-.}}"

# A GPU: add `#SBATCH --gpus-per-task=1` above and `--device cuda` here. For prompts that are malformed see `--strict`.
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
exec "$draftsmith" build-data "$recipe"
