// What the host asks of a device that is not memory: streams, events, errors, properties, leave to launch.
//
// A stream is a queue. Nothing in it runs before somebody waits for it; then the next piece of work is the first of any
// stream, whichever the seed picks, if the events it waits for have happened and the default stream allows.
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdio.h>
#include <deque>
#include <map>
#include <vector>

struct CUevent_st {
    uint64_t recorded, happened; // cudaEventRecord has been called so often, and been reached by a stream
    double ms;                   // when it was
};

struct Work {
    uint64_t number;     // of all, in the order of the calls
    void (*run)(void *); // NULL: `event` happens for the count'th time, or is waited for
    void *context;
    CUevent_st *event;
    uint64_t count;
    bool wait;
};

struct CUstream_st {
    bool blocking; // takes turns with the default stream, in the order of the calls
    std::deque<Work> queue;
};

namespace emu {
namespace {

CUstream_st default_stream = {true, {}};
std::vector<CUstream_st *> streams = {&default_stream};
uint64_t works;
double clock_ms; // a millisecond a piece of work

bool sticky;
cudaError_t last_error;
char message[1500];
int arch = 90;
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

// Runs what may run, in some order, until it is done.
template <typename Done> cudaError_t run_until(Done done) {
    if (!failed() && !done()) {
        open_memory(true);
        while (!failed() && !done()) {
            std::vector<CUstream_st *> ready;
            for (CUstream_st *s : streams)
                if (may_run(s)) ready.push_back(s);
            if (ready.empty()) {
                error({}, "deadlock: every stream waits for an event");
                break;
            }
            CUstream_st *s = ready[random_order() % ready.size()];
            Work work = s->queue.front();
            s->queue.pop_front();
            clock_ms++;
            if (work.run)
                work.run(work.context);
            else if (!work.wait)
                work.event->happened = std::max(work.event->happened, work.count), work.event->ms = clock_ms;
        }
        open_memory(false);
    }
    return status();
}

CUstream_st *stream_of(cudaStream_t stream) {
    return stream ? stream : &default_stream;
}

cudaError_t add(cudaStream_t stream, Work work) {
    work.number = ++works;
    if (!failed()) stream_of(stream)->queue.push_back(work);
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
    add(stream, {0, run, context, NULL, 0, false});
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
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
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
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    return device ? refuse(cudaErrorInvalidDevice, "device %d: there is one device", device) : status();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    size_t free, total;
    cudaMemGetInfo(&free, &total);
    *p = {"emulated", total, SMEM_UNASKED, most_smem(), most_smem() + 1024, arch / 10, arch % 10, 132,
          32,         1024,  2048,         50 << 20};
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
    for (CUstream_st *s : streams) s->queue.clear();
    free_all();
    sticky = false;
    last_error = cudaSuccess;
    message[0] = 0;
    return cudaSuccess;
}

// ---- streams ---------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    streams.push_back(*stream = new CUstream_st{flags != cudaStreamNonBlocking, {}});
    return status();
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaStreamSynchronize(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream;
    return status();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return run_until([stream] { return stream_of(stream)->queue.empty(); });
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return failed() || stream_of(stream)->queue.empty() ? status() : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return add(stream, {0, NULL, NULL, event, event->recorded, true});
}

// ---- events ----------------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new CUevent_st();
    return status();
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaDeviceSynchronize(); // streams may wait for it
    delete event;
    return status();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return add(stream, {0, NULL, NULL, event, ++event->recorded, false});
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return run_until([event] { return event->happened >= event->recorded; });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return failed() || event->happened >= event->recorded ? status() : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (start->happened < start->recorded || end->happened < end->recorded) return cudaErrorNotReady;
    *ms = (float)(end->ms - start->ms);
    return status();
}
