#!/bin/sh
# What the documentation says of a GPU, measured again: `benchmarks/gpu.sh FOLDER` takes about half an hour on an H200 and leaves a
# report of each part in the folder. It needs torch alone. Name parts to run these alone: `benchmarks/gpu.sh FOLDER layers widths`.
# `peers` compares with reformer-pytorch where that is installed (pip install '.[peers]'). OFFLOAD_HOST=64GiB says how much host
# memory offload may take, where the system says less than there is (a virtual machine whose memory grows).
set -eu
cd "$(dirname "$0")/.."
parts="depth, frontier, layers, peers, small, whole, widths"
[ $# -ge 1 ] || { echo "benchmarks/gpu.sh FOLDER [PART ...]: $parts" >&2; exit 2; }
folder=$1
shift
mkdir -p "$folder"
today=$(date +%F)

bench() { # NAME OPTIONS: one comparison, in files of that name
    name=$today-bench-$1-gpu
    shift
    PYTHONPATH=src "${PYTHON:-python3}" -m retrograde.bench --device cuda --json "$folder/$name.json" "$@"
}
large() {
    bench "$@" --dim 1024 --heads 16 --seq 4096 --batch 4 --rounds 10
}
layers() { # NAME OPTIONS: ordinary layers in every way, in a file of that name
    name=$today-layers-$1-gpu
    shift
    PYTHONPATH=src "${PYTHON:-python3}" -m retrograde.bench.layers --device cuda --json "$folder/$name.json" \
        ${OFFLOAD_HOST:+--host "$OFFLOAD_HOST"} "$@"
}

for part in ${@:-depth frontier layers peers small whole widths}; do
    case $part in
    depth) # flat memory, and time against checkpointing
        large depth --depth 12 24 48 96 --variants checkpoint checkpoint-compiled reverse reverse-compiled --profile ;;
    frontier) # time at every memory size, against torch's partitioner
        for depth in 24 48; do
            large frontier-$depth --depth $depth --variants 'partition-0.[35]' 'budget-*-compiled' reverse-compiled \
                --budget 1GiB 2GiB 3GiB 4GiB 8GiB
        done ;;
    layers) # ordinary layers, flat in depth and on the host: about six minutes
        plain="ordinary checkpoint save-on-cpu rg-checkpoint rg-offload reverse"
        bf16="--dtype bfloat16 --ways $plain partition rg-offload-compiled"
        autocast="--dtype float32 --autocast bfloat16 --ways $plain"
        layers bf16-1024 --dim 1024 --seq 4096 --batch 4 --depth 24 48 --rounds 7 $bf16 bits
        layers autocast-1024 --dim 1024 --seq 4096 --batch 4 --depth 24 48 --rounds 6 $autocast
        layers bf16-2048 --dim 2048 --seq 4096 --batch 4 --depth 24 48 --rounds 5 $bf16
        layers autocast-2048 --dim 2048 --seq 4096 --batch 4 --depth 24 48 --rounds 5 $autocast ;;
    peers) large peers --depth 12 --variants reformer reverse ;;
    small) # the whole step in a CUDA graph
        bench small --dim 256 --heads 4 --seq 512 --batch 2 --depth 12 --rounds 20 \
            --variants ordinary-captured reverse-captured ;;
    whole) # the whole model compiled
        large whole-1024 --depth 6 --variants ordinary-fullgraph reverse-fullgraph
        bench whole-2048 --dim 2048 --heads 16 --seq 2048 --batch 4 --depth 6 --rounds 10 --variants ordinary-fullgraph reverse-fullgraph ;;
    widths) # where the link keeps up, at equal tokens: about half a minute
        layers widths --rule --dim 256 512 1024 --seq 512 4096 --tokens 16384 --depth 12 --rounds 10 --dtype bfloat16 \
            --ways ordinary checkpoint rg-offload reverse ;;
    *) echo "benchmarks/gpu.sh: no part $part; there are $parts" >&2; exit 2 ;;
    esac
done
