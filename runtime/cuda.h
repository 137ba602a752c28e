// What the CUDA half of runtime/ shares (device_cuda.c, comm_cuda.c).
#ifndef CUDA_H
#define CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include "device.h"

// fail (exit 3): file:line, the call, what CUDA says to it.
#define cuda_check(call) cuda_checked(call, #call, __FILE__, __LINE__)
void cuda_checked(cudaError_t error, const char *call, const char *file, int line);

extern cudaStream_t compute_stream; // all kernels run on it; kernels/matmul.cu holds it, device_open makes it
// How kernels end the program, in matmul.cu too; see cuda.cuh.
extern void (*kernels_fail)(const char *file, int line, const char *call, const char *words, int error);

// Has all been done that stood before the event's last record? Never waits. (An event without a record: yes.)
bool cuda_reached(cudaEvent_t event);
// Waits until it has, and calls device_while_waiting meanwhile, as all waiting here does: never in a CUDA call, for messages
// of other ranks must go on. What device_while_waiting calls must itself not wait.
void cuda_wait(cudaEvent_t event);
// device_moment on another stream than the compute stream.
Moment device_moment_on(cudaStream_t stream);

#endif
