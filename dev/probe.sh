#!/bin/sh
# Compiles and links a few lines against each library, and says ✓ or ✗. usage: probe.sh "CC and flags" "libraries" MPI
# Ends with 1 where something that this build needs is missing.
compile=$1 libraries=$2 mpi=$3
missing=0
probe() { # name, what to do without it, program
    if printf '%b' "$3" | $compile -x c - -o /dev/null $libraries 2>/dev/null; then
        echo "✓ $1"
    else
        echo "✗ $1: $2"
        missing=1
    fi
}
probe "a C11 compiler with OpenMP" "make deps, or make CC=gcc" '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }'
probe "OpenBLAS" "make deps" '#include <cblas.h>\nint main(void) { openblas_set_num_threads(1); return 0; }'
probe "cJSON" "make deps" '#include <cjson/cJSON.h>\nint main(void) { cJSON_Delete(cJSON_CreateObject()); return 0; }'
[ "$mpi" = 0 ] || probe "MPI" "make deps, or make MPI=0 for one rank" '#include <mpi.h>\nint main(void) { return MPI_Finalize(); }'
exit $missing
