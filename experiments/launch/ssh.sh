#!/bin/bash
# Some hosts and nothing but ssh, one process a GPU:  HOSTS=node1,node2 OUT=/shared/run bash experiments/launch/ssh.sh
# The checkout and its .venv are at the same place on every host (VENV says where).
set -euo pipefail

: "${HOSTS:?names of the hosts, separated by commas}" "${OUT:?a folder that all hosts mount}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="${VENV:-$(cd "$here/../.." && pwd)/.venv}"
IFS=, read -ra hosts <<<"$HOSTS"
words="$(printf '%q ' launch -- -m jaxpar train --resume --out "$OUT" --strategy hsdp,precision=bf16 "$@")"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT # Ctrl-C here ends all; -tt hands it on to the other side
for i in "${!hosts[@]}"; do
  place="JAXPAR_COORDINATOR=${hosts[0]}:12345 JAXPAR_PROCESSES=${#hosts[@]} JAXPAR_PROCESS=$i"
  there="source $(printf %q "$here/nccl.env") && exec env $place $(printf %q "$venv/bin/jaxpar") $words"
  ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 "${hosts[i]}" "bash -c $(printf %q "$there")" </dev/null &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  one=0
  wait "$pid" || one=$?
  # 75 says that another process ended this one: its status is the one to report.
  if ((one && (status == 0 || status == 75))); then status=$one; fi
done
exit "$status"
