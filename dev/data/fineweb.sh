#!/bin/sh
# FineWeb-Edu (Penedo et al., 2024: web pages chosen for their educational value), already in GPT-2's tokens: llm.c's
# shards of 100 million tokens, 200 MB each; one for validation and as many of the 1,001 for training as you ask for.
#
#   fineweb.sh [--shards N] [--out DIR] [--from DIR]
#
#   --shards N   training shards (1)
#   --out DIR    where to (data/fineweb-edu)
#   --from DIR   take them from a directory of this machine (links, no copies) instead of the Hugging Face hub
#
# What is whole already is not fetched again; a shard that was cut off goes on where it stopped.
set -eu
repo=karpathy/fineweb-edu-100B-gpt2-token-shards
hub=${HF_ENDPOINT:-https://huggingface.co}/datasets/$repo/resolve/main
shards=1 most=1001 from=
out=$(cd "$(dirname "$0")/../.." && pwd)/data/fineweb-edu

fail() {
    echo "fineweb.sh: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || fail "$1: unknown, or without its value; known are --shards N, --out DIR, --from DIR"
    case $1 in
    --shards) shards=$2 ;;
    --out) out=$2 ;;
    --from) from=$2 ;;
    *) fail "$1 is unknown; known are --shards N, --out DIR, --from DIR" ;;
    esac
    shift 2
done
case $shards in
'' | *[!0-9]* | ?????*) shards=0 ;;
esac
if [ "$shards" -lt 1 ] || [ "$shards" -gt $most ]; then fail "--shards takes a number in 1 .. $most"; fi
if [ -n "$from" ]; then
    [ -d "$from" ] || fail "--from $from is not a directory"
    from=$(cd "$from" && pwd) # links must not depend on where this was started
fi

whole() { # is this file a shard (magic, version 1) of the length that its header gives?
    [ -f "$1" ] || return 1
    # shellcheck disable=SC2046
    set -- "$1" $(od -An -td4 -N12 "$1")
    [ $# -eq 4 ] && [ "$2" = 20240520 ] && [ "$3" = 1 ] && [ "$(wc -c <"$1")" -eq $((1024 + 2 * $4)) ]
}

mkdir -p "$out"
for i in $(seq 0 "$shards"); do
    name=$(printf 'edu_fineweb_%s_%06d.bin' "$([ "$i" -eq 0 ] && echo val || echo train)" "$i")
    if ! whole "$out/$name"; then
        if [ -n "$from" ]; then
            whole "$from/$name" || fail "$from/$name is missing or not a whole shard"
            ln -sf "$from/$name" "$out/$name"
        else
            whole "$out/$name.part" ||
                error=$(curl -fsSL --connect-timeout 20 -C - -o "$out/$name.part" "$hub/$name" 2>&1) ||
                fail "cannot download $hub/$name ($error); get the shards of $repo elsewhere: fineweb.sh --from DIR"
            whole "$out/$name.part" || fail "$out/$name.part is not a whole shard; remove it and try again"
            mv "$out/$name.part" "$out/$name"
        fi
    fi
    echo "$out/$name"
done
echo "./train --data $out/edu_fineweb_train_*.bin --val $out/edu_fineweb_val_000000.bin"
