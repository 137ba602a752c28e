#!/bin/sh
# nanoGPT's small run for a CPU (its README: config/train_shakespeare_char.py with these sizes), on TinyShakespeare
# with bytes for characters: 4 layers, 4 heads, 128 channels, 2,000 steps of 12 sequences of 64. It ends at a validation
# loss of 1.88; so must this one, ± 0.06. Minutes.
#
#   dev/bench/nanogpt.sh [TEXT]
set -eu
cd "$(dirname "$0")/../.."
text=${1:-data/tinyshakespeare.txt}
[ -f "$text" ] || { echo "nanogpt.sh: no $text; dev/data/tinyshakespeare.sh fetches it" >&2; exit 2; }
make -s build/cpu-fp32/train
log=$(mktemp)
trap 'rm -f "$log"' EXIT
build/cpu-fp32/train --data "$text" --arch gpt2 --layers 4 --heads 4 --hidden 128 --seq 64 \
    --micro-batch 12 --accum 1 --steps 2000 --lr 1e-3 --min-lr 1e-4 --warmup 100 \
    --beta2 0.99 --weight-decay 0.1 --grad-clip 1 --eval-every 500 --eval-batches 200 --log "$log"
# The last evaluation's loss, out of {"event":"val","step":2000,"loss":1.88...}
sed -n 's/.*"event":"val".*"loss":\([0-9.e+-]*\).*/\1/p' "$log" | tail -n 1 | awk '
    { verdict = $1 >= 1.82 && $1 <= 1.94 ? "pass" : "miss"
      printf "%s  validation loss %.4f  (1.88 ± 0.06)\n", verdict, $1 }'
