// One block after another; in it, each thread is a fiber that runs until it has to wait for others.
//
//     ready   [ 3 7 12 … ]          threads that can go on, in an order that follows the seed (order.cpp)
//     a thread that waits           leaves a note of where it is, and its fiber switches to the next ready thread
//     the last one to arrive        computes the result for all and makes all ready
//     a thread that ends            its fiber starts the next thread: a kernel without barriers is a plain loop
//
// A switch costs about 10 ns (Boost.Context's fcontext). Nothing here is preempted, so nothing is locked.
// Stricter than the hardware: no thread may have ended before a barrier, nor may lanes that meet be at different sites.
#define EMU_SETS_INDICES
#include <cuda_runtime.h>
#include <boost/context/detail/fcontext.hpp>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <string>
#include <vector>

using namespace boost::context::detail;

enum { PAGE = 4096, STACK = 64 * PAGE };

__attribute__((visibility("hidden"))) uint3 threadIdx, blockIdx;
__attribute__((visibility("hidden"))) dim3 blockDim, gridDim;
__align__(128) unsigned char smem[emu::MOST_SMEM]; // the kernels' extern __shared__ smem[]

namespace emu {

char *stack_low, *stack_high, *static_shared;
size_t static_shared_size;

namespace {

struct Fiber {
    char *low, *high; // its stack
    fcontext_t context;
};
struct Thread {
    uint3 index;
    Fiber *fiber;     // NULL: not started
    const char *what; // where it waits (NULL: it does not)
    Site site;
    void *private_data;
};
struct Meeting {
    uint32_t mask, arrived;
    const char *what;
    Site site;
};
struct Warp {
    uint32_t lanes, ended; // those that it has, those that have ended
    uint32_t open;         // which of its meetings have begun
    Meeting meetings[32];
};

Kernel *kernel; // NULL: none
size_t threads, alive;
Thread thread_at[MOST_THREADS], *running;
Warp warp_at[MOST_THREADS / 32];
void *brought[MOST_THREADS]; // by each thread to where it waits
struct {
    size_t arrived;
    const char *what;
    Site site;
} block_meeting;

uint16_t ready[MOST_THREADS]; // a ring
size_t ready_first, ready_count;
bool depth_first; // a warp that can go on does so before the others

std::vector<Fiber *> fibers, idle;
Fiber host, lost; // the host's stack; a fiber that is not to go on

bool same(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

// ---- who is next -----------------------------------------------------------------------------------------
void push_ready(size_t thread) {
    ready[(ready_first + ready_count++) % MOST_THREADS] = (uint16_t)thread;
}
void push_ready_first(size_t thread) {
    ready_first = (ready_first + MOST_THREADS - 1) % MOST_THREADS, ready_count++;
    ready[ready_first] = (uint16_t)thread;
}

// All threads of the block: warps from some one on, up or down, and lanes in some order, the same in every warp.
void push_all() {
    size_t warps = (threads + 31) / 32, r = random_order();
    size_t w = (r >> 8) % warps, step = r & 32 ? warps - 1 : 1, flip = r & 31;
    for (size_t i = 0; i < warps; i++, w = (w + step) % warps)
        for (size_t j = 0; j < 32; j++)
            if (size_t t = 32 * w + (j ^ flip); t < threads) push_ready(t);
}

void deadlock() {
    std::string text;
    for (size_t i = 0, last; i < threads; i = last + 1) { // threads i … last wait at one place
        const Thread &t = thread_at[last = i];
        if (!t.what) continue;
        while (last + 1 < threads && thread_at[last + 1].what == t.what &&
               same(thread_at[last + 1].site, t.site))
            last++;
        text += (text.empty() ? "threads " : ", ") + std::to_string(i) + "-" + std::to_string(last) + " at " +
                t.what + " " + short_name(t.site.file) + ":" + std::to_string(t.site.line);
    }
    error({}, "deadlock: these wait for others: %s", text.c_str());
}

// NULL: all have ended.
__forceinline__ Thread *next_ready() {
    if (ready_count == 0) {
        if (alive == 0) return NULL;
        deadlock();
    }
    Thread *t = &thread_at[ready[ready_first]];
    ready_first = (ready_first + 1) % MOST_THREADS, ready_count--;
    return t;
}

void set_running(Thread *t) {
    running = t;
    threadIdx = t->index;
}

// ---- fibers ----------------------------------------------------------------------------------------------
void fiber_main(transfer_t from);

void start_anew(Fiber *f) {
    f->context = make_fcontext(f->high, (size_t)(f->high - f->low), fiber_main);
    idle.push_back(f);
}

Fiber *idle_fiber() {
    if (idle.empty()) {
        char *memory = (char *)mmap(NULL, PAGE + STACK + PAGE, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) abort();
        // Tops at different places of a page, so that stacks do not all compete for the same lines of the cache.
        fibers.push_back(new Fiber{memory + PAGE, memory + PAGE + STACK + fibers.size() % 32 * 128, NULL});
        start_anew(fibers.back());
    }
    Fiber *f = idle.back();
    idle.pop_back();
    return f;
}

inline void arrived(transfer_t t) {
    ((Fiber *)t.data)->context = t.fctx;
}

// Leaves `from` where it stands, to go on there later. (Inlined, down to the meeting: after a switch of stacks a
// processor mispredicts every return, at 5 ns each.)
__forceinline__ void jump(Fiber *from, Fiber *to) {
    stack_low = to->low, stack_high = to->high;
    arrived(jump_fcontext(to->context, from));
}

// The running thread waits: others go on, until it has been made ready and its turn has come.
__forceinline__ void wait() {
    Thread *me = running, *next = next_ready();
    if (next != me) {
        if (!next->fiber) next->fiber = idle_fiber();
        set_running(next); // as somebody will do for me
        jump(me->fiber, next->fiber);
    }
    me->what = NULL;
}

void thread_ends() {
    Warp &w = warp_at[thread() / 32];
    uint32_t bit = 1u << lane();
    for (uint32_t open = w.open; open; open &= open - 1)
        if (Meeting &m = w.meetings[__builtin_ctz(open)]; m.mask & bit)
            error(m.site, "a thread ended while others of its warp wait for it at %s", m.what);
    if (block_meeting.arrived)
        error(block_meeting.site, "a thread ended while others wait for it at %s", block_meeting.what);
    w.ended |= bit;
    alive--;
}

// Runs threads from beginning to end, one after another.
void fiber_main(transfer_t from) {
    Fiber *me = running->fiber;
    arrived(from);
    for (;;) {
        kernel->thread();
        thread_ends();
        Thread *next = next_ready();
        if (next) set_running(next);
        if (next && !next->fiber) {
            next->fiber = me;
            continue;
        }
        idle.push_back(me);
        jump(me, next ? next->fiber : &host);
    }
}

// ---- blocks ----------------------------------------------------------------------------------------------
__shared__ char in_shared_memory;
size_t smem_used = MOST_SMEM; // of the dynamic array, which is 0xff from there on

// All static __shared__ variables are the thread-local storage of this library or program, which exists once one has been
// touched.
int find_static_shared(struct dl_phdr_info *info, size_t, void *in_it) {
    char *low = (char *)info->dlpi_tls_data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        size_t size = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS && low && low <= in_it && in_it < low + size)
            return static_shared = low, static_shared_size = size, 1;
    }
    return 0;
}

void run_block() {
    memset(smem, 0xff, kernel->launch.smem);
    memset(static_shared, 0xff, static_shared_size);
    for (size_t i = 0; i < threads; i++) {
        Thread &t = thread_at[i];
        t.fiber = NULL, t.what = NULL, t.private_data = NULL;
    }
    for (size_t w = 0; w < (threads + 31) / 32; w++) {
        warp_at[w].ended = warp_at[w].open = 0;
        warp_at[w].lanes = threads - 32 * w < 32 ? (1u << (threads - 32 * w)) - 1 : 0xffffffff;
    }
    alive = threads;
    block_meeting.arrived = ready_first = ready_count = 0;
    depth_first = random_order() & 1;
    push_all();
    watch_block();
    set_running(next_ready());
    running->fiber = idle_fiber();
    jump(&host, running->fiber);
}

void run(void *context) {
    kernel = (Kernel *)context;
    const Launch &l = kernel->launch;
    uint3 grid = {l.grid.x, l.grid.y, l.grid.z}, block = {l.block.x, l.block.y, l.block.z};
    begin_launch(l.name);
    in_shared_memory = 0;
    if (!static_shared) dl_iterate_phdr(find_static_shared, &in_shared_memory);
    memset(smem, 0xff, smem_used);
    gridDim = l.grid, blockDim = l.block;
    threads = (size_t)block.x * block.y * block.z;
    for (unsigned i = 0; i < threads; i++)
        thread_at[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    watch_launch(l.name, kernel->function, &grid.x, &block.x, l.smem);

    // Blocks b, b + step, … modulo their number: all of them, as the step has no divisor in common with it.
    size_t blocks = (size_t)grid.x * grid.y * grid.z, b = random_order() % blocks,
           step = random_order() % blocks | 1;
    while (std::__gcd(step, blocks) != 1) step += 2;
    for (size_t i = 0; i < blocks && !failed(); i++, b = (b + step) % blocks) {
        blockIdx = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
        run_block();
    }
    watch_launch_end();
    end_launch();
    smem_used = failed() ? MOST_SMEM : l.smem;
    if (failed()) { // fibers are somewhere in the middle of a kernel
        idle.clear();
        for (Fiber *f : fibers) start_anew(f);
    } else if (!untouched(smem + l.smem, smem + MOST_SMEM))
        error({}, "%s wrote past the end of its %zu bytes of dynamic shared memory", l.name, l.smem);
    check_slack(l.name);
    delete kernel;
    kernel = NULL;
}

} // namespace

void error(Site site, const char *format, ...) {
    char text[1000], thread[300] = "", at[200] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (in_kernel())
        snprintf(thread, sizeof thread, "%s, block (%u,%u,%u), thread (%u,%u,%u): ", kernel->launch.name,
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    if (site.file) snprintf(at, sizeof at, " (%s:%d)", short_name(site.file), site.line);
    fail("%s%s%s", thread, text, at);
    if (in_kernel()) jump(&lost, &host);
}

bool in_kernel() {
    return stack_high != NULL;
}

size_t thread() {
    return (size_t)(running - thread_at);
}
int lane() {
    return (int)(thread() % 32);
}
void **private_data() {
    return &running->private_data;
}

void enqueue(Kernel *k) {
    enqueue(k->launch.stream, run, k);
}

// ---- where threads meet ----------------------------------------------------------------------------------
void meet(uint32_t mask, void *mine, void (*combine)(void *lanes[32], uint32_t mask), const char *what,
          Site site) {
    size_t me = thread(), first = me / 32 * 32;
    Warp &w = warp_at[me / 32];
    if (mask == 0xffffffff) mask = w.lanes; // the last warp may have fewer
    if (!(mask >> lane() & 1)) error(site, "%s: the mask %08x lacks the thread itself", what, mask);
    if (uint32_t gone = mask & (w.ended | ~w.lanes))
        error(site, "%s: lanes %08x of the mask %08x have ended", what, gone, mask);

    Meeting *m = NULL;
    for (uint32_t open = w.open; open; open &= open - 1) {
        Meeting *other = &w.meetings[__builtin_ctz(open)];
        if (other->mask == mask && other->what == what && same(other->site, site))
            m = other;
        else if (other->mask >> lane() & 1 && other->arrived & mask) // they wait for me there
            error(site, "%s, mask %08x: lanes %08x of the warp wait at %s %s:%d, mask %08x", what, mask,
                  other->arrived, other->what, short_name(other->site.file), other->site.line, other->mask);
    }
    if (!m) {
        m = &w.meetings[__builtin_ctz(~w.open)];
        *m = {mask, 0, what, site};
        w.open |= 1u << (m - w.meetings);
    }
    m->arrived |= 1u << lane();
    brought[me] = mine;
    running->what = what, running->site = site;

    if (m->arrived == mask) {
        w.open &= ~(1u << (m - w.meetings));
        void *lanes[32];
        for (size_t i = 0; i < 32; i++) lanes[i] = mask >> i & 1 ? brought[first + i] : NULL;
        if (combine) combine(lanes, mask);
        watch_warp(mask, what);
        size_t flip = random_order() & 31;
        for (size_t j = 0; j < 32; j++)
            if (size_t i = j ^ flip; mask >> i & 1)
                depth_first ? push_ready_first(first + i) : push_ready(first + i);
    }
    wait();
}

void meet_block(void *mine, void (*combine)(void **threads, size_t n), const char *what, Site site) {
    if (alive < threads) error(site, "%s: %zu threads of the block have ended", what, threads - alive);
    if (block_meeting.arrived == 0)
        block_meeting = {0, what, site};
    else if (block_meeting.what != what || !same(block_meeting.site, site))
        error(site, "%s: other threads of the block wait at %s %s:%d", what, block_meeting.what,
              short_name(block_meeting.site.file), block_meeting.site.line);
    brought[thread()] = mine;
    running->what = what, running->site = site;
    if (++block_meeting.arrived == threads) {
        block_meeting.arrived = 0;
        if (combine) combine(brought, threads);
        watch_barrier();
        push_all();
    }
    wait();
}

void barrier(Site site) {
    if (!skipped(site, "barrier")) meet_block(NULL, NULL, "__syncthreads", site);
}

int barrier(int value, int (*fold)(int, int), const char *what, Site site) {
    if (skipped(site, "barrier")) return value;
    struct Offer {
        int value;
        int (*fold)(int, int);
    } mine = {value, fold};
    meet_block(
        &mine,
        [](void **threads, size_t n) {
            int all = ((Offer *)threads[0])->value;
            for (size_t i = 1; i < n; i++) all = ((Offer *)threads[i])->fold(all, ((Offer *)threads[i])->value);
            for (size_t i = 0; i < n; i++) ((Offer *)threads[i])->value = all;
        },
        what, site);
    return mine.value;
}

void warp_barrier(uint32_t mask, Site site) {
    if (!skipped(site, "barrier")) meet(mask, NULL, NULL, "__syncwarp", site);
}

void shuffle(uint32_t mask, uint64_t *value, int from, const char *what, Site site) {
    struct Offer {
        uint64_t value, taken;
        int from;
        Site site;
    } mine = {*value, 0, from, site};
    meet(
        mask, &mine,
        [](void *lanes[32], uint32_t mask) {
            for (uint32_t left = mask; left; left &= left - 1) {
                Offer *to = (Offer *)lanes[__builtin_ctz(left)], *source = (Offer *)lanes[to->from];
                if (!source)
                    error(to->site, "lane %d takes a value of lane %d, which takes no part",
                          __builtin_ctz(left), to->from);
                to->taken = source->value;
            }
        },
        what, site);
    *value = mine.taken;
}

void exchange(uint32_t mask, uint64_t value, uint64_t all[32], const char *what, Site site) {
    struct Offer {
        uint64_t value, *all;
    } mine = {value, all};
    meet(
        mask, &mine,
        [](void *lanes[32], uint32_t mask) {
            for (uint32_t to = mask; to; to &= to - 1)
                for (uint32_t from = mask; from; from &= from - 1)
                    ((Offer *)lanes[__builtin_ctz(to)])->all[__builtin_ctz(from)] =
                        ((Offer *)lanes[__builtin_ctz(from)])->value;
        },
        what, site);
}

void raw_copy(void *to, const void *from, size_t size) {
    memcpy(to, from, size);
}

} // namespace emu
