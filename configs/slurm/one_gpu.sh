#!/bin/bash
# One profile on one GPU of a SLURM cluster: sbatch configs/slurm/one_gpu.sh paper --set seeds=[3407]
# After its time is over submit it again: it goes on. Submit it from the folder of the project.
#SBATCH --job-name=sage --gres=gpu:1 --cpus-per-task=8 --mem=64G --time=24:00:00
set -eu
profile=${1:-one_gpu}
shift || true
# Weights go to a large disk, what is measured stays.
export SAGE_BUILD=${SAGE_BUILD:-${SCRATCH:-$PWD}/build}
exec .venv/bin/sage-companion reproduce --profile "$profile" --resume --yes "$@"
