#!/usr/bin/env bash
# Where a GPU is at hand: equality of the ragged cache with the dense and with the masked one on it, then a decode step
# beside a dense one. `benchmarks/gpu.sh [cuda:1]`, from anywhere, after `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
for dtype in float32 bfloat16; do
	.venv/bin/python -m benchmarks.eviction --device "${1:-cuda}" --dtype "$dtype" --entries 128,512,2048,4096
done
