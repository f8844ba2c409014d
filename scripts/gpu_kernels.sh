#!/usr/bin/env bash
# Builds the CUDA backend for the GPU of this machine, checks every kernel, and measures them.
#
#     scripts/gpu_kernels.sh check|sanitize|bench [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:-check}
build=${2:-build/cuda}

cmake -S . -B "$build" -G Ninja -DPOWERINFER_CUDA=ON -DPOWERINFER_TESTING=ON -DPOWERINFER_WERROR=ON \
    -DPOWERINFER_CUDA_ARCHITECTURES="${ARCHITECTURES:-native}" -DCMAKE_CUDA_FLAGS=-lineinfo >/dev/null
cmake --build "$build" --target gpu_kernels_check gpu_kernels_bench

case $task in
build) ;;
check) "$build/gpu_kernels_check" ;;
sanitize) # racecheck of ffn takes many minutes: RACECHECK="ffn attention embed graph"
    for part in ffn attention embed graph; do
        compute-sanitizer --tool memcheck --error-exitcode 9 "$build/gpu_kernels_check" "$part" | tail -n 4
    done
    for part in ${RACECHECK:-attention embed graph}; do
        compute-sanitizer --tool racecheck --error-exitcode 9 "$build/gpu_kernels_check" "$part" | tail -n 4
    done
    ;;
bench) "$build/gpu_kernels_bench" ;;
*) echo "usage: $0 check|sanitize|bench|build [BUILD_DIR]" >&2; exit 2 ;;
esac
