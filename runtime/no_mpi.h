// MPI for a world of one (make MPI=0): the calls that comm.c makes, answered for a rank that has nobody to write to.
#ifndef NO_MPI_H
#define NO_MPI_H

#include <stdio.h>
#include <unistd.h>

typedef int MPI_Comm, MPI_Request, MPI_Datatype, MPI_Info, MPI_Errhandler, MPI_Group;
enum { MPI_SUCCESS, MPI_COMM_WORLD, MPI_PROC_NULL, MPI_BYTE, MPI_INFO_NULL, MPI_ERRORS_RETURN };
enum { MPI_UNDEFINED = -32766 };
enum { MPI_THREAD_FUNNELED, MPI_COMM_TYPE_SHARED, MPI_MAX_ERROR_STRING = 64 };
#define MPI_STATUSES_IGNORE NULL

static inline int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    (void)argc, (void)argv;
    *provided = required;
    return MPI_SUCCESS;
}
static inline int MPI_Finalize(void) {
    return MPI_SUCCESS;
}
static inline int MPI_Abort(MPI_Comm c, int code) {
    (void)c;
    _exit(code);
}
static inline int MPI_Error_string(int error, char *text, int *length) {
    *length = snprintf(text, MPI_MAX_ERROR_STRING, "error %d", error);
    return MPI_SUCCESS;
}
static inline int MPI_Comm_set_errhandler(MPI_Comm c, MPI_Errhandler handler) {
    (void)c, (void)handler;
    return MPI_SUCCESS;
}

static inline int MPI_Comm_rank(MPI_Comm c, int *rank) {
    (void)c;
    *rank = 0;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_size(MPI_Comm c, int *size) {
    (void)c;
    *size = 1;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_dup(MPI_Comm c, MPI_Comm *out) {
    *out = c;
    return MPI_SUCCESS;
}
static inline int MPI_Comm_split(MPI_Comm c, int color, int key, MPI_Comm *out) {
    (void)color, (void)key;
    return MPI_Comm_dup(c, out);
}
static inline int MPI_Comm_split_type(MPI_Comm c, int type, int key, MPI_Info info, MPI_Comm *out) {
    (void)type, (void)key, (void)info;
    return MPI_Comm_dup(c, out);
}
static inline int MPI_Comm_free(MPI_Comm *c) {
    (void)c;
    return MPI_SUCCESS;
}

static inline int MPI_Comm_group(MPI_Comm c, MPI_Group *group) {
    return MPI_Comm_dup(c, group);
}
static inline int MPI_Group_translate_ranks(MPI_Group a, int n, const int *ranks, MPI_Group b, int *out) {
    (void)a, (void)n, (void)b;
    *out = *ranks;
    return MPI_SUCCESS;
}
static inline int MPI_Group_free(MPI_Group *group) {
    (void)group;
    return MPI_SUCCESS;
}

// Messages to MPI_PROC_NULL, the only ones there are: done when they start.
static inline int MPI_Isend(const void *b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request *r) {
    (void)b, (void)n, (void)t, (void)to, (void)tag, (void)c, (void)r;
    return MPI_SUCCESS;
}
#define MPI_Issend MPI_Isend
static inline int MPI_Irecv(void *b, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request *r) {
    return MPI_Isend(b, n, t, from, tag, c, r);
}
static inline int MPI_Testall(int n, MPI_Request *r, int *all, void *statuses) {
    (void)n, (void)r, (void)statuses;
    *all = 1;
    return MPI_SUCCESS;
}

#endif
