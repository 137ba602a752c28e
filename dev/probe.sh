#!/bin/sh
# Looks for what this build needs, library by library, then links with all of them; says ✓ or ✗.
# usage: probe.sh "CC and flags" "libraries" MPI DEVICE CUDA-INCLUDE-DIRECTORY
# Ends with 1 where something is missing.
compile=$1 libraries=$2 mpi=$3 device=$4 cuda=${5:-}
missing=0
probe() { # name, what to do without it, program, more flags
    if printf '%b' "$3" | $compile $4 -x c - -o /dev/null 2>/dev/null; then
        echo "✓ $1"
    else
        echo "✗ $1: $2"
        missing=1
    fi
}
header() { # name, what to do without it, header, more flags
    probe "$1" "$2" "#include <$3>\n" "-fsyntax-only ${4:-}"
}
probe "a C11 compiler with OpenMP" "make deps, or make CC=gcc" '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }' ""
[ "$device" != cpu ] || header "OpenBLAS" "make deps" cblas.h
header "cJSON" "make deps" cjson/cJSON.h
[ "$mpi" = 0 ] || header "MPI" "make deps, or make MPI=0 for one rank" mpi.h
if [ "$device" = cuda ]; then
    header "CUDA and cuBLASLt" "the CUDA toolkit, with nvcc on the PATH" cublasLt.h "-isystem $cuda"
    [ "$mpi" = 0 ] || header "NCCL" "libnccl-dev, or make MPI=0 for one rank" nccl.h "-isystem $cuda"
fi
[ $missing = 1 ] || probe "all of them linked" "a library is missing beside its header: make deps$([ "$device" != emu ] || echo ", and dev/deps.sh emu")" 'int main(void) { return 0; }' "-Wl,--no-as-needed $libraries"
exit $missing
