#!/bin/bash
# What only a GPU can tell of the CUDA kernels and the program on them, in one go of at most ten minutes: dev/gpu_check.sh
#
#   build                 the libraries for this card
#   instructions          each wrapper of kernels/ptx.cuh, held to what dev/emu's twin of it is held to
#   definitions           the CPU half, which the tests compare with
#   kernels               tests/test_cuda_*.py with KERNEL_DEVICE=cuda
#   programs, trainer     the training program: the law against its CPU build, tokens/s and MFU (dev/gpu_train.py)
#   bench                 time of every kernel and rung, and its share of this card's ceilings
#   memcheck, racecheck   compute-sanitizer over the tests' small cases, where it works
#
# Needs a GPU of sm_80 or newer, nvcc, and a python3 with numpy, torch and pytest (PYTHON=… names another). The program
# also takes cJSON; with MPI and NCCL it runs on several ranks, which share the GPU, else on one.
# Where there is no OpenBLAS to build the CPU half with, bring it along, for both precisions,
#     make kernels DEVICE=cpu MPI=0 PRECISION=… BUILD=build/cpu-… CFLAGS_MORE=-march=x86-64-v3
# and have LD_LIBRARY_PATH name a folder with libopenblas.so.0 and what that needs.
# Logs stay in build/gpu_check. Ends with 0 where all parts did well, 1 where one did not, 2 where nothing could begin.
set -u
self=$(realpath "$0") # before cd: $0 may be relative
cd "$(dirname "$self")/.." || exit 1
logs=build/gpu_check
python=${PYTHON:-python3}
export KERNEL_DEVICE=cuda OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
status=0

case ${1:-all} in # a part by its name
    build | definitions)
        [ "$1" = build ] && device=cuda || device=cpu
        if [ $device = cpu ] && ! echo '#include <cblas.h>' | ${CC:-cc} -E -x c - -o /dev/null 2>/dev/null; then
            echo "no OpenBLAS here: taking build/cpu-*/libkernels.so as they are"
            touch -c build/cpu-fp32/libkernels.so build/cpu-bf16/libkernels.so # or make would make them again
        fi
        jobs=()
        for precision in fp32 bf16; do
            make -s -j8 kernels DEVICE=$device PRECISION="$precision" MPI=0 BUILD="build/$device-$precision" &
            jobs+=($!)
        done
        for job in "${jobs[@]}"; do wait "$job" || status=1; done
        for precision in fp32 bf16; do
            "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "build/$device-$precision/libkernels.so" || status=1
        done
        exit $status
        ;;
    programs) # with MPI and NCCL where both are here, else for one rank
        mpi=1
        echo '#include <nccl.h>
int main() { return ncclGroupStart(); }' | nvcc -x cu - -lnccl -o /dev/null 2>/dev/null && command -v mpicc >/dev/null || mpi=0
        for precision in fp32 bf16; do
            if [ $mpi = 0 ]; then # the kernels are the same
                mkdir -p "build/cuda-$precision-nompi" && cp -a "build/cuda-$precision/kernels" "build/cuda-$precision-nompi/"
            fi
            make -s -j16 DEVICE=cuda PRECISION="$precision" MPI=$mpi build/repository.txt \
                "build/cuda-$precision$([ $mpi = 1 ] || echo -nompi)/train" || status=1
        done
        make -s -j8 DEVICE=cpu PRECISION=fp32 MPI=$mpi "build/cpu-fp32$([ $mpi = 1 ] || echo -nompi)/train" ||
            echo "no CPU build to hold the law against"
        exit $status
        ;;
    kernels) # eight files at a time, each with a log of its own; what failed is shown
        find tests -name 'test_cuda_*.py' ! -name '*_static.py' ! -name '*_bytes.py' -printf '%f\n' | sort |
            xargs -P 8 -I{} "$self" kernels_of {}
        for log in "$logs"/test_cuda_*.log; do
            echo "$(basename "$log" .py.log): $(tail -n 1 "$log")"
            [ -e "$log.passed" ] && continue
            status=1
            grep -E '^(E  |FAILED|ERROR)' "$log" | head -n 20
        done
        exit $status
        ;;
    kernels_of)
        timeout -k 5 100 "$python" -m pytest -q -p no:cacheprovider --tb=short "tests/$2" >"$logs/$2.log" 2>&1 &&
            touch "$logs/$2.log.passed"
        exit 0
        ;;
    memcheck | racecheck)
        for precision in bf16 fp32; do
            compute-sanitizer --tool "$1" --error-exitcode 9 "$python" tests/kernels.py "$precision" || status=1
        done
        exit $status
        ;;
    all) ;;
    *)
        sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$self"
        exit 2
        ;;
esac

nothing() {
    echo "gpu_check: $1: nothing was checked" >&2
    exit 2
}
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || nothing "no GPU here (nvidia-smi -L names none)"
command -v nvcc >/dev/null || nothing "a GPU, but no nvcc to build for it"
"$python" -c 'import numpy, torch, pytest' || nothing "$python lacks numpy, torch or pytest (PYTHON=… names another)"
rm -rf "$logs"
mkdir -p "$logs"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
nvcc --version | grep release

summary=""
note() { # part, what became of it
    summary+=$(printf '%-14s %s' "$1" "$2")$'\n'
    echo "== $1: $2"
}
# Runs a part, no longer than its seconds and what is left of the whole; its output is shown and kept.
part() { # name, seconds, command…
    local name=$1 seconds=$2 begin=$SECONDS left=$((${GPU_CHECK_SECONDS:-590} - SECONDS)) code
    shift 2
    if [ "$left" -lt "$seconds" ]; then seconds=$left; fi
    if [ "$seconds" -lt 5 ]; then
        note "$name" "skipped: no time left"
        status=1
        return 1
    fi
    echo "== $name"
    timeout -k 5 "$seconds" "$@" 2>&1 | tee "$logs/$name.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) note "$name" "ok, $((SECONDS - begin)) s" ;;
        124 | 137) note "$name" "FAILED: not done in the $seconds s it had" ;;
        *) note "$name" "FAILED with $code after $((SECONDS - begin)) s: $logs/$name.log" ;;
    esac
    [ "$code" = 0 ] || status=1
    return "$code"
}

if part build 150 "$self" build; then
    part instructions 60 "$python" -m pytest -q -p no:cacheprovider --tb=short tests/test_emu_types.py
    if part definitions 60 "$self" definitions; then
        part kernels 120 "$self" kernels
    else
        note kernels "skipped: nothing to compare with"
    fi
    if part programs 150 "$self" programs; then
        part trainer 150 "$python" dev/gpu_train.py
    else
        note trainer "skipped: no program"
    fi
    part bench 100 "$python" dev/bench/kernels.py
    if ! command -v compute-sanitizer >/dev/null; then
        note sanitizer "skipped: no compute-sanitizer here"
    elif timeout 60 compute-sanitizer "$python" tests/kernels.py bf16 gelu 2>&1 | grep -i 'not supported'; then
        note sanitizer "skipped: it does not support this machine"
    else
        part memcheck 60 "$self" memcheck
        part racecheck 60 "$self" racecheck
    fi
fi

echo "== summary after $SECONDS s"
printf '%s' "$summary"
exit $status
