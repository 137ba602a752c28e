// The device's memory, apart from the host's.
//
//     arena     ····[slack|allocation|slack]····[slack|allocation|slack]····      · no access, ever
//
// An allocation ends, but for up to 255 bytes, where a page without access begins. What is left of its pages is filled with
// 0xff and looked at after each kernel; new memory is 0xff too, which is NaN. All of it can be touched only while a kernel
// or a copy runs: a host that follows a device pointer gets a SIGSEGV, with a word on why. Addresses are used once.
//
// It is opened by need: the first access of a kernel or copy to an allocation faults, the handler opens the allocation and
// the access is tried again; when the host goes on, what was opened is closed. So a turn of the device costs the few
// allocations that it touches (5 to 80 us each, by size), however many there are, and one in which nothing runs nothing.
//
// Host memory of a copy is read or written when the copy's turn comes, pinned or not. (NVIDIA's cudaMemcpyAsync has read
// pageable memory when it returns. A program may not count on that for pinned memory, so none is let to.)
#include <cuda_runtime.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <map>
#include <vector>

namespace emu {
namespace {

enum : size_t { PAGE = 4096, ARENA = (size_t)1 << 44, CONTEXT = 500000000 }; // which a process takes for itself

struct Allocation {
    char *pages, *end; // from its first page to the end of its last
    size_t size;
    bool open;
};
std::map<char *, Allocation> allocations; // by first byte
std::vector<char *> opened;               // of these, since the device's turn began
char *arena, *arena_free;
size_t allocated; // each rounded up
ptrdiff_t libraries;
bool device_runs; // on this thread:
pthread_t device_thread;

size_t round_up(size_t size) { // as an allocation is
    return (size + 255) / 256 * 256;
}
size_t device_memory() {
    static const size_t bytes = (size_t)(setting("EMU_MEMORY", 80) * 1e9);
    return bytes;
}
size_t memory_left() {
    size_t taken = CONTEXT + allocated + (size_t)libraries;
    return device_memory() > taken ? device_memory() - taken : 0;
}

bool in_arena(const void *p) {
    return arena && p >= arena && p < arena + ARENA;
}

// The last allocation that begins at or before the address.
std::map<char *, Allocation>::iterator before(const void *address) {
    auto a = allocations.upper_bound((char *)address);
    return a == allocations.begin() ? allocations.end() : --a;
}

// Opens the allocation whose pages hold this address, if there is one and it is closed.
bool open_at(const void *address) {
    auto a = allocations.upper_bound((char *)address);
    if (a == allocations.end() || address < a->second.pages) { // not in the slack before its first byte
        if (a == allocations.begin()) return false;
        --a;
    }
    Allocation &it = a->second;
    if (address < it.pages || address >= it.end || it.open) return false;
    it.open = !mprotect(it.pages, (size_t)(it.end - it.pages), PROT_READ | PROT_WRITE);
    if (it.open) opened.push_back(a->first);
    return it.open;
}

// ---- faults ----------------------------------------------------------------------------------------------
struct sigaction former_handler;
const char *fault_address;
bool fault_alignment;
char handler_stack[64 * 1024], fault_stack[64 * 1024];

void after_fault() {
    auto a = before(fault_address);
    if (fault_alignment) error({}, "access that is not aligned to its size");
    if (fault_address < stack_low && fault_address >= stack_low - PAGE)
        error({}, "the thread's stack overflows");
    if (in_arena(fault_address) && a != allocations.end())
        error({}, "access to %p, %zu bytes past the start of an allocation of %zu bytes",
              (const void *)fault_address, (size_t)(fault_address - a->first), a->second.size);
    error({}, "access to %p, which is no device memory", (const void *)fault_address);
}

// The device is let in. Else a kernel goes on in after_fault(), on a stack that is good, and there leaves the launch; the
// host is told what it did.
void on_fault(int, siginfo_t *info, void *context) {
    fault_address = (const char *)info->si_addr;
    fault_alignment = info->si_code == SI_KERNEL; // x86 names no address then
    bool device = device_runs && pthread_equal(pthread_self(), device_thread);
    if (device && !fault_alignment && open_at(fault_address)) return; // and the access is tried again
    if (device && in_kernel()) {
        mcontext_t &m = ((ucontext_t *)context)->uc_mcontext;
        uintptr_t stack = ((uintptr_t)fault_stack + sizeof fault_stack - 64) & ~(uintptr_t)63;
#ifdef __x86_64__
        m.gregs[REG_RIP] = (greg_t)after_fault;
        m.gregs[REG_RSP] = (greg_t)(stack - 8); // as after a call
#else
        m.pc = (uintptr_t)after_fault;
        m.sp = stack;
#endif
        return;
    }
    char text[100];
    if (in_arena(fault_address)) {
        int n =
            snprintf(text, sizeof text, "host access to device memory at %p\n", (const void *)fault_address);
        if (write(STDERR_FILENO, text, (size_t)n) != n) abort();
    }
    sigaction(SIGSEGV, &former_handler, NULL); // and the access is tried again
}

void start() {
    if (arena) return;
    void *memory = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    arena = arena_free = (char *)memory;
    stack_t stack = {};
    stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, NULL);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &former_handler);
}

void give_back(std::map<char *, Allocation>::iterator a) {
    watch_free(a->first);
    madvise(a->second.pages, (size_t)(a->second.end - a->second.pages), MADV_DONTNEED);
    allocated -= round_up(a->second.size);
    allocations.erase(a);
}

// ---- copies ----------------------------------------------------------------------------------------------
struct Copy {
    void *to;
    const void *from; // NULL: a memset
    size_t size;
    int byte;
};

void run_copy(void *context) {
    Copy *c = (Copy *)context;
    if (c->from)
        memmove(c->to, c->from, c->size);
    else
        memset(c->to, c->byte, c->size);
    if (in_arena(c->to)) watch_host_write(c->to, c->size);
    delete c;
}

cudaError_t copy(Copy c, cudaStream_t stream) {
    for (const void *p : {(const void *)c.to, c.from})
        if (in_arena(p) && !on_device(p, c.size))
            return refuse(cudaErrorInvalidValue, "cudaMemcpy or cudaMemset: no allocation has %zu bytes at %p",
                          c.size, p);
    if (c.size && !failed()) enqueue(stream, run_copy, new Copy(c));
    return status();
}

} // namespace

bool library_takes(ptrdiff_t bytes) {
    if (bytes > 0 && (size_t)bytes > memory_left()) return false;
    libraries += bytes;
    return true;
}

void open_memory(bool open) {
    start();
    device_runs = open;
    device_thread = pthread_self();
    if (open) return;
    for (char *start : opened) {
        Allocation &a = allocations[start];
        mprotect(a.pages, (size_t)(a.end - a.pages), PROT_NONE);
        a.open = false;
    }
    opened.clear();
}

bool on_device(const void *address, size_t size) {
    auto a = before(address);
    return a != allocations.end() && (char *)address + size <= a->first + a->second.size;
}

bool untouched(const void *from, const void *to) {
    const char *p = (const char *)from;
    return from >= to || (*p == (char)0xff && !memcmp(p, p + 1, (size_t)((const char *)to - p - 1)));
}

void check_slack(const char *kernel) {
    for (char *start : opened) { // nothing else can have been written
        const Allocation &a = allocations[start];
        const char *where = !untouched(start + a.size, a.end) ? "past the end of"
                            : !untouched(a.pages, start)      ? "before the start of"
                                                              : NULL;
        if (where) error({}, "written %s an allocation of %zu bytes by kernel %s", where, a.size, kernel);
    }
}

void free_all() {
    while (!allocations.empty()) give_back(allocations.begin());
}

} // namespace emu

using namespace emu;

cudaError_t cudaMalloc(void **p, size_t size) {
    start();
    *p = NULL;
    if (size == 0 || failed()) return status();
    size_t rounded = round_up(size), bytes = (rounded + PAGE - 1) / PAGE * PAGE;
    char *pages = arena_free + PAGE, *end = pages + bytes;
    if (rounded > memory_left() || end > arena + ARENA || mprotect(pages, bytes, PROT_READ | PROT_WRITE))
        return refuse(cudaErrorMemoryAllocation, "no %zu bytes of device memory are left: %zu are, of %zu",
                      size, memory_left(), device_memory());
    madvise(pages, bytes, MADV_HUGEPAGE); // a large one is opened and closed 2 MB at a time
    memset(pages, 0xff, bytes);
    mprotect(pages, bytes, PROT_NONE);
    *p = end - rounded;
    allocations[end - rounded] = {pages, end, size, false};
    allocated += rounded;
    arena_free = end;
    watch_alloc(*p, size);
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    cudaDeviceSynchronize();
    auto a = allocations.find((char *)p);
    if (p && a == allocations.end()) return refuse(cudaErrorInvalidValue, "cudaFree(%p): not an allocation", p);
    if (p) give_back(a);
    return status();
}

cudaError_t cudaMallocHost(void **p, size_t size) {
    *p = malloc(size);
    return *p ? cudaSuccess : refuse(cudaErrorMemoryAllocation, "no %zu bytes of memory", size);
}
cudaError_t cudaFreeHost(void *p) {
    cudaDeviceSynchronize();
    free(p);
    return status();
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = memory_left(), *total = device_memory();
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    int here = in_arena(to) + 2 * in_arena(from); // counts as cudaMemcpyKind does
    if (kind != cudaMemcpyDefault && (int)kind != here)
        return refuse(cudaErrorInvalidValue, "cudaMemcpy of kind %d where the pointers are of kind %d", kind,
                      here);
    return copy({to, from, size, 0}, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t size, cudaStream_t stream) {
    if (!in_arena(to)) return refuse(cudaErrorInvalidValue, "cudaMemset: %p is not device memory", to);
    return copy({to, NULL, size, byte}, stream);
}
cudaError_t cudaMemset(void *to, int byte, size_t size) {
    return cudaMemsetAsync(to, byte, size, NULL);
}
