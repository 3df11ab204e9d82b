#!/bin/bash
# Pre-train on one node of a SLURM cluster, and go on after a time limit or a preemption until the run has finished:
#
#   sbatch --time=4:00:00 --gpus-per-node=4 recipes/slurm.sh out=runs/a data=folder data.path=DIR train.save_every=500
#
# Submit it from the repository; all arguments go to the recipe, and out= is needed. It asks for a node, starts one
# process for each GPU and, 120 s before the time is over, SLURM asks them to stop. They save at the end of the step and
# leave {"state": "preempted"} in out/status.json; then this script puts the job back into the queue, where the same
# command continues. A run that has finished or failed is not started again. RECIPE=recipes/quickstart.py runs another.
#
# Tested (tests/test_stopping.py) with stand-ins for srun and scontrol that signal and kill as SLURM documents it: a
# SIGTERM to every process of the step, and SIGKILL to what is left when the command of the step ends. Not tested on a
# real SLURM, nor with several nodes.
#
#SBATCH --job-name=mpp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

set -u

out=
for argument in "$@"; do
    case $argument in out=*) out=${argument#out=} ;; esac
done
if [ -z "$out" ]; then
    echo "error: give the run folder, as out=runs/a" >&2
    exit 2
fi

# A run that fails before it begins leaves the status of the one before; `began` tells them apart.
began=$(mktemp) || exit 1
trap 'rm -f "$began"' EXIT
sleep 1 # some file systems count time in seconds

# torchrun passes signals on and waits for its processes, 30 s unless told otherwise. `accelerate launch` with one
# process does not: it dies at once, SLURM takes the step for ended and kills the training before it has saved.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}
srun torchrun --standalone --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" "${RECIPE:-recipes/pretrain.py}" "$@"
code=$?

# Launchers have exit codes of their own, so status.json is what counts.
state=unknown
if [ "$out/status.json" -nt "$began" ]; then
    state=$(sed -n 's/^ *"state": "\([a-z]*\)".*/\1/p' "$out/status.json")
fi
echo "the run in $out: $state"
case $state in
finished) exit 0 ;;
preempted)
    # Where SLURM has put the job back by itself, as after a preemption, it refuses this, and nothing is wrong.
    scontrol requeue "$SLURM_JOB_ID" || true
    exit 75
    ;;
*) exit "$((code ? code : 1))" ;;
esac
