// What the host asks of a device that is not memory: streams, events, errors, properties, leave to launch.
//
// A stream is a queue. Nothing in it runs before somebody waits for something (then all that is needed for it runs, and what
// comes first), or asks whether something is done (then one piece of work runs, so that a loop of questions ends). Which
// stream goes on, of those that may, is the mood of the seed. The first stream that was made, and the default one, are where
// a program computes; the extremes are
//
//     OTHERS_LATE    it computes for as long as events allow, and only then the other streams go on: whoever reads
//                    before it has waited reads what was there before
//     OTHERS_EARLY   the others go on first: what they should have waited for has not happened
//     ANY_ORDER      neither
//
// so that a missing event shows in one of the first two, whenever the pieces that it should have ordered are queued together.
// That they are is helped by patience: there a question starts something only after many with nothing new queued between, as
// in a loop that waits, and not in a program that looks up now and then from its queueing.
#include <cuda_runtime.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <deque>
#include <map>
#include <vector>

struct CUevent_st {
    bool timed;
    uint64_t recorded, happened; // cudaEventRecord has been called so often, and been reached by a stream
    double ms;                   // when it was reached last, on the host's CLOCK_MONOTONIC
    size_t uses;                 // in queues
    bool destroyed;              // and goes with its last use
};

struct Work {
    uint64_t number;       // of all, in the order of the calls
    void (*run)(void *);   // at once,
    bool (*go_on)(void *); // or in turns; both NULL:
    void *context;
    CUevent_st *event; // happens for the count'th time, or is waited for
    uint64_t count;
    bool wait;
};

struct CUstream_st {
    bool blocking; // takes turns with the default stream, in the order of the calls
    std::deque<Work> queue;
    bool destroyed; // and goes when it is empty
};

namespace emu {
namespace {

CUstream_st default_stream = {true, {}, false};
std::vector<CUstream_st *> streams = {&default_stream}; // then in the order in which they were made
uint64_t works;
enum { PATIENCE = 200 };
unsigned idle_turns, polls; // questions since the host has queued something

bool sticky;
cudaError_t last_error;
char message[1500];
int arch = (int)setting("EMU_ARCH", 90, 129), devices = (int)setting("EMU_DEVICES", 8, 1 << 16), device;
std::map<const void *, size_t> asked_smem; // of cudaFuncSetAttribute

size_t most_smem() { // of a block, where it is asked for (CUDA C++ Programming Guide, "Compute Capabilities")
    return arch >= 90 && arch < 120 ? MOST_SMEM : arch == 80 ? 163 << 10 : 99 << 10;
}

// By file and kernel. Sources add theirs while the library is loaded, in whatever order.
std::map<std::pair<std::string, std::string>, size_t> &bounds() {
    static std::map<std::pair<std::string, std::string>, size_t> all;
    return all;
}

bool may_run(const CUstream_st *s) {
    if (s->queue.empty()) return false;
    const Work &work = s->queue.front();
    if (work.wait && work.event->happened < work.count) return false;
    for (const CUstream_st *other : streams)
        if ((s == &default_stream || other == &default_stream) && s->blocking && other->blocking &&
            !other->queue.empty() && other->queue.front().number < work.number)
            return false;
    return true;
}

double now_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// The first of a stream's queue is over.
void pop(CUstream_st *s) {
    CUevent_st *event = s->queue.front().event;
    s->queue.pop_front();
    if (event && --event->uses == 0 && event->destroyed) delete event;
}

// Events take no time: they happen, and are waited for, as soon as the work before them is done.
void pass_events() {
    for (bool moved = true; moved;) {
        moved = false;
        for (CUstream_st *s : streams)
            while (may_run(s) && s->queue.front().event) {
                const Work &work = s->queue.front();
                if (!work.wait && work.event->happened < work.count)
                    work.event->happened = work.count, work.event->ms = now_ms();
                pop(s);
                moved = true;
            }
    }
    for (size_t i = streams.size(); i-- > 1;)
        if (streams[i]->destroyed && (streams[i]->queue.empty() || failed()))
            delete streams[i], streams.erase(streams.begin() + (ptrdiff_t)i);
}

// The streams that may go on, the one whose turn it is first.
std::vector<CUstream_st *> in_turn() {
    std::vector<CUstream_st *> computing, others, all;
    for (size_t i = 0; i < streams.size(); i++)
        if (may_run(streams[i])) (i < 2 ? computing : others).push_back(streams[i]);
    if (mood() == OTHERS_EARLY) {
        all.assign(others.rbegin(), others.rend());
        all.insert(all.end(), computing.begin(), computing.end());
        return all;
    }
    all = computing;
    all.insert(all.end(), others.begin(), others.end());
    if (mood() == ANY_ORDER && all.size() > 1)
        std::rotate(all.begin(), all.begin() + (ptrdiff_t)(random_order() % all.size()), all.end());
    return all;
}

// One piece of work. False: nothing has moved, for all that may go on waits for other processes.
bool step() {
    pass_events();
    std::vector<CUstream_st *> ready = in_turn();
    if (ready.empty())
        for (const CUstream_st *s : streams)
            if (!s->queue.empty()) {
                error({}, "deadlock: every stream waits for an event");
                return false;
            }
    for (CUstream_st *s : ready) {
        Work work = s->queue.front();
        if (work.run) {
            pop(s);
            work.run(work.context);
        } else if (!work.go_on(work.context)) {
            if (failed()) return false;
            continue;
        } else
            pop(s);
        pass_events();
        idle_turns = 0;
        return true;
    }
    return false;
}

template <typename Done> cudaError_t run_until(Done done) {
    if (!failed() && !done()) {
        open_memory(true);
        pass_events();
        while (!failed() && !done())
            if (!step() && !failed()) idle();
        open_memory(false);
    }
    return status();
}

// The host asks: the device gets a turn, if it is not done.
template <typename Done> cudaError_t query(Done done) {
    bool patient = mood() == OTHERS_LATE || mood() == OTHERS_EARLY;
    if (!failed() && !done() && (!patient || ++polls > PATIENCE)) turn();
    return failed() || done() ? status() : cudaErrorNotReady;
}

CUstream_st *stream_of(cudaStream_t stream) {
    return stream ? stream : &default_stream;
}

cudaError_t add(cudaStream_t stream, Work work) {
    polls = 0;
    work.number = ++works;
    if (!failed()) stream_of(stream)->queue.push_back(work);
    if (!failed() && work.event) work.event->uses++;
    return status();
}

void keep_message(const char *format, va_list arguments) {
    vsnprintf(message, sizeof message, format, arguments);
}

} // namespace

bool failed() {
    return sticky;
}

cudaError_t status() {
    return sticky ? cudaErrorLaunchFailure : cudaSuccess;
}

void fail(const char *format, ...) {
    if (sticky) return; // the first is the one to see
    va_list arguments;
    va_start(arguments, format);
    keep_message(format, arguments);
    va_end(arguments);
    sticky = true;
    last_error = cudaErrorLaunchFailure;
}

cudaError_t refuse(cudaError_t error, const char *format, ...) {
    if (sticky) return cudaErrorLaunchFailure;
    va_list arguments;
    va_start(arguments, format);
    keep_message(format, arguments);
    va_end(arguments);
    return last_error = error;
}

void enqueue(cudaStream_t stream, void (*run)(void *), void *context) {
    add(stream, {0, run, NULL, context, NULL, 0, false});
}
void enqueue_long(cudaStream_t stream, bool (*go_on)(void *), void *context) {
    add(stream, {0, NULL, go_on, context, NULL, 0, false});
}

bool turn() {
    if (failed()) return false;
    open_memory(true);
    bool moved = step();
    open_memory(false);
    return moved;
}

void host_polls() {
    if (++polls > PATIENCE) turn();
}

void idle() {
    if (++idle_turns < 100)
        sched_yield();
    else
        usleep(50);
}

Bounds::Bounds(const char *kernel, size_t threads, size_t, const char *file) {
    bounds()[{file, kernel}] = threads;
}

bool is_kernel(const std::string &name) {
    return std::any_of(bounds().begin(), bounds().end(), [&](auto &b) { return b.first.second == name; });
}

bool Launch::legal(const void *function) const {
    size_t threads = (size_t)block.x * block.y * block.z;
    auto bound = bounds().find({file, name});
    auto asked = asked_smem.find(function);
    size_t most = std::min(asked == asked_smem.end() ? SMEM_UNASKED : asked->second, most_smem());
    const char *problem =
        !grid.x || !grid.y || !grid.z || !threads              ? "is empty"
        : grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535 ? "has a grid beyond (2^31 - 1, 65535, 65535)"
        : threads > MOST_THREADS || block.z > 64               ? "has a block beyond 1024 threads, or 64 in z"
        : bound != bounds().end() && threads > bound->second   ? "has a block beyond its __launch_bounds__"
                                                               : NULL;
    if (problem)
        refuse(cudaErrorInvalidConfiguration, "the launch of %s <<<(%u, %u, %u), (%u, %u, %u)>>> %s", name,
               grid.x, grid.y, grid.z, block.x, block.y, block.z, problem);
    if (smem > most)
        refuse(cudaErrorInvalidValue,
               "the launch of %s asks for %zu bytes of shared memory, cudaFuncSetAttribute for %zu", name, smem,
               most);
    return !failed() && !problem && smem <= most;
}

cudaError_t set_attribute(const void *function, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && (value < 0 || (size_t)value > most_smem()))
        return refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute: %d bytes of shared memory, of %zu", value,
                      most_smem());
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
        asked_smem[function] = std::max((size_t)value, SMEM_UNASKED);
    return failed() ? cudaErrorLaunchFailure : cudaSuccess;
}

} // namespace emu

// What kernels/matmul.cu holds, for kernels that are tried without it.
static void print_and_exit(const char *file, int line, const char *call, const char *words, int) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, words);
    exit(3);
}
extern "C" {
extern void (*kernels_fail)(const char *file, int line, const char *call, const char *words, int error);
__attribute__((weak)) void (*kernels_fail)(const char *file, int line, const char *call, const char *words,
                                           int error) = print_and_exit;
}

using namespace emu;

// ---- errors ----------------------------------------------------------------------------------------------
cudaError_t cudaPeekAtLastError() {
    return last_error;
}
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    if (!sticky) last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t error) {
    static const std::map<cudaError_t, const char *> names = {
        {cudaSuccess, "cudaSuccess"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration"},
        {cudaErrorNoDevice, "cudaErrorNoDevice"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
        {cudaErrorNotReady, "cudaErrorNotReady"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
    };
    auto name = names.find(error);
    return name == names.end() ? "an unknown error" : name->second;
}
const char *cudaGetErrorString(cudaError_t error) {
    return error != cudaSuccess && error != cudaErrorNotReady && message[0] ? message : cudaGetErrorName(error);
}

// ---- the device: an H100, or an older one ----------------------------------------------------------------
extern "C" void emu_set_arch(int sm) {
    arch = sm;
}
cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices;
    return devices ? cudaSuccess : refuse(cudaErrorNoDevice, "this host has no device: EMU_DEVICES=0");
}
cudaError_t cudaGetDevice(int *number) {
    *number = device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= devices)
        return refuse(cudaErrorInvalidDevice, "device %d: this host has %d (EMU_DEVICES)", number, devices);
    device = number;
    return status();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int number) {
    size_t free, total;
    cudaMemGetInfo(&free, &total);
    *p = {"emulated", {}, total, SMEM_UNASKED, most_smem(), most_smem() + 1024, arch / 10, arch % 10,
          132,        32, 1024,  2048,         50 << 20};
    gethostname(p->uuid.bytes, sizeof p->uuid.bytes - 1); // of this host alone
    p->uuid.bytes[15] = (char)number;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    const std::map<cudaDeviceAttr, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, MOST_THREADS},
        {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrComputeCapabilityMajor, arch / 10},
        {cudaDevAttrComputeCapabilityMinor, arch % 10},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)most_smem() + 1024},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)most_smem()},
    };
    *value = values.at(attribute);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return run_until([] {
        for (const CUstream_st *s : streams)
            if (!s->queue.empty()) return false;
        return true;
    });
}
cudaError_t cudaDeviceReset() {
    cudaDeviceSynchronize();
    for (CUstream_st *s : streams)
        while (!s->queue.empty()) pop(s);
    free_all();
    sticky = false;
    last_error = cudaSuccess;
    message[0] = 0;
    return cudaSuccess;
}

// ---- streams ---------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    streams.push_back(*stream = new CUstream_st{flags != cudaStreamNonBlocking, {}, false});
    return status();
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    stream->destroyed = true; // what is in it still runs
    pass_events();
    return status();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return run_until([stream] { return stream_of(stream)->queue.empty(); });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return query([stream] { return stream_of(stream)->queue.empty(); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return add(stream, {0, NULL, NULL, NULL, event, event->recorded, true});
}

// ---- events ----------------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new CUevent_st();
    (*event)->timed = !(flags & cudaEventDisableTiming);
    return status();
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    event->destroyed = true; // streams may wait for it
    if (!event->uses) delete event;
    return status();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return add(stream, {0, NULL, NULL, NULL, event, ++event->recorded, false});
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return run_until([event] { return event->happened >= event->recorded; });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return query([event] { return event->happened >= event->recorded; });
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->timed || !end->timed || !start->recorded || !end->recorded)
        return refuse(cudaErrorInvalidResourceHandle,
                      "cudaEventElapsedTime: an event that was not recorded, or not made for timing");
    if (start->happened < start->recorded || end->happened < end->recorded) return cudaErrorNotReady;
    *ms = (float)(end->ms - start->ms);
    return status();
}
