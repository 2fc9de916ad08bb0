#!/usr/bin/env bash
# A run on GPU nodes of a SLURM cluster: a process for each GPU, which find each other through SLURM.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'EOF_USAGE'
Submits a bagrpo command to SLURM, as one process for each GPU.

  launch/slurm.sh [option ...] -- COMMAND [argument ...]

  launch/slurm.sh --nodes 2 --gpus 8 --time 12:00:00 -- train configs/qwen3_1.7b_dapo.yaml

Call it on a machine that shares this checkout with the nodes: it sets bagrpo up first. Before its
time is up the job gets SIGTERM; the run then saves after the step under way and ends with status 75,
and the next job with the same command goes on from there. SLURM puts a job of a lost or preempted node back into the
queue by itself.

  --nodes N        nodes (default: 1)
  --gpus M         GPUs of each node (default: 1)
  --cpus N         CPU cores for each GPU's process (default: as the cluster has it)
  --time T         limit of one job, as in 12:00:00 or 2-00 (default: the partition's)
  --save-before S  seconds before that limit at which the run is told to save (default: 120; give
                   more than a step and a checkpoint take)
  --jobs K         submits K jobs, of which one runs at a time: for a run that takes longer than T
  --partition P, --account A
  --name NAME      (default: bagrpo- and the configuration's name); jobs of one name never overlap
  --dry-run        prints the commands and submits nothing

Output goes to runs/logs/NAME-JOB.log. sbatch's own environment variables work too, such as
SBATCH_QOS, SBATCH_CONSTRAINT and SBATCH_MEM_PER_NODE.
EOF_USAGE
}

fail() {
  echo "launch/slurm.sh: $*" >&2
  exit 1
}

nodes=1 gpus=1 cpus="" time="" margin=120 jobs=1 partition="" account="" name="" dry_run=""
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit
      ;;
    --dry-run)
      dry_run=yes
      shift
      continue
      ;;
    --)
      shift
      break
      ;;
    --nodes | --gpus | --cpus | --time | --save-before | --jobs | --partition | --account | --name) ;;
    *) fail "there is no option $1; launch/slurm.sh --help lists them, and -- comes before COMMAND" ;;
  esac
  [[ -n ${2:-} && $2 != -- ]] || fail "$1 needs a value"
  case "$1" in
    --nodes | --gpus | --cpus | --save-before | --jobs)
      [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2 should be a positive number"
      ;;
  esac
  case "$1" in
    --nodes) nodes="$2" ;;
    --gpus) gpus="$2" ;;
    --cpus) cpus="$2" ;;
    --time) time="$2" ;;
    --save-before) margin="$2" ;;
    --jobs) jobs="$2" ;;
    --partition) partition="$2" ;;
    --account) account="$2" ;;
    --name) name="$2" ;;
  esac
  shift 2
done
(($#)) || fail "say what to run after --, as in: launch/slurm.sh --gpus 8 -- train CONFIG"
if [[ -z $name ]]; then
  name="${2:-$1}" name="${name##*/}" name="bagrpo-${name%.yaml}"
fi

# JAX gives each process the GPU of its number on the node, so every process has to see them all:
# hence --gpus-per-node, and not --gpus-per-task.
submit=(sbatch "--job-name=$name" "--nodes=$nodes" "--gpus-per-node=$gpus" "--ntasks-per-node=$gpus"
  --requeue --open-mode=append --dependency=singleton "--signal=TERM@$margin"
  "--output=runs/logs/%x-%j.log" ${cpus:+"--cpus-per-task=$cpus"} ${time:+"--time=$time"}
  ${partition:+"--partition=$partition"} ${account:+"--account=$account"})
# Before the job starts: nodes may have no network.
set_up=(env ACCELERATOR=cuda "$root/launch/local.sh" --version)

printf -v command ' %q' "$root/launch/local.sh" "$@"
job="#!/usr/bin/env bash
export ACCELERATOR=cuda
# Without a binding a process may use all cores of the job on its node.
exec srun --kill-on-bad-exit=1 --label --cpu-bind=none${cpus:+ --cpus-per-task=$cpus}$command"

if [[ -n $dry_run ]]; then
  echo 'mkdir -p runs/logs'
  printf '%q ' "${set_up[@]}" && echo '>/dev/null'
  for ((number = 0; number < jobs; number++)); do
    printf '%q ' "${submit[@]}" && printf "<<'EOF_JOB'\n%s\nEOF_JOB\n" "$job"
  done
  exit
fi
command -v sbatch >/dev/null || fail "found no sbatch; call this on a machine that submits to SLURM"
mkdir -p runs/logs
"${set_up[@]}" >/dev/null
for ((number = 0; number < jobs; number++)); do
  "${submit[@]}" <<<"$job"
done
