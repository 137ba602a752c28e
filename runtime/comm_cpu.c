// Messages of a CPU: device memory is the host's, so that its collectives are the ring's (comm.c).
#include "comm_ring.h"

void comm_use(Transport t) {
    (void)t;
}
void comm_connect(Comm *c, Purpose purpose) {
    (void)c, (void)purpose;
}
void comm_disconnect(Comm *c) {
    (void)c;
}
bool comm_advance(void) {
    return ring_advance();
}
void comm_wait(Work w) {
    if (w.comm) ring_wait(w);
}
size_t comm_staging_bytes(size_t count, DType t, int size) {
    return ring_staging_bytes(count, t, size);
}

Work comm_all_reduce(Comm *c, void *buf, size_t count, DType t) {
    return comm_host_all_reduce(c, buf, count, t);
}
Work comm_all_reduce_max(Comm *c, float *buf, size_t count) {
    return comm_host_all_reduce_max(c, buf, count);
}
Work comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t) {
    return comm_host_reduce_scatter(c, out, in, count, t);
}
Work comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t) {
    return comm_host_all_gather(c, out, in, count, t);
}
Work comm_broadcast(Comm *c, void *buf, size_t count, DType t, int root) {
    return comm_host_broadcast(c, buf, count, t, root);
}
Work comm_send(Comm *channel, const void *buf, size_t count, DType t) {
    return comm_host_send(channel, buf, count, t);
}
Work comm_receive(Comm *channel, void *buf, size_t count, DType t) {
    return comm_host_receive(channel, buf, count, t);
}
Work comm_shift(Comm *ring, void *out, const void *in, size_t count, DType t) {
    return comm_host_shift(ring, out, in, count, t);
}
Work comm_all_to_all(Comm *mesh, void *out, const CommRows *received, const void *in, const CommRows *sent,
                     int parts, size_t width, DType t) {
    return comm_host_all_to_all(mesh, out, received, in, sent, parts, width, t);
}
