// CUDA C++ for a host compiler, as far as kernels use it or are likely to; first on the include path of DEVICE=emu.
//
//     kernel<T><<<grid, block, smem, stream>>>(a, b)      becomes, by one sed,
//     kernel<T>->*emu::Launch("kernel", grid, block, smem, stream)(a, b)      which queues a copy of the arguments
//
// A thread is a fiber of launch.cpp, and threadIdx a variable that launch.cpp sets whenever another thread goes on.
// Shared memory is thread-local storage of the host's one thread: the only kind of static data that gcc and clang both
// put in one place for templates too, so that it can be poisoned. (So nothing else in this library or program may be
// thread-local.)
#ifndef EMU_CUDA_RUNTIME_H
#define EMU_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include "dev/emu/emu.h"

#define __host__
#define __device__
#define __global__
#define __constant__           const
#define __launch_bounds__(...) // the Makefile turns them into emu::Bounds
#ifdef __clang__
#define __shared__ static __thread
#else // gcc would give an array of a class with constructors, as __nv_bfloat16 is, a guard variable beside it
#define __shared__ static __thread __constinit
#endif
#define __align__(n)    __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))
#define IN_RANGE(...)   (emu::skipped({__FILE__, __LINE__}, "guard") || (__VA_ARGS__))
#define EMU_UNWATCHED   __attribute__((no_sanitize("thread"))) // touches the emulator's memory, not the kernel's

// ---- types -----------------------------------------------------------------------------------------------
// clang-format off
#define VECTOR_TYPE(type, name, align2, align4)                                                                \
    struct name##1 { type x; };                                                                                \
    struct __align__(align2) name##2 { type x, y; };                                                           \
    struct name##3 { type x, y, z; };                                                                          \
    struct __align__(align4) name##4 { type x, y, z, w; };                                                     \
    static inline name##2 make_##name##2(type x, type y) { return { x, y }; }                                  \
    static inline name##3 make_##name##3(type x, type y, type z) { return { x, y, z }; }                       \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return { x, y, z, w }; }
VECTOR_TYPE(signed char, char, 2, 4)
VECTOR_TYPE(unsigned char, uchar, 2, 4)
VECTOR_TYPE(short, short, 4, 8)
VECTOR_TYPE(unsigned short, ushort, 4, 8)
VECTOR_TYPE(int, int, 8, 16)
VECTOR_TYPE(unsigned, uint, 8, 16)
VECTOR_TYPE(float, float, 8, 16)
VECTOR_TYPE(long long, longlong, 16, 16)
VECTOR_TYPE(unsigned long long, ulonglong, 16, 16)
VECTOR_TYPE(double, double, 16, 16)
#undef VECTOR_TYPE

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
// clang-format on

// Constant for as long as a thread runs, which lets the compiler keep them in registers across calls.
#ifndef EMU_SETS_INDICES
extern const __attribute__((visibility("hidden"))) uint3 threadIdx, blockIdx;
extern const __attribute__((visibility("hidden"))) dim3 blockDim, gridDim;
#endif
static const int warpSize = 32;

// ---- the runtime: what C++ adds to cuda_runtime_api.h -----------------------------------------------------
// clang-format off
template <typename T> static inline cudaError_t cudaMalloc(T **p, size_t size) { return cudaMalloc((void **)p, size); }
template <typename T> static inline cudaError_t cudaMallocHost(T **p, size_t size) { return cudaMallocHost((void **)p, size); }
// clang-format on

// ---- launches --------------------------------------------------------------------------------------------
namespace emu {

// For cudaGetLastError(), which returns it; the message is cudaGetErrorString()'s.
[[gnu::format(printf, 2, 3)]] cudaError_t refuse(cudaError_t error, const char *format, ...);
cudaError_t status(); // of the device: cudaErrorLaunchFailure after a device error
cudaError_t set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);

static const size_t MOST_THREADS = 1024, MOST_SMEM = 227 * 1024, SMEM_UNASKED = 48 * 1024; // of a block

// What a kernel of this source promised in __launch_bounds__: no launch has more threads a block.
struct Bounds {
    Bounds(const char *kernel, size_t threads, size_t blocks = 0, const char *file = __builtin_FILE());
};
bool is_kernel(const std::string &name); // with bounds, in any source

struct Launch {
    const char *name, *file;
    dim3 grid, block;
    size_t smem;
    cudaStream_t stream;
    Launch(const char *name, dim3 grid, dim3 block, size_t smem = 0, cudaStream_t stream = NULL,
           const char *file = __builtin_FILE())
        : name(name), file(file), grid(grid), block(block), smem(smem), stream(stream) {
    }
    bool legal(const void *kernel) const; // else cudaGetLastError() says why not
    template <typename... A> struct Bound;
    template <typename... A> Bound<A...> operator()(A... arguments) const {
        return {*this, std::tuple<A...>(arguments...)};
    }
};
template <typename... A> struct Launch::Bound {
    Launch launch;
    std::tuple<A...> arguments;
};

struct Kernel {
    Launch launch;
    const void *function;
    Kernel(const Launch &launch, const void *function) : launch(launch), function(function) {
    }
    virtual ~Kernel() {
    }
    virtual void thread() = 0; // what one thread does
};
void enqueue(Kernel *kernel); // and owns it

// As in a call: a NULL, which has become a long on the way here, is a pointer.
template <typename P, typename A> static inline P converted(A a) {
    if constexpr (std::is_pointer<P>::value && std::is_same<A, long>::value)
        return (P)(uintptr_t)a;
    else
        return a;
}
template <typename... P> struct KernelOf : Kernel {
    void (*kernel)(P...);
    std::tuple<P...> parameters;
    template <typename... A>
    KernelOf(const Launch::Bound<A...> &b, void (*kernel)(P...))
        : Kernel(b.launch, (const void *)kernel), kernel(kernel),
          parameters(std::apply([](A... a) { return std::tuple<P...>(converted<P>(a)...); }, b.arguments)) {
    }
    template <size_t... I> EMU_UNWATCHED void call(std::index_sequence<I...>) {
        kernel(std::get<I>(parameters)...);
    }
    EMU_UNWATCHED void thread() override {
        call(std::index_sequence_for<P...>());
    }
};
template <typename... P, typename... A>
static inline void operator->*(void (*kernel)(P...), const Launch::Bound<A...> &b) {
    static_assert(sizeof...(P) == sizeof...(A),
                  "a launch passes as many arguments as its kernel has parameters");
    static_assert(!(std::is_reference<P>::value || ...), "a kernel's parameters are values");
    static_assert(sizeof(std::tuple<P...>) <= 4096, "a kernel's parameters are 4 KB at most");
    if constexpr (sizeof...(P) == sizeof...(A))
        if (b.launch.legal((const void *)kernel)) enqueue(new KernelOf<P...>(b, kernel));
}

// ---- where threads meet ----------------------------------------------------------------------------------
// The parts that touch memory of other threads are in launch.cpp.
void barrier(Site site);                                                    // of the block
int barrier(int value, int (*fold)(int, int), const char *what, Site site); // all get the values, folded
void warp_barrier(uint32_t mask, Site site);
void shuffle(uint32_t mask, uint64_t *value, int from, const char *what, Site site); // gets lane `from`'s value
void exchange(uint32_t mask, uint64_t value, uint64_t all[32], const char *what, Site site); // gets everybody's
void raw_copy(void *to, const void *from, size_t size);

template <typename T> static inline T shuffle(uint32_t mask, T value, int from, const char *what, Site site) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "shuffles move 64 bits at most");
    uint64_t bits = 0;
    memcpy(&bits, (const void *)&value, sizeof(T));
    shuffle(mask, &bits, from, what, site);
    memcpy((void *)&value, &bits, sizeof(T));
    return value;
}
template <typename T>
static inline T reduce(uint32_t mask, T value, T (*fold)(T, T), const char *what, Site site) {
    uint64_t all[32];
    exchange(mask, (uint64_t)value, all, what, site);
    T result = value;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && i != lane()) result = fold(result, (T)all[i]);
    return result;
}
template <typename T>
static inline T read_modify_write(T *p, T value, T (*f)(T, T), const char *what, Site site) {
    watch_access(p, sizeof(T), ATOMIC, what, site);
    T old;
    raw_copy(&old, p, sizeof(T));
    T now = f(old, value);
    raw_copy(p, &now, sizeof(T));
    return old;
}

} // namespace emu

template <typename... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return emu::set_attribute((const void *)kernel, attribute, value);
}

// clang-format off
static inline void __syncthreads(EMU_HERE) { emu::barrier(site); }
static inline int __syncthreads_or(int p, EMU_HERE) {
    return emu::barrier(p != 0, [](int a, int b) { return a | b; }, "__syncthreads_or", site);
}
static inline int __syncthreads_and(int p, EMU_HERE) {
    return emu::barrier(p != 0, [](int a, int b) { return a & b; }, "__syncthreads_and", site);
}
static inline int __syncthreads_count(int p, EMU_HERE) {
    return emu::barrier(p != 0, [](int a, int b) { return a + b; }, "__syncthreads_count", site);
}
static inline void __syncwarp(unsigned mask = 0xffffffff, EMU_HERE) { emu::warp_barrier(mask, site); }

// The warp is cut into segments of `width` lanes; a lane whose source lies outside its own keeps its value.
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_HERE) {
    return emu::shuffle(mask, value, (emu::lane() & -width) | (lane & (width - 1)), "__shfl_sync", site);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMU_HERE) {
    int me = emu::lane(), from = me - (int)by;
    return emu::shuffle(mask, value, from < (me & -width) ? me : from, "__shfl_up_sync", site);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMU_HERE) {
    int me = emu::lane(), from = me + (int)by;
    return emu::shuffle(mask, value, from > (me | (width - 1)) ? me : from, "__shfl_down_sync", site);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_HERE) {
    int me = emu::lane(), from = me ^ bits;
    return emu::shuffle(mask, value, from > (me | (width - 1)) ? me : from, "__shfl_xor_sync", site);
}

static inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) {
    return emu::reduce<unsigned>(mask, p ? 1u << emu::lane() : 0, [](unsigned a, unsigned b) { return a | b; },
                                 "__ballot_sync", site);
}
static inline int __any_sync(unsigned mask, int p, EMU_HERE) {
    return emu::reduce<int>(mask, p != 0, [](int a, int b) { return a | b; }, "__any_sync", site);
}
static inline int __all_sync(unsigned mask, int p, EMU_HERE) {
    return emu::reduce<int>(mask, p != 0, [](int a, int b) { return a & b; }, "__all_sync", site);
}
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T value, EMU_HERE) {
    uint64_t mine = 0, all[32];
    memcpy(&mine, &value, sizeof value);
    emu::exchange(mask, mine, all, "__match_any_sync", site);
    unsigned same = 0;
    for (int i = 0; i < 32; i++) same |= (unsigned)(mask >> i & 1 && all[i] == mine) << i;
    return same;
}
#define WARP_REDUCE(name, type, expression)                                                                    \
    static inline type name(unsigned mask, type value, EMU_HERE) {                                             \
        return emu::reduce<type>(mask, value, [](type a, type b) -> type { return expression; }, #name, site); \
    }
WARP_REDUCE(__reduce_add_sync, unsigned, a + b)
WARP_REDUCE(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
WARP_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
WARP_REDUCE(__reduce_min_sync, int, a < b ? a : b)
WARP_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
WARP_REDUCE(__reduce_max_sync, int, a > b ? a : b)
WARP_REDUCE(__reduce_and_sync, unsigned, a & b)
WARP_REDUCE(__reduce_or_sync, unsigned, a | b)
WARP_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef WARP_REDUCE

// ---- atomics and fences ----------------------------------------------------------------------------------
#define ATOMIC_FUNCTION(name, expression)                                                                      \
    template <typename T> static inline T name(T *p, std::enable_if_t<true, T> value, EMU_HERE) {              \
        return emu::read_modify_write<T>(                                                                      \
            p, value, [](T a, T b) -> T { return (void)a, expression; }, #name, site);                         \
    }
ATOMIC_FUNCTION(atomicAdd, a + b)
ATOMIC_FUNCTION(atomicSub, a - b)
ATOMIC_FUNCTION(atomicMax, a > b ? a : b)
ATOMIC_FUNCTION(atomicMin, a < b ? a : b)
ATOMIC_FUNCTION(atomicOr, a | b)
ATOMIC_FUNCTION(atomicAnd, a & b)
ATOMIC_FUNCTION(atomicXor, a ^ b)
ATOMIC_FUNCTION(atomicExch, b)
#undef ATOMIC_FUNCTION
template <typename T> static inline T atomicCAS(T *p, std::enable_if_t<true, T> expected, std::enable_if_t<true, T> value, EMU_HERE) {
    emu::watch_access(p, sizeof(T), emu::ATOMIC, "atomicCAS", site);
    T old;
    emu::raw_copy(&old, p, sizeof(T));
    if (old == expected) emu::raw_copy(p, &value, sizeof(T));
    return old;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// ---- loads, stores, bits ---------------------------------------------------------------------------------
template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, std::enable_if_t<true, T> x) { *p = x; }

template <typename To, typename From> static inline To emu_same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline unsigned __float_as_uint(float x) { return emu_same_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_same_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_same_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_same_bits<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

// ---- arithmetic: what the host's <math.h> lacks ----------------------------------------------------------
using std::max;
using std::min;
static inline unsigned min(unsigned a, int b) { return a < (unsigned)b ? a : (unsigned)b; }
static inline unsigned min(int a, unsigned b) { return min(b, a); }
static inline unsigned max(unsigned a, int b) { return a > (unsigned)b ? a : (unsigned)b; }
static inline unsigned max(int a, unsigned b) { return max(b, a); }

static inline void sincospi(double x, double *s, double *c) { sincos(M_PI * fmod(x, 2), s, c); }
static inline void sincospif(float x, float *s, float *c) {
    double ds, dc;
    sincospi(x, &ds, &dc);
    *s = (float)ds, *c = (float)dc;
}
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Rounded here and now: never a part of a fused multiply-add, as a plain product may be.
static inline float __fmul_rn(float a, float b) {
    float product = a * b;
    __asm__("" : "+m"(product));
    return product;
}
static inline float __fadd_rn(float a, float b) {
    float sum = a + b;
    __asm__("" : "+m"(sum));
    return sum;
}

// Approximate ones are off by as much as the CUDA C++ Programming Guide ("Mathematical Functions") allows. (glibc declares
// the names of some of them.)
#define __expf emu_expf
#define __logf emu_logf
#define __log2f emu_log2f
static inline float rsqrtf(float x) { return emu::approximate((float)(1 / sqrt((double)x)), 2); }
static inline float __fdividef(float x, float y) { return emu::approximate(x / y, 2); }
static inline float __expf(float x) { return emu::approximate(expf(x), 2 + (int)fminf(fabsf(1.173f * x), 150)); }
static inline float __logf(float x) { return emu::approximate(logf(x), 3); }
static inline float __log2f(float x) { return emu::approximate(log2f(x), 2); }
// clang-format on

// Watched, unless so short that the compiler makes it a load and a store, which are: libc's memory functions are not.
#ifdef __SANITIZE_THREAD__
extern "C" void *emu_memcpy(void *to, const void *from, size_t size);
extern "C" void *emu_memset(void *to, int byte, size_t size);
#define emu_short(size)        (__builtin_constant_p(size) && (size) <= 16)
#define memcpy(to, from, size) (emu_short(size) ? __builtin_memcpy(to, from, size) : emu_memcpy(to, from, size))
#define memmove(to, from, size)                                                                                \
    (emu_short(size) ? __builtin_memmove(to, from, size) : emu_memcpy(to, from, size))
#define memset(to, byte, size) (emu_short(size) ? __builtin_memset(to, byte, size) : emu_memset(to, byte, size))
#endif

#endif
