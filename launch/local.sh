#!/usr/bin/env bash
# On a machine that has only Python: sets bagrpo up in .venv from requirements.lock, then runs what
# it is given. Later runs start at once, until a lock, pyproject.toml or the checkout's place changes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VENV:-$root/.venv}"
[[ $venv == /* ]] || venv="$PWD/$venv"
stamp="$venv/.bagrpo-installed"
compiler="$venv/tpu-compiler"

usage() {
  cat <<'EOF_USAGE'
Sets bagrpo up in .venv (the first time: about two minutes), then runs one of its commands.

  launch/local.sh COMMAND [argument ...]      what `bagrpo COMMAND ...` does
  launch/local.sh test [pytest argument ...]  the gate: ruff, pyright, shellcheck, pytest

`.venv/bin/bagrpo --help` lists the commands. Needs Python 3.11 or newer; installs through uv when
it is there, else through pip. In the environment,

  ACCELERATOR=tpu, ACCELERATOR=cuda  has it install what JAX needs for those, besides
  PYTHON=/path/to/python3            chooses the interpreter that .venv is made with
  VENV=/path/to/folder               sets it up there and not in .venv
EOF_USAGE
}

fail() {
  echo "launch/local.sh: $*" >&2
  exit 1
}

is_usable() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
    if is_usable "$candidate"; then
      echo "$candidate"
      return
    fi
    [[ $candidate != "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON does not run as Python 3.11 or newer"
  done
  fail "found no Python 3.11 or newer (tried python3.13, python3.12, python3.11, python3);" \
    "install one, or name it as PYTHON=/path/to/python3"
}

minor_version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# What an installation depends on. Places count because the scripts in it hold full paths.
fingerprint() {
  { echo "$root $venv" && cat "$root"/requirements*.lock "$root/pyproject.toml"; } | cksum
}

# Whether there is all, and each accelerator that is named. A stamp is the fingerprint of its time.
is_installed() {
  local wanted part
  wanted="$(fingerprint)"
  for part in "" "$@"; do
    [[ -f $stamp${part:+-$part} && $(<"$stamp${part:+-$part}") == "$wanted" ]] || return 1
  done
  is_usable "$venv/bin/python"
}

install() {
  local python="$1" installed part
  local -a installer to
  shift
  installed="$(fingerprint)" # of the files as they are now, should they change meanwhile
  [[ -x $venv/bin/python ]] || "$python" -m venv --without-pip "$venv"
  if uv --version >/dev/null 2>&1; then
    installer=(uv pip install -q --python "$venv/bin/python")
  else
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
      "$venv/bin/python" -m ensurepip >/dev/null ||
      fail "$python comes without pip (Debian and Ubuntu: apt install python3-venv), and there is no uv"
    installer=("$venv/bin/python" -m pip install -q)
  fi
  installer+=(--no-deps) # The locks are complete.
  if ! is_installed; then
    echo "launch/local.sh: sets bagrpo up in $venv, which takes about two minutes"
    "${installer[@]}" --only-binary :all: --require-hashes -r "$root/requirements.lock"
    "${installer[@]}" --no-build-isolation -e "$root" # The build backend is in the lock.
    "${installer[@]}" --require-hashes -r "$root/requirements-gym.lock" >"$venv/.bagrpo-gym.log" 2>&1 ||
      echo "launch/local.sh: left out reasoning-gym, whose installation takes a C compiler and" \
        "Python's headers; all else works (why: $venv/.bagrpo-gym.log; to try again: rm '$stamp')"
    echo "$installed" >"$stamp"
  fi
  for part in "$@"; do
    if is_installed "$part"; then continue; fi
    # The compiler stands apart: where there is no TPU, JAX would complain of it at every start.
    case $part in
      compiler)
        rm -rf "$compiler" # pip would leave an older one as it is
        to=(--target "$compiler" -r "$root/requirements-tpu.lock")
        ;;
      *) to=(-r "$root/requirements-$part.lock") ;;
    esac
    echo "launch/local.sh: installs ${to[-1]} in $venv"
    "${installer[@]}" --only-binary :all: --require-hashes "${to[@]}"
    echo "$installed" >"$stamp-$part"
  done
}

# Sets up all, with the accelerators that are named here and by ACCELERATOR.
set_up() {
  local python
  case "${ACCELERATOR:-}" in
    "" | tpu | cuda) set -- ${ACCELERATOR:+"$ACCELERATOR"} "$@" ;;
    *) fail "ACCELERATOR=$ACCELERATOR is neither tpu nor cuda; without it, JAX is for CPUs" ;;
  esac
  if [[ -n ${PYTHON:-} && -x $venv/bin/python ]]; then
    [[ $(minor_version "$PYTHON") == "$(minor_version "$venv/bin/python")" ]] ||
      fail "$venv has Python $(minor_version "$venv/bin/python"), not that of PYTHON=$PYTHON;" \
        "delete that folder to change it"
  fi
  if is_installed "$@"; then return; fi
  if [[ -e $venv/bin/python || -L $venv/bin/python ]]; then
    python="$venv/bin/python"
    is_usable "$python" ||
      fail "$python no longer runs as Python 3.11 or newer; delete $venv and run this again"
  else
    python="$(find_python)"
  fi
  mkdir -p "$venv"
  (
    # The lock belongs to this subshell's open file and ends with it, however it ends. Python takes
    # it because not every system has a flock command. Not `.lock`: uv takes that one.
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if ! is_installed "$@"; then install "$python" "$@" >&2; fi
  ) 9>"$venv/.bagrpo-lock"
}

run_gate() {
  cd "$root"
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
  # Otherwise pyright asks the network whether there is a newer one.
  PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$venv/bin/pyright" --pythonpath "$venv/bin/python"
  "$venv/bin/shellcheck" launch/*.sh .ci/*
  exec "$venv/bin/python" -m pytest -n auto --dist worksteal "$@"
}

# Plans for TPUs, which tests make too, take their compiler, which there is for one system only.
set_up_for_plans() {
  if [[ $(uname -sm) != "Linux x86_64" || ${ACCELERATOR:-} == tpu ]]; then
    set_up
  else
    set_up compiler
    export PYTHONPATH="$compiler${PYTHONPATH:+:$PYTHONPATH}"
  fi
}

case "${1:-}" in
  "" | -h | --help | help) usage ;;
  test)
    shift
    set_up_for_plans
    run_gate "$@"
    ;;
  *)
    if [[ $1 == plan && $* =~ topology[=\ ]([0-9]+x)?v ]]; then set_up_for_plans; else set_up; fi
    # Large arrays in huge pages, where Linux leaves that to programs: an update on CPU takes about
    # a seventh less time. Other systems ignore it.
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
    exec "$venv/bin/bagrpo" "$@"
    ;;
esac
