#!/usr/bin/env bash
# One run as several processes on this machine, each started by launch/local.sh.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
patience=60 # seconds from SIGTERM to SIGKILL, once a process has failed

usage() {
  cat <<'EOF_USAGE'
Runs a bagrpo command as N processes on this machine, which work together as N hosts would.

  launch/processes.sh [option ...] N COMMAND [argument ...]

  launch/processes.sh 2 train configs/tiny.yaml                 several hosts, tried out on CPUs
  launch/processes.sh --gpus 8 train configs/qwen3_1.7b_dapo.yaml   a process for each of 8 GPUs

Process 0 writes to the terminal, process 3 to runs/logs/process-3.log. Ctrl-C and SIGTERM go to
each of them: the run saves after the step under way and ends; a second one ends it at once. When
one fails, the others are ended too, and its exit status is this command's.

  --gpus         process i sees only GPU i (the i-th of CUDA_VISIBLE_DEVICES, where that is set);
                 JAX for CUDA is installed if need be
  --logs FOLDER  for the output of all processes but 0 (default: runs/logs)
  --dry-run      prints the commands and runs none
EOF_USAGE
}

fail() {
  echo "launch/processes.sh: $*" >&2
  exit 1
}

gpus="" logs=runs/logs dry_run=""
while [[ ${1:-} == -* ]]; do
  case "$1" in
    -h | --help)
      usage
      exit
      ;;
    --gpus) gpus=yes ;;
    --logs)
      logs="${2:-}"
      [[ -n $logs ]] || fail "--logs needs a folder"
      shift
      ;;
    --dry-run) dry_run=yes ;;
    *) fail "there is no option $1; launch/processes.sh --help lists them" ;;
  esac
  shift
done
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] ||
  fail "the number of processes comes first, not '${1:-}': launch/processes.sh 2 train CONFIG"
count="$1"
shift
(($#)) || fail "say what the $count processes should run, as in: launch/processes.sh 2 train CONFIG"

IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES:-}"
[[ -z $gpus || -z ${CUDA_VISIBLE_DEVICES:-} ]] || ((${#devices[@]} >= count)) ||
  fail "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES has fewer than $count GPUs, one a process"

# A port that nobody listens on, below those that systems hand out by themselves.
free_port() {
  local port
  while port=$((20000 + RANDOM % 10000)); do
    (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
  done
  echo "$port"
}

port="$(free_port)"
accelerator="${ACCELERATOR:-${gpus:+cuda}}"
# Before the processes start, so that none waits for another that installs.
set_up=(env ${accelerator:+"ACCELERATOR=$accelerator"} "$root/launch/local.sh" --version)

set_command() {
  local number="$1"
  shift
  command=(env "BAGRPO_COORDINATOR=127.0.0.1:$port" "BAGRPO_PROCESSES=$count"
    "BAGRPO_PROCESS=$number" ${accelerator:+"ACCELERATOR=$accelerator"}
    ${gpus:+"CUDA_VISIBLE_DEVICES=${devices[$number]:-$number}"} "$root/launch/local.sh" "$@")
}

if [[ -n $dry_run ]]; then
  printf 'mkdir -p %q\n' "$logs"
  printf '%q ' "${set_up[@]}" && echo '>/dev/null'
  for ((number = 0; number < count; number++)); do
    set_command "$number" "$@"
    printf '%q ' "${command[@]}"
    if ((number)); then printf '>%q 2>&1 ' "$logs/process-$number.log"; fi
    echo '</dev/null &'
  done
  exit
fi

pids=()
signal_all() {
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do
    kill -s "$1" -- "${2:-}$pid" 2>/dev/null || true # It may have just ended.
  done
}

mkdir -p "$logs"
"${set_up[@]}" >/dev/null
trap 'signal_all TERM' TERM HUP
trap 'signal_all INT' INT
set -m # A group for each process, or a terminal's Ctrl-C would reach it twice.
for ((number = 0; number < count; number++)); do
  set_command "$number" "$@"
  if ((number)); then
    "${command[@]}" </dev/null >"$logs/process-$number.log" 2>&1 &
  else
    "${command[@]}" </dev/null &
  fi
  pids[number]=$!
done

status=0 deadline=0 stopped=0
while ((${#pids[@]})); do
  worst=0
  for number in "${!pids[@]}"; do
    if kill -0 "${pids[number]}" 2>/dev/null; then continue; fi
    ended=0
    wait "${pids[number]}" 2>/dev/null || ended=$?
    unset "pids[$number]"
    # One that only lost another ends with 1, perhaps before this looks. With 75 all of them end, when
    # a signal to one has stopped the run.
    if ((ended == 75)); then
      stopped=75
    elif ((ended > worst)); then worst="$ended" culprit="$number"; fi
  done
  if ((worst && !status)); then
    status="$worst" deadline=$((SECONDS + patience))
    where=""
    if ((culprit)); then where=" (see $logs/process-$culprit.log)"; fi
    echo "launch/processes.sh: process $culprit ended with status $status$where;" \
      "the others are ended too" >&2
    signal_all TERM
  fi
  if ((deadline && SECONDS > deadline)); then signal_all KILL -; fi
  sleep 0.2
done
exit "$((status ? status : stopped))"
