#!/usr/bin/env bash
# A run on a TPU slice of Google Cloud: VMs from a queued resource, reached through gcloud.
# shellcheck disable=SC2016 # What stands in single quotes is for the shells of the hosts.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
every=60    # seconds between two looks of `watch`
looks=3     # at a failed run on a slice that seems well, before `watch` takes it for final
patience=10 # failures of `watch` in a row before it gives up

usage() {
  cat <<'EOF_USAGE'
Rents a TPU slice of Google Cloud and runs bagrpo on all its hosts. Needs gcloud, logged in.

  launch/tpu.sh create NAME --type TYPE [--spot]
                            asks for the slice; it is there once `status` says ACTIVE, READY
  launch/tpu.sh ship NAME   copies the last commit to ~/bagrpo of every host and sets it up there
  launch/tpu.sh run NAME -- COMMAND [argument ...]
                            starts `bagrpo COMMAND ...` on every host and returns
  launch/tpu.sh status NAME says how the slice and the run are
  launch/tpu.sh logs NAME   follows what host 0 writes, which is in its ~/bagrpo.log
  launch/tpu.sh stop NAME   tells the run to save after the step under way, and to end; `watch`, if
                            it is not ended first, starts it again
  launch/tpu.sh delete NAME gives the slice back
  launch/tpu.sh watch NAME --type TYPE [--spot] [--delete] -- COMMAND [argument ...]
                            does all that until the run has ended, and again when the slice was
                            taken away; call it anew at any time, it begins with what it finds

  --type TYPE      v5e-N or v6e-N (N chips), v4-N or v5p-N (N cores, two a chip)
  --spot           for less money, a slice that may be taken away at any time
  --delete         `watch` gives the slice back when the run has ended well
  --startup FILE   a script that every host runs as root when it boots, to mount a folder, say
  --zone ZONE, --project PROJECT
                   (default: gcloud's)
  --dry-run        prints the commands and runs none; for `watch`, those of a run without trouble

A run goes on from its folder, `folder=` in its configuration. All hosts have to see that folder,
and it has to outlive the slice: let it be in a bucket, or on a file system that --startup mounts.

  launch/tpu.sh watch math --type v5e-256 --spot --delete -- \
    train configs/qwen3_1.7b_dapo.yaml folder=gs://BUCKET/math
EOF_USAGE
}

fail() {
  echo "launch/tpu.sh: $*" >&2
  exit 1
}

say() {
  echo "launch/tpu.sh: $*" >&2
}

# Runs a command or, with --dry-run, prints it.
call() {
  if [[ -n $dry_run ]]; then
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
  else
    "$@"
  fi
}

# Runs a command for what it prints; with --dry-run prints the command, and takes the first argument
# for what it would have printed.
ask() {
  if [[ -n $dry_run ]]; then
    call "${@:2}" >&3
    echo "$1"
  else
    "${@:2}"
  fi
}

set_type() {
  local shape="${type#*-}"
  [[ $type =~ ^(v4|v5e|v5p|v6e)-[1-9][0-9]*$ ]] ||
    fail "--type '$type' is none of v4-N, v5e-N, v5p-N, v6e-N"
  case "$type" in
    v4-* | v5p-*) ((shape % 8 == 0)) || fail "there is no slice $type: N is a multiple of 8" ;;
    *) (((shape & (shape - 1)) == 0)) || fail "there is no slice $type: N is a power of two" ;;
  esac
  accelerator="$type"
  # https://cloud.google.com/tpu/docs/runtimes
  case "$type" in
    v4-*) runtime=tpu-ubuntu2204-base ;;
    v5e-*) accelerator="v5litepod-$shape" runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
  esac
}

create() {
  call gcloud compute tpus queued-resources create "$name" "${where[@]}" "--node-id=$name" \
    "--accelerator-type=$accelerator" "--runtime-version=$runtime" ${spot:+--spot} \
    ${startup:+"--metadata-from-file=startup-script=$startup"}
}

delete() {
  call gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force
}

# on HOSTS SCRIPT: `all` hosts, or the host of a number.
on() {
  call gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"
}

# The state of the queued resource or of its node; ABSENT if there is none, UNKNOWN if gcloud fails.
state_of() {
  local said
  if said="$(ask "$3" gcloud compute tpus "$1" describe "$name" "${where[@]}" \
    "--format=value($2)" 2>&1)"; then
    echo "${said##*$'\n'}" # Warnings come before.
  elif [[ $said == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    echo "$said" >&2
    echo UNKNOWN
  fi
}

# none, running, its exit status, or gone if it ended without one.
run_script='if [ -e ~/bagrpo.status ]; then echo "run: $(cat ~/bagrpo.status)"
elif [ ! -e ~/bagrpo.pid ]; then echo "run: none"
elif kill -0 "$(cat ~/bagrpo.pid)"; then echo "run: running"
else echo "run: gone"; fi'

run_state() {
  local said
  said="$(ask "run: $1" gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 \
    "--command=$run_script" 2>/dev/null)" || said=""
  if [[ $said =~ run:\ ([a-z0-9]+) ]]; then echo "${BASH_REMATCH[1]}"; else echo UNKNOWN; fi
}

# The queued resource's, its node's once it is there, and the run's once that is up.
state() {
  local found
  found="$(state_of queued-resources state.state ACTIVE)"
  if [[ $found == ACTIVE ]]; then found+=", $(state_of tpu-vm state READY)"; fi
  if [[ $found == "ACTIVE, READY" ]]; then found+=", run $(run_state "${1:-none}")"; fi
  echo "$found"
}

# The images have Python 3.10, so uv fetches a newer one.
ship_script='mkdir -p ~/bagrpo && tar -xzf ~/bagrpo.tar.gz -C ~/bagrpo && cd ~/bagrpo || exit
export ACCELERATOR=tpu PATH="$HOME/.local/bin:$PATH"
if ! python3 -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
  command -v uv >/dev/null || python3 -m pip install -q --user uv || exit
  uv python install -q 3.12 || exit
  PYTHON="$(uv python find 3.12)" && export PYTHON || exit
fi
launch/local.sh --version'

ship() {
  local archive="$root/.cache/ship-$name.tar.gz"
  if [[ -z $dry_run && -n $(git -C "$root" status --porcelain) ]]; then
    say "only the last commit is shipped; this checkout has changes since"
  fi
  call mkdir -p "$root/.cache" &&
    call git -C "$root" archive --format=tar.gz "--output=$archive" HEAD &&
    call gcloud compute tpus tpu-vm scp "$archive" "$name:bagrpo.tar.gz" "${where[@]}" \
      --worker=all &&
    on all "$ship_script"
}

# The shell in a session of its own outlives the connection and notes how the run ended.
start_script='cd ~/bagrpo || exit
if [ ! -e ~/bagrpo.status ] && kill -0 "$(cat ~/bagrpo.pid 2>/dev/null)" 2>/dev/null; then
  echo "a run is under way on $(hostname): stop it first" >&2
  exit 1
fi
rm -f ~/bagrpo.status
ACCELERATOR=tpu setsid bash -c '\''"$@"; echo $? >~/bagrpo.status'\'' bagrpo launch/local.sh'

start() {
  local words
  printf -v words ' %q' "$@"
  on all "$start_script$words"' >>~/bagrpo.log 2>&1 </dev/null & echo $! >~/bagrpo.pid'
}

ship_and_start() {
  ship && start "$@"
}

try() {
  if "$@"; then
    failures=0
  elif ((++failures >= patience)); then
    fail "gave up: '$1' was the last of $failures failures in a row"
  fi
}

watch() {
  local found before="" seen=0
  failures=0
  while true; do
    found="$(state)"
    [[ $found == "$before" ]] || say "$name is $found"
    before="$found"
    case "$found" in
      ABSENT) try create ;;
      FAILED | SUSPENDED | "ACTIVE, PREEMPTED" | "ACTIVE, TERMINATED" | "ACTIVE, ABSENT")
        try delete
        ;;
      "ACTIVE, READY, run none" | "ACTIVE, READY, run gone" | "ACTIVE, READY, run 75") try ship_and_start "$@" ;;
      "ACTIVE, READY, run 0")
        if [[ -n $give_back ]]; then
          delete
        else
          say "the run has ended; the slice is still rented: launch/tpu.sh delete $name"
        fi
        return
        ;;
      # A slice is seen to be lost later than its run is.
      "ACTIVE, READY, run "[1-9]*)
        ((++seen < looks)) ||
          fail "the run failed with status ${found##* }; see launch/tpu.sh logs $name"
        ;;
    esac
    [[ $found == "ACTIVE, READY, run "[1-9]* ]] || seen=0
    sleep "$every"
  done
}

watch_well() {
  create
  state none >/dev/null
  ship_and_start "$@"
  state 0 >/dev/null
  if [[ -n $give_back ]]; then delete; fi
}

action="${1:-}"
case "$action" in
  "" | -h | --help | help)
    usage
    exit
    ;;
  create | status | ship | run | logs | stop | watch | delete) shift ;;
  -*) fail "$action comes after what to do and NAME, as in: launch/tpu.sh create NAME $action" ;;
  *) fail "there is no '$action'; launch/tpu.sh --help lists what there is" ;;
esac
case "${1:-}" in
  -h | --help)
    usage
    exit
    ;;
esac
name="${1:-}"
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "give the slice's name after '$action', of a-z, 0-9 and -, not '$name'"
shift
type="" spot="" startup="" give_back="" dry_run=""
where=(--quiet)
while (($#)); do
  case "$1" in
    --) break ;;
    -h | --help)
      usage
      exit
      ;;
    --spot) spot=yes ;;
    --delete) give_back=yes ;;
    --dry-run) dry_run=yes ;;
    --type | --startup | --zone | --project)
      [[ -n ${2:-} && $2 != -- ]] || fail "$1 needs a value"
      case "$1" in
        --type) type="$2" ;;
        --startup) startup="$2" ;;
        *) where+=("$1=$2") ;;
      esac
      shift
      ;;
    *) fail "there is no option $1; launch/tpu.sh --help lists them, and -- comes before COMMAND" ;;
  esac
  shift
done
case "$action" in
  run | watch)
    (($# > 1)) || fail "say what to run after --, as in: launch/tpu.sh $action $name -- train CONFIG"
    shift
    ;;
  *) ((!$#)) || fail "'$action' takes no command" ;;
esac
case "$action" in
  create | watch)
    set_type
    [[ -z $startup || -f $startup ]] || fail "--startup $startup is no file"
    ;;
esac
if [[ $action == watch && $1 == train && " $* " != *" folder=gs://"* ]]; then
  echo "launch/tpu.sh: the run ends with its slice, unless its folder is in a bucket or on a disk" \
    "that outlives it: folder=gs://BUCKET/run" >&2
fi
[[ -n $dry_run ]] || command -v gcloud >/dev/null ||
  fail "found no gcloud; install the Google Cloud CLI and log in with: gcloud auth login"
exec 3>&1
case "$action" in
  create) create ;;
  status) if [[ -n $dry_run ]]; then state >/dev/null; else echo "$name is $(state)"; fi ;;
  ship) ship ;;
  run) start "$@" ;;
  logs) on 0 'tail -n 100 -F ~/bagrpo.log' ;;
  # Its child, that is: the shell itself stays, to note how the run ended.
  stop) on all 'pkill -TERM -P "$(cat ~/bagrpo.pid)"' ;;
  watch) if [[ -n $dry_run ]]; then watch_well "$@"; else watch "$@"; fi ;;
  delete) delete ;;
esac
