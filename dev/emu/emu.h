// The words that the emulator's files share: the thread that runs, how lanes meet, what is watched.
//
//     launch.cpp     blocks one after another, each thread a fiber; barriers, shuffles, votes: places where threads meet
//     order.cpp      the seed that orders them, the one site that is left out
//     memory.cpp     the device's heap, apart from the host's; copies
//     streams.cpp    streams, events, errors, properties
//     ptx.h .cpp     the instructions of kernels/ptx.cuh
//     cublaslt.cpp   matrix products
//     nccl.cpp       (the program alone) groups of devices, by messages of MPI
//     check.cpp      (checked build) every access of a kernel: bounds, races, bytes, sectors, bank conflicts
#ifndef EMU_H
#define EMU_H

#include <stddef.h>
#include <stdint.h>

struct CUstream_st; // a stream

namespace emu {

// Where a call stands in the sources; the default arguments make it the caller's.
struct Site {
    const char *file;
    int line;
};
#define EMU_HERE emu::Site site = {__builtin_FILE(), __builtin_LINE()}

// A device error, as on a real device: the message is kept, the launch is abandoned, cudaGetLastError() and every later
// call answer cudaErrorLaunchFailure, and cudaGetErrorString() has the message, which names kernel, block, thread, site.
// Inside a kernel it does not return.
[[gnu::format(printf, 2, 3)]] void error(Site site, const char *format, ...);

// Order of threads, warps and blocks, early or late cp.async, the error of approximate instructions: all follow the seed.
extern "C" void emu_set_seed(uint32_t seed);
// The compute capability that the device says it has, 80, 86, 89, 90 or 120 (9.0 unless told otherwise), and with it how
// much shared memory a block may ask for.
extern "C" void emu_set_arch(int sm);
// Bits that a sum of fp8 products keeps (0: all 24 of fp32; Hopper's wgmma about 14), and what cuBLASLt's heuristic does
// not support: 1 auxiliary outputs, 2 fp8.
extern "C" void emu_set_fp8_bits(int bits);
extern "C" void emu_set_refused(unsigned what);
uint32_t random_bits(); // of this seed, launch and place in it
// The seed that was set; 0 keeps to the natural order. Its upper 16 bits choose the error of approximate instructions alone,
// so that a result can be seen to be the same bits in every order.
extern uint32_t seed;
// What an approximate instruction might answer in place of `exact`: up to `ulp` units in the last place away, by the bits of
// `exact` and the seed. Zeros, subnormals, infinities and NaN stay.
float approximate(float exact, int ulp);

// EMU_SKIP: "file:line" of one barrier, wait, commit or guard to leave out (NULL: none).
extern "C" void emu_set_skip(const char *site);
// True where the site is to be left out. Notes the site as executed, with its kind ("barrier", "wait", "commit", "guard").
bool skipped(Site site, const char *kind);
// The sites executed since the last call with reset: lines "kind file:line kernel", as many as fit; returns the bytes needed.
extern "C" size_t emu_sites(char *text, size_t size, bool reset);

// The lanes of `mask` of the running thread's warp meet; the last to arrive runs combine(lanes, mask), where lanes[i] is what
// lane i brought (`mine`), NULL outside mask; then all go on. It is an error if a lane has ended, or if lanes wait for each
// other at different sites or with different masks. (No site is skipped here: callers ask skipped() first.)
void meet(uint32_t mask, void *mine, void (*combine)(void *lanes[32], uint32_t mask), const char *what,
          Site site);
// All threads of the block meet; combine may be NULL.
void meet_block(void *mine, void (*combine)(void **threads, size_t n), const char *what, Site site);

int lane();            // of the running thread
size_t thread();       // its number in the block
void **private_data(); // one pointer a thread for ptx.cpp (its cp.async groups), NULL at the start of a block
extern char *stack_low, *stack_high; // the running thread's stack; both NULL while the host runs
extern char *static_shared;          // all __shared__ variables of all kernels (the dynamic ones are ::smem)
extern size_t static_shared_size;

// All of it is in one live allocation of the device's heap (global memory).
bool on_device(const void *address, size_t size);
// Queues work on a stream as a launch does: it runs in its turn, on the host, with the device's memory open, and an
// error() in it is a device error. `context` stays alive until then: the work frees it.
void enqueue(CUstream_st *stream, void (*work)(void *context), void *context);
// The same of work that takes its time: it is called again and again, and meanwhile other streams go on, until it says that
// it is over.
void enqueue_long(CUstream_st *stream, bool (*work)(void *context), void *context);
// The device's turn, while the host waits for something else: one piece of work, if any may run. False: nothing moved.
bool turn();
// The host has asked for something else, in vain. After many times with nothing new for the device, that gets a turn.
void host_polls();
void idle(); // nothing has moved: leave the core to others for a moment

// ---- between launch.cpp, order.cpp, memory.cpp and streams.cpp -------------------------------------------
void begin_launch(const char *kernel); // random_bits() start anew
void end_launch();
uint32_t random_order(); // random_bits(), or 0 where the natural order is asked for
// In which order streams go on (streams.cpp): seed 0; of the seeds modulo 3: 1, 2, 0.
enum Mood { NATURAL, OTHERS_LATE, OTHERS_EARLY, ANY_ORDER };
Mood mood();
double setting(const char *name, double otherwise);                    // a number in the environment,
uint32_t setting(const char *name, uint32_t otherwise, uint32_t most); // or a whole one
const char *short_name(const char *file);                              // without "./"
bool in_kernel(); // a thread of a kernel runs, not the host
bool failed();    // a device error has happened
// It happens: error() but for the way out of a kernel.
[[gnu::format(printf, 1, 2)]] void fail(const char *format, ...);
bool library_takes(ptrdiff_t bytes);              // device memory that is no allocation; < 0: gives it back
void open_memory(bool open);                      // to accesses: the device's turn begins, or is over
void check_slack(const char *kernel);             // has it written between allocations?
bool untouched(const void *from, const void *to); // all bytes are still 0xff
void free_all();

// ---- what the checked build is told (check.cpp); nothing in the others -----------------------------------
// ISSUED: cp.async will write this; ARRIVED: it has, the thread that issued it has waited.
enum Access { READ, WRITE, ATOMIC, ISSUED, ARRIVED };
#ifdef EMU_CHECKED
void watch_launch(const char *kernel, const void *function, unsigned grid[3], unsigned block[3],
                  size_t dynamic_smem);
void watch_launch_end();
void watch_block();                                 // a new block begins
void watch_barrier();                               // all threads of the block have met
void watch_warp(uint32_t mask, const char *what);   // these lanes have met; only "__syncwarp" orders memory
void watch_mma(const char *shape);                  // one warp-wide tensor-core instruction
void watch_alloc(const void *address, size_t size); // device heap
void watch_free(const void *address);
void watch_host_write(const void *address, size_t size); // a copy to the device, a memset: initialised
// By an instruction, or anything else that the compiler does not show.
void watch_access(const void *address, size_t size, Access access, const char *what, Site site);
#else
// clang-format off
static inline void watch_launch(const char *, const void *, unsigned *, unsigned *, size_t) {}
static inline void watch_launch_end() {}
static inline void watch_block() {}
static inline void watch_barrier() {}
static inline void watch_warp(uint32_t, const char *) {}
static inline void watch_mma(const char *) {}
static inline void watch_alloc(const void *, size_t) {}
static inline void watch_free(const void *) {}
static inline void watch_host_write(const void *, size_t) {}
static inline void watch_access(const void *, size_t, Access, const char *, Site) {}
// clang-format on
#endif

} // namespace emu
#endif
