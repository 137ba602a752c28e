#!/bin/sh
# Trains a small model on this repository's text with two ranks, saves it, and goes on from the checkpoint.
set -eu
cd "$(dirname "$0")/.."
rm -rf runs/demo
echo; echo "--- two ranks, 600 steps; a checkpoint at the end"
./train --ranks 2 --steps 600 --lr 2e-3 --eval-every 200 --sample 300 --save runs/demo
# One rank with twice the micro-batch takes the same global batch.
echo; echo "--- resumed from the checkpoint, to step 800, on one rank: another layout, the same model"
./train --micro-batch 16 --steps 800 --lr 2e-3 --eval-every 100 --sample 300 --resume runs/demo --save runs/demo
