// The instructions of kernels/ptx.cuh: what they compute, what they demand, and what they leave open.
//
// Warp-wide ones: the lanes meet, each with its registers; the last to arrive spreads all lanes' fragments out
// as matrices, works on those, and gives each lane its part back (g = lane / 4, t = lane % 4):
//
//          a [16, K]           b [K, 8]           d [16, 8]         K = 16 bf16, or 32 fp8:
//        ┌─────┬─────┐      ┌─────────┐        ┌─────────────┐      a register holds 2 or 4 of them
//     g  │ a0  │ a2  │      │b0: row t│ t      │ d0 d1       │ g
//        ├─────┼─────┤      ├─────────┤        ├─────────────┤
//     g+8│ a1  │ a3  │      │b1       │        │ d2 d3       │ g+8
//        └─────┴─────┘      └─────────┘        └─────────────┘
//           t     t           column g           columns 2t, 2t+1
//
// A product's sum runs in fp32 over k = 0, 1, 2…, each step rounded once, from d. Tensor cores sum in an order
// that is written nowhere, so kernels may not depend on it. Cost: 0.7 µs an mma, and the lanes' meeting.
//
// cp.async: a copy may land as early as its issue or as late as its thread's wait; which, the seed draws copy
// by copy. So a wait left out shows (some copies are late), and a buffer filled while it is read shows (some
// are early).
#include <math.h>
#include <string.h>
#include <vector>
#include <cuda_fp8.h>
#include "dev/emu/ptx.h"

namespace emu {

// ---------------------------------------------------------------------------------------------------------
// cp.async

static void check_row(const void *address, const char *what, const char *space, Site site) {
    if ((uintptr_t)address % 16) error(site, "%s: %s address %p is not 16-byte aligned", what, space, address);
}

static void check_shared(const void *address, const char *what, Site site) {
    check_row(address, what, "shared", site);
    if (on_device(address, 16)) error(site, "%s: address %p is in global memory, not shared", what, address);
    if (stack_low <= (char *)address && (char *)address < stack_high)
        error(site, "%s: address %p is the thread's own, not shared", what, address);
}

struct Copy {
    char *shared;
    const void *global;
    uint32_t bytes;
    bool late;
    size_t group; // this one of the thread's commits, from 0, makes it part of a group
    Site site;
};
struct Copies { // of a thread
    std::vector<Copy> under_way;
    size_t committed;
};

static Copies &copies() {
    static Copies of_thread[1024];
    Copies *mine = &of_thread[thread()];
    if (*private_data() == NULL) { // a new block: what nobody waited for in the last one never lands
        mine->under_way.clear();
        mine->committed = 0;
        *private_data() = mine;
    }
    return *mine;
}

static void land(const Copy &copy) {
    memcpy(copy.shared, copy.global, copy.bytes);
    memset(copy.shared + copy.bytes, 0, 16 - copy.bytes);
}

void copy_async(void *shared, const void *global, uint32_t bytes, Site site) {
    check_shared(shared, "cp.async", site);
    check_row(global, "cp.async", "global", site);
    if (bytes > 16) error(site, "cp.async: %u bytes of 16", bytes);
    if (bytes && !on_device(global, bytes)) error(site, "cp.async: %p is not in global memory", global);
    watch_access(shared, 16, ISSUED, "cp.async", site);
    if (bytes) watch_access(global, bytes, READ, "cp.async", site);
    Copies &mine = copies();
    Copy copy = {(char *)shared, global, bytes, (bool)(random_bits() & 1), mine.committed, site};
    if (!copy.late) land(copy);
    mine.under_way.push_back(copy);
}

void copy_commit(Site site) {
    if (!skipped(site, "commit")) copies().committed++;
}

void copy_wait(size_t pending, Site site) {
    if (skipped(site, "wait")) return;
    Copies &mine = copies();
    size_t kept = 0;
    for (const Copy &copy : mine.under_way)
        if (copy.group + pending < mine.committed) {
            if (copy.late) land(copy);
            watch_access(copy.shared, 16, ARRIVED, "cp.async", copy.site);
        } else
            mine.under_way[kept++] = copy;
    mine.under_way.resize(kept);
}

// ---------------------------------------------------------------------------------------------------------
// ldmatrix

enum { LANES = 32 };

static void check_whole(uint32_t mask, const char *what) {
    if (mask != 0xffffffff) error({}, "%s: a warp has only the lanes %08x, not all 32", what, mask);
}

struct Rows {
    uint32_t *r;
    const char *row;
};

template <bool Transposed> static void spread_rows(void *lanes[LANES], uint32_t mask) {
    check_whole(mask, "ldmatrix");
    for (int lane = 0; lane < LANES; lane++)
        for (int matrix = 0; matrix < 4; matrix++) {
            int g = lane / 4, t = lane % 4;
            auto row = [&](int i) { return ((Rows *)lanes[8 * matrix + i])->row; };
            char pair[4];
            memcpy(pair, Transposed ? row(2 * t) + 2 * g : row(g) + 4 * t, 2);
            memcpy(pair + 2, Transposed ? row(2 * t + 1) + 2 * g : row(g) + 4 * t + 2, 2);
            memcpy(&((Rows *)lanes[lane])->r[matrix], pair, 4);
        }
}

void load_matrices(uint32_t r[4], const void *row, bool transposed, Site site) {
    check_shared(row, "ldmatrix", site);
    watch_access(row, 16, READ, "ldmatrix", site);
    Rows mine = {r, (const char *)row};
    meet(0xffffffff, &mine, transposed ? spread_rows<true> : spread_rows<false>, "ldmatrix", site);
}

// ---------------------------------------------------------------------------------------------------------
// mma

typedef float Row __attribute__((vector_size(32))); // 8 columns

struct Fragments {
    float *d;
    uint32_t a[4], b[2];
};

// An operand's `per` elements of one register, as floats.
struct Bf16 {
    enum { K = 16 };
    static void unpack(float *to, size_t stride, uint32_t packed) {
        for (int i = 0; i < 2; i++) {
            uint32_t bits = i ? packed & 0xffff0000 : packed << 16;
            memcpy(to + i * stride, &bits, sizeof bits);
        }
    }
};

template <__nv_fp8_interpretation_t Format> struct Fp8 {
    enum { K = 32 };
    struct Table {
        float value[256];
        Table() {
            for (int i = 0; i < 256; i++)
                value[i] = __half2float(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)i, Format));
        }
    };
    static void unpack(float *to, size_t stride, uint32_t packed) {
        static const Table table;
        for (int i = 0; i < 4; i++) to[i * stride] = table.value[packed >> 8 * i & 0xff];
    }
};

static int fp8_bits; // of a sum of fp8 products; 0: all 24 of fp32
extern "C" void emu_set_fp8_bits(int bits) {
    fp8_bits = bits;
}

// d + Σ a·b as Hopper's wgmma sums fp8 products: all terms are shifted to the exponent of the largest, and lose
// what then lies behind the last of `bits` bits (DeepSeek-V3 §3.5.2 counted 14). Promotion to fp32 sums exists
// because of this.
static float short_sum(float d, const float *a, const float (*b)[8], int column, int n, int bits) {
    double terms[33], largest = 0, sum = 0;
    for (int k = 0; k <= n; k++) {
        terms[k] = k == n ? (double)d : (double)a[k] * b[k][column];
        largest = fmax(largest, fabs(terms[k]));
    }
    int exponent;
    frexp(largest, &exponent);
    for (int k = 0; k <= n; k++) sum += trunc(ldexp(terms[k], bits - exponent));
    return (float)ldexp(sum, exponent - bits);
}

template <class A, class B> static void multiply(void *lanes[LANES], uint32_t mask) {
    check_whole(mask, "mma");
    enum { K = A::K, PER = K / 8 /* elements in a register */ };
    float a[16][K];
    alignas(32) float b[K][8];
    Row d[16];
    for (int lane = 0; lane < LANES; lane++) {
        const Fragments *f = (Fragments *)lanes[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) A::unpack(&a[g + i % 2 * 8][PER * t + i / 2 * (K / 2)], 1, f->a[i]);
        for (int i = 0; i < 2; i++) B::unpack(&b[PER * t + i * (K / 2)][g], 8, f->b[i]);
        for (int i = 0; i < 4; i++) d[g + i / 2 * 8][2 * t + i % 2] = f->d[i];
    }
    if (K == 32 && fp8_bits)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) d[i][j] = short_sum(d[i][j], a[i], b, j, K, fp8_bits);
    else
        for (int k = 0; k < K; k++)
#pragma GCC unroll 16 // the sums stay in registers
            for (int i = 0; i < 16; i++) d[i] += a[i][k] * *(const Row *)b[k];
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++)
            ((Fragments *)lanes[lane])->d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    watch_mma(K == 16 ? "m16n8k16 bf16" : "m16n8k32 fp8");
}

void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, Site site) {
    Fragments mine = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    meet(0xffffffff, &mine, multiply<Bf16, Bf16>, "mma bf16", site);
}

void mma_fp8(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, Fp8Pair formats, Site site) {
    typedef Fp8<__NV_E4M3> E4;
    typedef Fp8<__NV_E5M2> E5;
    static void (*const combine[])(void *[LANES], uint32_t) = {multiply<E4, E4>, multiply<E4, E5>,
                                                               multiply<E5, E4>, multiply<E5, E5>};
    Fragments mine = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    meet(0xffffffff, &mine, combine[formats], "mma fp8", site);
}

// ---------------------------------------------------------------------------------------------------------
// Approximate arithmetic

float approximate(float exact, int ulp) {
    uint32_t bits, exponent;
    memcpy(&bits, &exact, sizeof bits);
    exponent = bits >> 23 & 0xff;
    if (exponent == 0 || exponent == 0xff) return exact;
    uint32_t hash = (bits ^ (seed >> 16) * 0x9e3779b1u) *
                    0x85ebca6bu; // multiply and shift twice: every bit reaches the top
    hash = (hash ^ hash >> 15) * 0xc2b2ae35u;
    bits += (uint32_t)((uint64_t)hash * (2 * (uint32_t)ulp + 1) >> 32) - (uint32_t)ulp;
    memcpy(&exact, &bits, sizeof bits);
    return exact;
}

float exp2_approx(float x) {
    if (fabsf(x) < 0x1p-126f) return 1; // exactly, as documented
    float y = approximate((float)exp2((double)x), 2);
    return y < 0x1p-126f ? 0 : y;
}

} // namespace emu
