// NCCL for groups of one (make MPI=0): what comm_cuda.c names of it, and never calls there.
#ifndef NO_NCCL_H
#define NO_NCCL_H

typedef struct ncclComm *ncclComm_t;
typedef enum { ncclSuccess, ncclInProgress } ncclResult_t;
typedef enum { ncclFloat32, ncclBfloat16, ncclFloat64, ncclInt32, ncclInt64, ncclUint8 } ncclDataType_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
#define ncclGetErrorString(result) "no NCCL"
#define ncclGetLastError(comm)     "built with MPI=0"

// In place of a call: its arguments are looked at, and nothing is done.
static inline ncclResult_t no_nccl(const void *any, ...) {
    (void)any;
    return ncclSuccess;
}
#define ncclSum                             0
#define ncclMax                             2
#define ncclGetUniqueId(id)                 no_nccl(id)
#define ncclCommInitRank(comm, n, id, rank) no_nccl(comm, n, id, rank)
#define ncclCommDestroy(comm)               no_nccl(comm)
#define ncclCommGetAsyncError(comm, error)  no_nccl(comm, *(error) = ncclSuccess)
#define ncclGroupStart()                    no_nccl("")
#define ncclGroupEnd()                      no_nccl("")
#define ncclReduce(in, ...)                 no_nccl(in, __VA_ARGS__)
#define ncclBroadcast(in, ...)              no_nccl(in, __VA_ARGS__)
#define ncclReduceScatter(in, ...)          no_nccl(in, __VA_ARGS__)
#define ncclAllGather(in, ...)              no_nccl(in, __VA_ARGS__)
#define ncclAllReduce(in, ...)              no_nccl(in, __VA_ARGS__)
#define ncclSend(in, ...)                   no_nccl(in, __VA_ARGS__)
#define ncclRecv(out, ...)                  no_nccl(out, __VA_ARGS__)

#endif
