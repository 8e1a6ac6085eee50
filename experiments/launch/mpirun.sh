#!/bin/bash
# 2 hosts under Open MPI, one process a GPU:  HOSTS=node1,node2 OUT=/shared/run bash experiments/launch/mpirun.sh
# GPUS says how many a host has, if not 8.
set -euo pipefail

: "${HOSTS:?names of the hosts, separated by commas}" "${OUT:?a folder that all hosts mount}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/nccl.env"
gpus="${GPUS:-8}"
count="$(tr ',' '\n' <<<"$HOSTS" | wc -l)"
# Open MPI 5 does not tell its processes where the first of them is; 4 does, and this does no harm there.
export JAXPAR_COORDINATOR="${JAXPAR_COORDINATOR:-${HOSTS%%,*}:12345}"
run=(mpirun -np "$((count * gpus))" --host "${HOSTS//,/:$gpus,}:$gpus" --map-by "ppr:$gpus:node" --bind-to none
  -x PATH -x JAXPAR_COORDINATOR -x JAXPAR_WATCHDOG -x NCCL_DEBUG -x NCCL_SOCKET_IFNAME)

"${run[@]}" jaxpar doctor --strategy hsdp --folder "$OUT"
"${run[@]}" jaxpar train --resume --out "$OUT" --strategy hsdp,precision=bf16 "$@"
