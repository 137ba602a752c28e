#!/bin/sh
# Some of Shakespeare's plays in one text of 1.1 MB: data/tinyshakespeare.txt.
#
#   tinyshakespeare.sh [FILE]     FILE is a copy that is here already; without one it is downloaded
set -eu
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
bytes=1115394
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
dir=$(cd "$(dirname "$0")/../.." && pwd)/data
out=$dir/tinyshakespeare.txt
part=$out.part

fail() {
    rm -f "$part"
    echo "tinyshakespeare.sh: $*" >&2
    exit 2
}

check() { # file, what to call it
    found=$(wc -c <"$1")
    [ "$found" -eq $bytes ] || fail "$2 has $found bytes, tinyshakespeare.txt has $bytes"
    [ "$(sha256sum <"$1")" = "$sha256  -" ] || fail "$2 has the right size, but not the right bytes (sha256)"
}

if [ $# -eq 0 ] && [ -f "$out" ]; then
    check "$out" "$out"
    echo "$out is here already"
    exit
fi
mkdir -p "$dir"
if [ $# -gt 0 ]; then
    [ -f "$1" ] || fail "$1 is not a file"
    cat "$1" >"$part"
    check "$part" "$1"
else
    error=$(curl -fsSL --connect-timeout 20 -o "$part" "$url" 2>&1) ||
        fail "cannot download $url (${error:-no answer}); get it elsewhere: tinyshakespeare.sh FILE"
    check "$part" "$url"
fi
mv "$part" "$out"
echo "$out"
