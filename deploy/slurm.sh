#!/bin/bash
# Trains on several nodes of a Slurm cluster, with one worker per node.
#
#     sbatch --nodes=4 deploy/slurm.sh --config=quickstart --workdir=/shared/runs/quickstart
#
# The arguments are those of tfwd-train. All nodes must share the folder of --workdir. Activate the
# Python environment of tfwd before sbatch. Set further options of your cluster, such as
# --partition or --gpus-per-node, on the command line of sbatch.
#
# TFWD_PROGRAM=tfwd-finetune sbatch ... runs another program.
# If a worker was lost or killed, the job is requeued at most TFWD_RESTARTS times (default 20). Each
# run resumes from the last checkpoint.
#
#SBATCH --job-name=tfwd-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
# Two jobs on one node rarely get the same ports. Two workers on one node never do.
port=$((20000 + SLURM_JOB_ID % 10000))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
addresses=
number=0
for host in $hosts; do
  addresses="$addresses${addresses:+, }\"$host:$((port + number))\""
  number=$((number + 1))
done
export TFWD_CLUSTER="{\"worker\": [$addresses]}"

# shellcheck disable=SC2016  # each worker expands the variables, because SLURM_PROCID is its own
srun --kill-on-bad-exit=1 sh -c '
  task="{\"type\": \"worker\", \"index\": $SLURM_PROCID}"
  export TF_CONFIG="{\"cluster\": $TFWD_CLUSTER, \"task\": $task}"
  exec "$@"
' sh "${TFWD_PROGRAM:-tfwd-train}" "$@"
code=$?

# 75: a worker lost another one. 128 and more: a signal ended a worker. Other errors would come again.
if [ "$code" -eq 75 ] || [ "$code" -ge 128 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "${TFWD_RESTARTS:-20}" ]; then
    echo "code $code: requeue job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "code $code: not requeued, after $SLURM_RESTART_COUNT restarts"
  fi
fi
exit "$code"
