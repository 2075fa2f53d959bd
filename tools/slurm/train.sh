#!/bin/bash
#SBATCH --job-name=rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --output=slurm-%j.out

# One Ray cluster over the job's nodes, and one training run on it:
#   sbatch tools/slurm/train.sh gsm8k trainer.run_dir=/shared/runs/gsm8k trainer.policy.model.path=/shared/models/m
# The script's arguments are passed to `rl train`. RL_DRY_RUN=1 checks them on the first node and starts nothing.
# docs/slurm.md explains the details.
set -euo pipefail

(($# > 0)) || { echo "usage: sbatch $0 RECIPE [KEY=VALUE]..." >&2; exit 2; }
# The environment in which `rl` is installed, at the same path on every node.
if [[ -n "${RL_VENV:-}" ]]; then
  # shellcheck disable=SC1091
  source "$RL_VENV/bin/activate"
fi

port="${RL_RAY_PORT:-6379}"
gpus="${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-0}}"
nodes="${SLURM_JOB_NUM_NODES:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

keys=("trainer.placement.policy_num_nodes=$nodes")
if ((gpus > 0)); then keys+=("trainer.placement.policy_num_gpus_per_node=$gpus"); fi
if ((nodes > 1)); then keys+=("generator.inference_engine.weight_sync_backend=broadcast"); fi
recipe="$1"
shift

# A dry run finds mistakes before a cluster starts. The caller's keys come last, so they win.
rl train "$recipe" "${keys[@]}" "$@" --dry-run
if [[ "${RL_DRY_RUN:-0}" != 0 ]]; then exit 0; fi

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${hosts[0]}"
address="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')"

# The job's Ray processes share a token. By default, if ~/.ray has one, the head demands it but the other nodes and the
# run do not send it.
if [[ -z "${RAY_AUTH_MODE:-}" ]]; then
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
fi

# Each `ray start --block` is a separate job step that ends with the job.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --node-ip-address="$address" --port="$port" --num-gpus="$gpus" --block &
steps=("$!")
trap 'kill "${steps[@]}" 2>/dev/null || true; wait "${steps[@]}" || true' EXIT

if ((nodes > 1)); then
  sleep "${RL_HEAD_START_S:-10}"
  srun --nodes="$((nodes - 1))" --ntasks="$((nodes - 1))" --ntasks-per-node=1 --exclude="$head" --overlap \
    ray start --address="$address:$port" --num-gpus="$gpus" --block &
  steps+=("$!")
fi

export RAY_ADDRESS="$address:$port"
# Waits until all nodes have joined Ray, for RL_NODES_WAIT_S seconds.
ends=$((SECONDS + ${RL_NODES_WAIT_S:-300}))
while true; do
  alive="$(python -c 'import ray; ray.init(log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))' \
    2>/dev/null | tail -n 1 || true)"
  if [[ "$alive" == "$nodes" ]] || ((SECONDS >= ends)); then break; fi
  sleep "${RL_POLL_S:-5}"
done
if [[ "${alive:-0}" != "$nodes" ]]; then
  echo "only ${alive:-0} of $nodes nodes joined Ray within ${RL_NODES_WAIT_S:-300} s; see the output of ray start above" >&2
  exit 1
fi

# Slurm sends a signal before the job's time limit. It is passed on to the run, which saves and ends. The same job
# submitted again resumes from there.
run=""
signalled_early=0
pass_on() { if [[ -n "$run" ]]; then kill -TERM "$run" 2>/dev/null || true; else signalled_early=1; fi; }
trap pass_on TERM
rl train "$recipe" "${keys[@]}" "$@" &
run="$!"
# The signal may arrive before the line above: it is passed on once, because a second one would end the run unsaved.
if ((signalled_early)); then pass_on; fi
status=0
wait "$run" || status="$?"
# A trapped signal interrupts the first `wait` while the run is still saving.
while kill -0 "$run" 2>/dev/null; do
  status=0
  wait "$run" || status="$?"
done
exit "$status"
