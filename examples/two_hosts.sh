#!/usr/bin/env bash
# One training on two hosts that are processes of this machine. On real ones the same line runs on
# each, with host 0's name for 127.0.0.1. Arguments are settings: examples/two_hosts.sh seed=1
set -euo pipefail
cd "$(dirname "$0")/.."

port=${PORT:-29500}
folder=${FOLDER:-logs/two_hosts}
hosts=()
trap 'kill "${hosts[@]}" 2>/dev/null || true' EXIT
for _ in 0 1; do
    torchrun --nnodes="${NODES:-2}" --nproc-per-node=1 --max-restarts="${RESTARTS:-0}" \
        --rdzv-backend=c10d --rdzv-endpoint="127.0.0.1:$port" \
        train.py trainer.num_nodes=auto global_batch_size=16 "hydra.run.dir=$folder" "$@" &
    hosts+=($!)
done
wait "${hosts[0]}"
wait "${hosts[1]}"
