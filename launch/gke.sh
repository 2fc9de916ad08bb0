#!/usr/bin/env bash
# A run on TPU slices of a GKE cluster, as a JobSet made from launch/jobset.yaml.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'EOF_USAGE'
Runs bagrpo on TPU slices of a GKE cluster, the one that kubectl is set to.

  launch/gke.sh --name NAME --type TYPE --image IMAGE [option ...] -- COMMAND [argument ...]

  docker build -f launch/Dockerfile -t IMAGE . && docker push IMAGE
  launch/gke.sh --name math --type v5e-256 --image IMAGE -- \
    train configs/qwen3_1.7b_dapo.yaml folder=gs://BUCKET/math

The cluster needs the JobSet controller and, for each slice, a node pool of that type (a Standard
cluster: Autopilot does not allow what a pod needs here). When a pod fails or is evicted, all start
anew, and the run goes on from its folder.

  --type TYPE     v5e-N or v6e-N (N chips), v4-N or v5p-N (N cores, two a chip)
  --slices N      slices (default: 1); between them there is only the data-centre network, over
                  which the mesh's `data` axis goes: give mesh.data=N
  --claim CLAIM   PersistentVolumeClaim, of ReadWriteMany, for /bagrpo/runs, where runs are kept
                  whose folder is not in a bucket; without it those end with their pods
  --restarts N    how often to start anew (default: 100)
  --grace S       seconds between SIGTERM and SIGKILL (default: 600)
  --dry-run       prints the manifest and applies nothing
EOF_USAGE
}

fail() {
  echo "launch/gke.sh: $*" >&2
  exit 1
}

name="" type="" image="" slices=1 claim="" restarts=100 grace=600 dry_run=""
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
    --name | --type | --image | --slices | --claim | --restarts | --grace) ;;
    *) fail "there is no option $1; launch/gke.sh --help lists them, and -- comes before COMMAND" ;;
  esac
  [[ -n ${2:-} && $2 != -- ]] || fail "$1 needs a value"
  case "$1" in
    --name | --claim)
      [[ $2 =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail "$1 $2 should be of a-z, 0-9 and - only"
      ;;
    --slices | --restarts | --grace)
      [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2 should be a positive number"
      ;;
  esac
  case "$1" in
    --name) name="$2" ;;
    --type) type="$2" ;;
    --image) image="$2" ;;
    --slices) slices="$2" ;;
    --claim) claim="$2" ;;
    --restarts) restarts="$2" ;;
    --grace) grace="$2" ;;
  esac
  shift 2
done
[[ -n $name ]] || fail "give the run a name: --name NAME"
[[ -n $image ]] || fail "give an image made with launch/Dockerfile: --image IMAGE"
(($#)) || fail "say what to run after --, as in: launch/gke.sh --name NAME ... -- train CONFIG"

[[ $1 != train || -n $claim || " $* " == *" folder=gs://"* ]] ||
  echo "launch/gke.sh: the run ends with its pods, unless its folder is in a bucket or on a claim:" \
    "folder=gs://BUCKET/run, or --claim CLAIM" >&2

# Sets topology, hosts, and chips of a host as GKE has them; the shapes are bagrpo/plan/chips.py's.
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
set_slice() {
  local kind="${type%%-*}" count="${type#*-}" cores=1 torus=2 power=0
  case "$type" in
    v4-*) accelerator=tpu-v4-podslice cores=2 torus=3 ;;
    v5e-*) accelerator=tpu-v5-lite-podslice ;;
    v5p-*) accelerator=tpu-v5p-slice cores=2 torus=3 ;;
    v6e-*) accelerator=tpu-v6e-slice ;;
    *) fail "--type '$type' is none of v4-N, v5e-N, v5p-N, v6e-N" ;;
  esac
  [[ $count =~ ^[1-9][0-9]{0,4}$ ]] || fail "there is no slice $type"
  while ((cores << power < count)); do power=$((power + 1)); done
  ((cores << power == count)) || fail "there is no slice $type: $kind counts in powers of two"
  if ((torus == 2)); then
    ((power != 1 && power <= 8)) || fail "there is no slice $type: $kind-1, and $kind-4 to $kind-256"
    topology="$((1 << power / 2))x$((1 << (power - power / 2)))"
  else
    ((power >= 2 && power <= 12)) || fail "there is no slice $type: $kind-8 to $kind-8192"
    topology="$((1 << power / 3))x$((1 << (power + 1) / 3))x$((1 << (power + 2) / 3))"
    if ((power == 2)); then topology=2x2x1; fi
  fi
  chips=4
  if ((torus == 2 && power <= 3)); then chips=$((1 << power)); fi
  hosts=$(((1 << power) / chips))
}

# A string as JSON has it, which YAML has too.
quote() {
  local text="$1"
  text="${text//\\/\\\\}"
  text="${text//\"/\\\"}"
  text="${text//$'\n'/\\n}"
  text="${text//$'\t'/\\t}"
  echo "\"$text\""
}

set_slice
((slices == 1 || hosts > 1)) || fail "several slices need several hosts each, and $type has one"
arguments=""
opening="\$("
for word in "$@"; do
  # Kubernetes puts variables in place of $(NAME), and $( in place of $$(.
  arguments+="${arguments:+, }$(quote "${word//"$opening"/\$$opening}")"
done
volume="emptyDir: {}"
if [[ -n $claim ]]; then volume="persistentVolumeClaim: {claimName: $(quote "$claim")}"; fi

shopt -u patsub_replacement 2>/dev/null || true # Newer bash: a & in a value means nothing here.
manifest="$(<"$root/launch/jobset.yaml")"
fill() {
  local placeholder="\${$1}"
  manifest=${manifest//"$placeholder"/$2}
}
fill NAME "$(quote "$name")"
fill RESTARTS "$restarts"
fill SLICES "$slices"
fill HOSTS "$hosts"
fill GRACE "$grace"
fill ACCELERATOR "$accelerator"
fill TOPOLOGY "$topology"
fill CHIPS "$chips"
fill VOLUME "$volume"
fill IMAGE "$(quote "$image")"
fill ARGUMENTS "[$arguments]" # The last: anything may stand in it.

if [[ -n $dry_run ]]; then
  echo "$manifest"
  exit
fi
command -v kubectl >/dev/null || fail "found no kubectl; install it, and set it to the cluster"
kubectl apply --filename=- <<<"$manifest"
labels="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0"
labels+=",batch.kubernetes.io/job-completion-index=0"
echo "launch/gke.sh: what it writes: kubectl logs --follow --selector=$labels" >&2
