#!/usr/bin/env bash
# Builds a recipe's data in an array of Slurm tasks; each task builds a part of the shards. Replace the recipe, the
# binary and the shared directory, in which data/ and checkpoints/ are written.
#
#   sbatch recipes/cluster/slurm.sh
#
# A task that fails or is preempted resumes where it stopped when it is requeued (`scontrol requeue ID`). The whole array
# may also be submitted again: existing shards are skipped. `--array` must have no gaps, because tasks count themselves.
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

# For a GPU, add `#SBATCH --gpus-per-task=1` above and `--device cuda` here. For malformed prompts see `--strict`.
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
exec "$draftsmith" build-data "$recipe"
