#!/bin/bash
# 2 hosts of 8 GPUs under SLURM, one process a GPU. In the root of the checkout:  sbatch experiments/launch/slurm.sh
#SBATCH --job-name=jaxpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=12:00:00
# Two minutes before the time is over every process gets SIGTERM: the run saves after the same step and ends.
#SBATCH --signal=TERM@120
# Where a host fails, or the job has to make room, it is queued again under its number, and goes on from its checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

source "$SLURM_SUBMIT_DIR/experiments/launch/nccl.env" # SLURM runs a copy of this file, which lies elsewhere
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"        # srun does not take it from the lines above
out="${OUT:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}" # on a file system that all hosts mount
mkdir -p "$out"

# Half a minute that saves hours: versions, devices, clocks, the folder, one collective for each axis.
srun --kill-on-bad-exit=1 jaxpar doctor --strategy hsdp --folder "$out"
# One process that fails ends all. --resume starts a new run where there is none yet.
srun --kill-on-bad-exit=1 jaxpar train --resume --out "$out" --strategy hsdp,precision=bf16 "$@"
