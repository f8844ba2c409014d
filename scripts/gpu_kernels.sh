#!/usr/bin/env bash
# Builds the CUDA backend for the GPU of this machine, checks every kernel, and measures them.
#
#     scripts/gpu_kernels.sh check|sanitize|bench [BUILD_DIR]      CUBLASLT: its path, for prompts' products by it, too
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:-check}
build=${2:-build/cuda}

cmake -S . -B "$build" -G Ninja -DPOWERINFER_CUDA=ON -DPOWERINFER_TESTING=ON -DPOWERINFER_WERROR=ON \
    -DPOWERINFER_CUDA_ARCHITECTURES="${ARCHITECTURES:-native}" -DCMAKE_CUDA_FLAGS=-lineinfo >/dev/null
cmake --build "$build" --target powerinfer te_testing gpu_kernels_check gpu_kernels_bench gpu_prefill_check gpu_prefill_bench

case $task in
build) ;;
check)
    "$build/gpu_kernels_check"
    "$build/gpu_prefill_check" ${CUBLASLT:+"$CUBLASLT"}
    ;;
sanitize) # racecheck of ffn and fused takes many minutes (RACECHECK="ffn attention embed graph"): small models use them, too
    for part in linear ffn fused attention embed graph; do
        compute-sanitizer --tool memcheck --error-exitcode 9 "$build/gpu_kernels_check" "$part" | tail -n 4
    done
    for part in routes choices experts kept merge fetches; do # all formats take minutes
        compute-sanitizer --tool memcheck --error-exitcode 9 "$build/gpu_kernels_check" "$part" ${EXPERTS:-Q4_0 F16} | tail -n 4
    done
    compute-sanitizer --tool memcheck --error-exitcode 9 "$build/gpu_prefill_check" | tail -n 7
    for part in ${RACECHECK:-attention embed graph}; do
        compute-sanitizer --tool racecheck --error-exitcode 9 "$build/gpu_kernels_check" "$part" | tail -n 4
    done
    export POWERINFER_LIBRARY=$build/libpowerinfer.so POWERINFER_TEST_LIB=$build/libte_testing.so POWERINFER_ISA=avx512
    for test in 'test_prompts[9-some]' 'test_prompts[64-mixed]' 'test_neurons_are_counted[some]'; do
        compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q "tests/gpu/test_hybrid_gpu.py::$test" |
            tail -n 4
    done
    ;;
bench)
    "$build/gpu_kernels_bench"
    "$build/gpu_prefill_bench" ${CUBLASLT:+"$CUBLASLT"}
    ;;
*) echo "usage: $0 check|sanitize|bench|build [BUILD_DIR]" >&2; exit 2 ;;
esac
