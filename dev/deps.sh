#!/bin/sh
# What the program needs to be built (build), its CUDA kernels to be run on a CPU (emu) and all to be tested (test) beyond a
# C compiler, and how this machine gets it:
# installed where the user is root on Debian or Ubuntu; elsewhere the line to run is printed and the script ends with 1.
set -eu
cd "$(dirname "$0")/.."
packages="gcc libc6-dev make pkg-config libopenmpi-dev openmpi-bin libopenblas-dev libcjson-dev"
emu="g++ libboost-context-dev python3 python3-numpy python3-pytest"
case ${1:-build} in
    emu) packages="$packages $emu" ;;
    test) packages="$packages $emu clang libomp-dev libcmocka-dev curl ca-certificates iproute2 python3-venv python3-pip python3-torch" ;;
esac

if command -v dpkg-query >/dev/null 2>&1; then
    missing=""
    for p in $packages; do
        dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
    done
    if [ -n "$missing" ]; then
        line="apt-get install -y --no-install-recommends$missing"
        if [ "$(id -u)" -ne 0 ]; then
            echo "missing:$missing; run: sudo apt-get update && sudo $line" >&2
            exit 1
        fi
        echo "installing:$missing"
        log=$(mktemp)
        export DEBIAN_FRONTEND=noninteractive
        if ! { apt-get update && $line; } >"$log" 2>&1; then
            tail -n 20 "$log" >&2
            echo "could not install:$missing" >&2
            exit 1
        fi
        rm -f "$log"
    fi
elif command -v brew >/dev/null 2>&1; then
    echo "macOS: brew install gcc open-mpi openblas cjson cmocka pkg-config, then make CC=gcc-14 (see README.md)"
else
    echo "install a C compiler, make, pkg-config, Open MPI, OpenBLAS and cJSON with this system's packages" >&2
fi

if [ "${1:-build}" = test ]; then # Python packages for the tests, on top of the system's PyTorch
    python=$(command -v /usr/bin/python3 || command -v python3)
    stamp=build/venv/ready
    if ! cmp -s dev/requirements.txt "$stamp"; then
        mkdir -p build
        "$python" -m venv --system-site-packages build/venv
        build/venv/bin/python -m pip install --quiet --disable-pip-version-check -r dev/requirements.txt
        cp dev/requirements.txt "$stamp"
    fi
fi
