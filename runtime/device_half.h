// What device.c asks of the device's half of it, device_cpu.c or device_cuda.c: the rest of device.h is theirs alone.
#ifndef DEVICE_HALF_H
#define DEVICE_HALF_H

#include <stddef.h>

// device_alloc's memory, also of no bytes; NULL where the system refuses.
void *device_take(size_t bytes);
void device_give_back(void *memory);

#endif
