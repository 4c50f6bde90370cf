#!/bin/sh
#SBATCH --job-name=rowpost
#SBATCH --array=0-4
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@660
#SBATCH --requeue
# One sender per array task; the partition is the task's number. Submit with: sbatch slurm.sh
# ROWPOST_CONTROL (and PGPASSFILE) come from the environment; the campaign folder lies on the node's own disk.
set -u
: "${ROWPOST_CONTROL:?set it to postgresql://user@host/database}"
partition=${SLURM_ARRAY_TASK_ID:-${JOB_COMPLETION_INDEX:?}}
exec engine send --partition "$partition" --campaign "${ROWPOST_WORK:-$HOME/rowpost}/partition-$partition" \
    --name "$(hostname)-$partition" --yes --log-format json
