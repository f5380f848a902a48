#!/bin/sh
# What docs/speed.md says of a GPU, measured again: `benchmarks/gpu.sh FOLDER` takes about a quarter of an hour on an H200 and leaves a
# report of each part in the folder. It needs torch alone. Name parts to run these alone: `benchmarks/gpu.sh FOLDER depth small`.
# `peers` compares with reformer-pytorch where that is installed (pip install '.[peers]').
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "benchmarks/gpu.sh FOLDER [PART ...]: depth, frontier, peers, small, whole" >&2; exit 2; }
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

for part in ${@:-depth frontier peers small whole}; do
    case $part in
    depth) # flat memory, and time against checkpointing
        large depth --depth 12 24 48 96 --variants checkpoint checkpoint-compiled reverse reverse-compiled --profile ;;
    frontier) # time at every memory size, against torch's partitioner
        for depth in 24 48; do
            large frontier-$depth --depth $depth --variants 'partition-0.[35]' 'budget-*-compiled' reverse-compiled \
                --budget 1GiB 2GiB 3GiB 4GiB 8GiB
        done ;;
    peers) large peers --depth 12 --variants reformer reverse ;;
    small) # the whole step in a CUDA graph
        bench small --dim 256 --heads 4 --seq 512 --batch 2 --depth 12 --rounds 20 \
            --variants ordinary-captured reverse-captured ;;
    whole) # the whole model compiled
        large whole-1024 --depth 6 --variants ordinary-fullgraph reverse-fullgraph
        bench whole-2048 --dim 2048 --heads 16 --seq 2048 --batch 4 --depth 6 --rounds 10 --variants ordinary-fullgraph reverse-fullgraph ;;
    *) echo "benchmarks/gpu.sh: no part $part; there are depth, frontier, peers, small, whole" >&2; exit 2 ;;
    esac
done
