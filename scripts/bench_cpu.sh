#!/bin/bash
# Measures all that docs/performance.md says of the CPU, on this machine:
#
#     scripts/bench_cpu.sh MODELS OUT [PART ...]
#
# MODELS: a folder for the models, which scripts/make_model.py writes where they are missing (32 GB). OUT: a folder for
# the raw results, JSON lines; scripts/performance_tables.py makes tables of them. PARTs (all): decode sparse squared copied whole
# depth many widths prompt short isa peers mixtures kernels llama threads peak.
#
# PYTHON    the Python with powerinfer, and with llama-cpp-python for "peers"
# PEERS     folders with other builds of llama-cpp-python, named after their instruction sets (native avx512 avx2); those
#           that are there are compared, each with the same set of ours. Without it: the one that PYTHON has
# THREADS   a list for "threads" (1,2,4,8,16)
# LAYERS    of the model (8)
# ROUNDS    repetitions (5)
# RUN       a command to put before each measurement, for example numactl --cpunodebind=0
# TEST_LIB  libte_testing.so for "kernels" (build/testing/libte_testing.so, made by `make build-testing`)
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0" | cut -c3- >&2; exit 2; }
models=$1 out=$2
shift 2
parts=${*:-decode sparse squared copied whole depth many widths prompt short isa peers mixtures kernels llama threads peak}
scripts=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} layers=${LAYERS:-8} rounds=${ROUNDS:-5} threads=${THREADS:-1,2,4,8,16}
mkdir -p "$models" "$out"

# model TYPE FORM: writes both forms of a type if they are missing; prints the path.
model() {
    local type=$1 form=$2 stem="$models/llama-2-7b-${layers}l-$1"
    if [ ! -e "$stem.gguf" ] || { [ "$form" = powerinfer ] && [ ! -e "$stem.powerinfer.gguf" ]; }; then
        local format=gguf
        [ "$form" = powerinfer ] && format=both
        "$python" "$scripts/make_model.py" llama-2-7b --layers "$layers" --type "$type" --format $format -o "$stem.gguf" >&2
    fi
    if [ "$form" = powerinfer ]; then echo "$stem.powerinfer.gguf"; else echo "$stem.gguf"; fi
}
# mixture SHAPE TYPE: the same of a mixture of experts, ReLU experts in both forms; prints the path of the plain one.
mixture() {
    local file="$models/$1-${layers}l-${2%_MOE}.gguf" format=gguf
    case $1 in smallthinker*) format=both ;; esac
    [ -e "$file" ] || "$python" "$scripts/make_model.py" "$1" --layers "$layers" --type "$2" --format $format -o "$file" >&2
    echo "$file"
}
# measure FILE COMMAND...: appends what the command prints; one that fails is named, and the rest is measured
failed=0
measure() {
    local file=$1
    shift
    echo "$file: $*" >&2
    if ${RUN:-} "$@" >"$out/.part"; then
        cat "$out/.part" >>"$out/$file"
    else
        echo "$file: failed: $*" >&2
        failed=1
    fi
    rm -f "$out/.part"
}
bench() {
    local file=$1
    shift
    measure "$file" "$python" -m powerinfer bench "$@" -r "$rounds" --json
}
peers() {
    local file=$1
    shift
    measure "$file" "$python" "$scripts/bench_peers.py" "$@" --json
}
# The sets that this machine has, best first.
sets() { "$python" -c 'from powerinfer._engine.machine import has_isa; print(*filter(has_isa, ("amx", "avx512_bf16", "avx512", "avx2_vnni", "avx2")))'; }

for part in $parts; do
    rm -f "$out/$part.jsonl" "$out/$part.txt"
    case $part in
    decode)
        for type in F16 Q8_0 Q4_0 Q4_K_M; do
            bench decode.jsonl "$(model $type gguf)" -p 0 -n 32 --sparsity dense,exact
        done ;;
    sparse)
        for type in F16 Q4_0; do
            bench sparse.jsonl "$(model $type powerinfer)" -p 0 -n 32 --sparsity dense,exact,predicted
        done ;;
    squared) # squared ReLU, all layers; 10 % of the neurons active
        for shape in afm-4.5b minitron-8b; do
            for type in F16 Q4_0; do
                file="$models/$shape-$type.gguf"
                [ -e "$file" ] || "$python" "$scripts/make_model.py" $shape --type $type --format powerinfer -o "$file" >&2
                bench squared.jsonl "$file" -p 0 -n 16 --sparsity dense,exact,predicted
                bench squared.jsonl "$file" -p 0 -n 16 --sparsity predicted --predictor sign
            done
        done ;;
    copied)
        for type in F16 Q8_0 Q4_0 Q4_K_M; do
            bench copied.jsonl "$(model $type gguf)" -p 0 -n 32 --sparsity dense,exact --no-mmap
        done
        for type in F16 Q4_0; do
            bench copied.jsonl "$(model $type powerinfer)" -p 0 -n 32 --sparsity predicted --no-mmap
        done ;;
    whole) # all layers: what attention and the output matrix are of a token is that of the published model
        bench whole.jsonl "$(layers=32 model Q4_0 powerinfer)" -p 0 -n 16 --sparsity dense,exact,predicted ;;
    depth) # few layers, of whose K and V 32k tokens take as much as in the others
        bench depth.jsonl "$(layers=2 model F16 powerinfer)" -p 0 -n 8 -d 0,4096,32768 --sparsity dense ;;
    many)
        for type in F16 Q4_0; do
            bench many.jsonl "$(model $type powerinfer)" -p 0 -n 16 -np 1,2,4,8 --sparsity exact,predicted
        done ;;
    widths) # ordinary files; each set's kernels, of a mixture the best set's
        for isa in $(sets | tr ' ' '\n' | grep -v bf16); do
            for type in F16 Q4_0 Q4_K_M; do
                POWERINFER_ISA=$isa bench widths.jsonl "$(model $type gguf)" -p 0 -n 16 -np 1,2,4,8,16,32 --sparsity dense
            done
        done
        bench widths.jsonl "$(mixture qwen3-30b-a3b Q4_0)" -p 0 -n 16 -np 1,2,4,8,16,32 ;;
    short) # short prompts beside the peer, where the last token and the first panels count most
        for folder in ${PEERS:-""}; do
            isa=$(basename "${folder:-native}")
            [ "$isa" = native ] && isa=$(sets | cut -d' ' -f1)
            POWERINFER_ISA=$isa peers short.jsonl "$(model F16 gguf)" ${folder:+--peer-path "$folder"} -p 64,128,512 -n 0 -r 5
        done ;;
    prompt)
        for type in F16 Q8_0 Q4_0 Q4_K_M; do
            bench prompt.jsonl "$(model $type gguf)" -p 128,512 -n 0 --sparsity dense
        done ;;
    isa)
        for isa in $(sets); do
            for type in F16 Q8_0 Q4_0 Q4_K_M; do
                POWERINFER_ISA=$isa bench isa.jsonl "$(model $type gguf)" -p 512 -n 16 --sparsity dense
            done
        done ;;
    peers)
        best=$(sets | cut -d' ' -f1)
        for folder in ${PEERS:-""}; do
            isa=$(basename "${folder:-native}")
            [ "$isa" = native ] && isa=$best
            for type in F16 Q8_0 Q4_0 Q4_K_M; do
                POWERINFER_ISA=$isa peers peers.jsonl "$(model $type gguf)" ${folder:+--peer-path "$folder"} -p 512 -n 0 -r 1
                POWERINFER_ISA=$isa peers peers.jsonl "$(model $type gguf)" ${folder:+--peer-path "$folder"} -p 0 -n 16 -r 3
            done
            for type in F16 Q4_0; do
                POWERINFER_ISA=$isa peers peers.jsonl "$(model $type powerinfer)" --peer-model "$(model $type gguf)" \
                    ${folder:+--peer-path "$folder"} -p 0 -n 16 -r 3 --sparsity exact,predicted
            done
        done ;;
    mixtures)
        best=$(sets | cut -d' ' -f1) qwen=$(mixture qwen3-30b-a3b Q4_0) relu=$(mixture smallthinker-21b Q4_0)
        gpt=$(layers=$((layers / 2)) mixture gpt-oss-20b MXFP4_MOE)
        rm -f "$out/mixtures-many.jsonl"
        bench mixtures-many.jsonl "$qwen" -p 0 -n 16 -np 1,2,4,8
        for folder in ${PEERS:-""}; do
            isa=$(basename "${folder:-native}")
            [ "$isa" = native ] && isa=$best
            for model in "$qwen" "$gpt" "${relu%.gguf}.powerinfer.gguf --peer-model $relu --sparsity dense,exact"; do
                # shellcheck disable=SC2086
                POWERINFER_ISA=$isa peers mixtures.jsonl $model ${folder:+--peer-path "$folder"} \
                    --peer-option flash_attn=true -p 128,512,2048 -n 32 -r 3
            done
        done ;;
    kernels)
        library=${TEST_LIB:-$scripts/../build/testing/libte_testing.so}
        cc -O3 "$scripts/bench_rows.c" "$library" -Wl,-rpath,"$(dirname "$(realpath "$library")")" -o "$out/.bench_rows"
        n=$("$python" -c 'from powerinfer._engine.machine import cores; print(cores())')
        for isa in $(sets | tr ' ' '\n' | grep -v "amx\|bf16"); do
            for type in F16 BF16 Q8_0 Q4_0 Q4_K Q6_K; do measure kernels.txt "$out/.bench_rows" "$n" "$isa" $type; done
        done
        cc -O3 "$scripts/bench_tokens.c" "$library" -Wl,-rpath,"$(dirname "$(realpath "$library")")" -pthread -o "$out/.bench_tokens"
        measure tokens.txt "$out/.bench_tokens" "$n" avx2,avx2_vnni,avx512 F16,Q8_0,Q4_0,Q4_K,Q6_K
        rm -f "$out/.bench_rows" "$out/.bench_tokens" ;;
    llama)
        measure llama.jsonl "$python" "$scripts/bench_llama.py" "$(model F16 gguf)"
        measure llama.jsonl "$python" "$scripts/bench_llama.py" "$(model Q4_0 gguf)" ;;
    threads)
        bench threads.jsonl "$(model F16 powerinfer)" -p 0 -n 32 -t "$threads" --sparsity dense,predicted
        bench threads.jsonl "$(model Q4_0 powerinfer)" -p 0 -n 32 -t "$threads" --sparsity dense,predicted ;;
    peak)
        cc -O2 "$scripts/bench_peak.c" -pthread -o "$out/.bench_peak"
        measure peak.jsonl "$out/.bench_peak"
        rm -f "$out/.bench_peak" ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
    esac
done
exit $failed
