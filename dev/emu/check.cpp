// Watches every access of a kernel. The checked build compiles kernels with -fsanitize=thread: the compiler puts a call of
// __tsan_read4(address) and the like before each load and store. Those functions are ours, and ask four things:
//
//     where    Is the address in a live device allocation, in the block's shared memory or on the thread's stack?
//     race     Who touched these bytes last, and did we meet since?
//     written  Has anything been written there at all?
//     counted  How many bytes, sectors and wavefronts would a GPU move for this?
//
// Race. A cell of shadow memory stands for a few bytes and keeps their last writer and two readers, each with the time of
// the access. Time is a stamp, one more at every block and every barrier, and within a stamp a clock of the warp's lanes
// (Lamport 1978; vector clocks as in Fidge 1988, 32×32 numbers a warp), which __syncwarp moves on:
//
//     stamp    older than the launch     another launch: in order
//              older than the block      another block of this launch: never in order
//              older than the barrier    in order
//              this one                  in order only for the same thread, or lanes of one warp that met in __syncwarp
//
// Two accesses out of order, one of them a write, not both atomic: a race, whatever order the seed gave this time.
// A shuffle orders no memory, nor does an instruction of the tensor cores (CUDA C++ Programming Guide, 7.22).
//
// Written. Reading bytes none of which was ever written is an error; a vector that holds some written bytes is let
// through, since what is beside them may be masked later (the heap is NaN until written, so using it shows).
//
// Counted. Lanes run one after another here, so each keeps a log, and when they meet, entries with the same instruction
// and the same count of that instruction are what a GPU does at once. Global memory moves in sectors of 32 bytes. Shared
// memory has 32 banks of 4 bytes: a wavefront gives each bank's one word; 8-byte accesses go by half-warps, 16-byte
// ones by quarters.
#ifndef EMU_CHECKED
#error "only the checked build has this file"
#endif
#include <algorithm>
#include <cxxabi.h>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <stdio.h>
#include <string>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>
#include <unwind.h>
#include <vector>
#include <cuda_runtime.h>

extern unsigned char smem[]; // dynamic shared memory (launch.cpp)

namespace emu {
namespace {

bool watch_races = true, watch_uninitialised = true, watch_counters = false;

// ---- memory that reads as zeros until it is touched --------------------------------------------------------------------
template <typename T> struct Lazy {
    T *at = NULL;
    size_t n = 0;
    void make(size_t count) {
        drop();
        if (!count) return;
        n = count;
        at = (T *)mmap(NULL, n * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
        if (at == MAP_FAILED) perror("emu: shadow memory"), abort();
    }
    void drop() {
        if (n) munmap(at, n * sizeof(T));
        n = 0;
    }
};

struct Bits { // one bit a byte of memory
    Lazy<uint8_t> bits;
    void make(size_t bytes) {
        bits.make((bytes + 7) / 8 + 8);
    }
    uint32_t get(size_t at, size_t size) const { // size ≤ 16
        uint32_t word;
        memcpy(&word, bits.at + at / 8, sizeof word);
        return (word >> (at % 8)) & ((1u << size) - 1);
    }
    void set(size_t at, size_t size) {
        while (size) {
            size_t n = size < 16 ? size : 16;
            uint32_t word;
            memcpy(&word, bits.at + at / 8, sizeof word);
            word |= ((1u << n) - 1) << (at % 8);
            memcpy(bits.at + at / 8, &word, sizeof word);
            at += n, size -= n;
        }
    }
    size_t count() const {
        size_t n = 0;
        for (size_t i = 0; i < bits.n; i++) n += (size_t)__builtin_popcount(bits.at[i]);
        return n;
    }
};

// ---- what an access is called ------------------------------------------------------------------------------------------
// Of a load or store: where the call in this library or program returns to. Of an instruction: its number here, above the top bit.
struct Instruction {
    Site site;
    const char *what;
};
std::vector<Instruction> instructions;
enum : uint32_t { IS_INSTRUCTION = 1u << 31 };

uint32_t instruction_key(Site site, const char *what) {
    for (size_t i = 0; i < instructions.size(); i++) {
        const Instruction &it = instructions[i];
        if (it.site.line == site.line && it.what == what && !strcmp(it.site.file, site.file))
            return IS_INSTRUCTION | (uint32_t)i;
    }
    instructions.push_back({site, what});
    return IS_INSTRUCTION | (uint32_t)(instructions.size() - 1);
}

// This library or program, as loaded: where its constants are, and where its __shared__ arrays (thread-local storage, see
// cuda_runtime.h), whose names the symbol table knows.
struct Image {
    struct Range {
        uintptr_t low, high;
        std::string name;
    };
    struct Array : Range {
        uintptr_t owner; // the kernel that has it; 0: not a kernel, whoever calls that function may use it
    };
    uintptr_t base = 0;
    const char *path = "";
    std::vector<Range> constants;
    Range shared = {};
    std::vector<Array> arrays;
    std::map<uintptr_t, std::string> functions; // mangled names, by address

    Image() {
        dl_iterate_phdr(
            [](dl_phdr_info *info, size_t, void *self) { return (int)((Image *)self)->take(*info); }, this);
        for (const dim3 *d : {&blockDim, &gridDim}) constants.push_back({(uintptr_t)d, (uintptr_t)(d + 1), ""});
        read_symbols();
    }
    bool take(const dl_phdr_info &info) {
        std::vector<Range> read_only;
        Range thread_local_data = {};
        bool this_one = false;
        for (int i = 0; i < info.dlpi_phnum; i++) {
            const auto &segment = info.dlpi_phdr[i];
            Range r = {info.dlpi_addr + segment.p_vaddr, info.dlpi_addr + segment.p_vaddr + segment.p_memsz,
                       ""};
            if (segment.p_type == PT_TLS && info.dlpi_tls_data)
                thread_local_data = {(uintptr_t)info.dlpi_tls_data,
                                     (uintptr_t)info.dlpi_tls_data + segment.p_memsz, ""};
            if (segment.p_type != PT_LOAD) continue;
            if (!(segment.p_flags & PF_W)) read_only.push_back(r);
            this_one |= (uintptr_t)&watch_races >= r.low && (uintptr_t)&watch_races < r.high;
        }
        if (!this_one) return false;
        base = info.dlpi_addr,
        path = *info.dlpi_name ? strdup(info.dlpi_name) : realpath("/proc/self/exe", NULL);
        constants = read_only, shared = thread_local_data;
        return true;
    }
    void read_symbols() {
        int file = open(path, O_RDONLY);
        off_t size = file < 0 ? 0 : lseek(file, 0, SEEK_END);
        char *elf =
            size > 0 ? (char *)mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, file, 0) : (char *)MAP_FAILED;
        if (file >= 0) close(file);
        if (elf == MAP_FAILED) return;
        std::map<std::string, uintptr_t> addresses; // of functions, by mangled name
        std::vector<std::string> owners;            // of the arrays, mangled
        const ElfW(Ehdr) *header = (ElfW(Ehdr) *)elf;
        const ElfW(Shdr) *sections = (ElfW(Shdr) *)(elf + header->e_shoff);
        for (int i = 0; i < header->e_shnum; i++) {
            if (sections[i].sh_type != SHT_SYMTAB) continue;
            const char *names = elf + sections[sections[i].sh_link].sh_offset;
            const ElfW(Sym) *symbols = (ElfW(Sym) *)(elf + sections[i].sh_offset);
            for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; j++) {
                const char *mangled = names + symbols[j].st_name;
                if (ELF64_ST_TYPE(symbols[j].st_info) == STT_FUNC)
                    addresses[mangled] = base + symbols[j].st_value;
                if (ELF64_ST_TYPE(symbols[j].st_info) != STT_TLS || !symbols[j].st_size) continue;
                uintptr_t low = shared.low + symbols[j].st_value;
                auto [function, name] = plain(mangled);
                arrays.push_back({{low, low + symbols[j].st_size, name}, 0});
                owners.push_back(is_kernel(function) ? owner(mangled, name) : "");
            }
        }
        for (size_t i = 0; i < arrays.size(); i++)
            if (addresses.count(owners[i])) arrays[i].owner = addresses[owners[i]];
        for (auto &[mangled, address] : addresses) functions[address] = mangled;
        munmap(elf, (size_t)size);
    }
    // void kernel<true>(float*)::name → kernel, name
    static std::pair<std::string, std::string> plain(const char *mangled) {
        int status;
        char *whole = abi::__cxa_demangle(mangled, NULL, NULL, &status);
        std::string name = whole ? whole : mangled;
        free(whole);
        size_t last = name.rfind("::");
        if (last == std::string::npos) return {"", name};
        std::string function = name.substr(0, name.find_first_of("<("));
        return {function.substr(function.find_last_of(" :") + 1), name.substr(last + 2)};
    }
    // _ZZ, then the function as in its own symbol behind _Z, then E, length and name of the array
    static std::string owner(const std::string &mangled, const std::string &name) {
        size_t end = mangled.rfind("E" + std::to_string(name.size()) + name);
        return end == std::string::npos ? "" : "_" + mangled.substr(2, end - 2);
    }
    bool constant(uintptr_t at, size_t size) const {
        for (const Range &r : constants)
            if (at >= r.low && at + size <= r.high) return true;
        return false;
    }
};
const Image *image; // found when the first kernel is launched

bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

// The line of the sources, asked of addr2line, which gives the chain of inlined calls; the kernel's own file is wanted.
Site locate(uint32_t key) {
    if (key & IS_INSTRUCTION) return instructions[key & ~IS_INSTRUCTION].site;
    static std::map<uint32_t, Site> known;
    if (known.count(key)) return known[key];
    char line[4096], here[4096] = "";
    if (!getcwd(here, sizeof here)) here[0] = 0;
    snprintf(line, sizeof line, "addr2line -i -e '%s' 0x%x 2>/dev/null", image->path, key - 1);
    Site found = {image->path, (int)key};
    FILE *pipe = popen(line, "r");
    while (pipe && fgets(line, sizeof line, pipe)) {
        char *colon = strrchr(line, ':'), *file = line;
        if (!colon) continue;
        *colon = 0;
        bool source = ends_with(file, ".cu");
        if (!source && !ends_with(file, ".cuh")) continue;
        if (!strncmp(file, here, strlen(here))) file += strlen(here) + 1;
        if (!strncmp(file, "./", 2)) file += 2;
        found = {strdup(file), atoi(colon + 1)};
        if (source) break;
    }
    if (pipe) pclose(pipe);
    return known[key] = found;
}

// Of the access that is being made: where a header's function made it, the kernel's line that called it.
Site locate_now(uint32_t key) {
    Site site = locate(key);
    if (!ends_with(site.file, ".cuh")) return site;
    _Unwind_Backtrace(
        [](_Unwind_Context *frame, void *found) {
            Site caller = locate((uint32_t)(_Unwind_GetIP(frame) - image->base));
            if (!ends_with(caller.file, ".cu")) return _URC_NO_REASON;
            *(Site *)found = caller;
            return _URC_NORMAL_STOP;
        },
        &site);
    return site;
}

const char *verb(uint32_t key, Access access) {
    static char text[2][64];
    static int turn;
    const char *word = access == READ ? "read" : access == ATOMIC ? "atomic access" : "write";
    if (!(key & IS_INSTRUCTION)) return word;
    snprintf(text[turn ^= 1], sizeof text[0], "%s (%s)", word, instructions[key & ~IS_INSTRUCTION].what);
    return text[turn];
}

// ---- time --------------------------------------------------------------------------------------------------------------
uint32_t now = 1, launch_began = 1, block_began = 1; // stamps
size_t threads;                                      // of a block
struct Warp {
    uint32_t clock[32]
                  [32]; // [lane][other]: the other's last time that the lane knows of; [lane][lane] is its own
};
std::vector<Warp> warps;

struct Record {
    uint32_t stamp, clock, key;
    uint16_t thread, access;
};
struct Cell {
    Record writer, reader[2];
};

// Is r before what `thread` does now? Older than `began` (of the launch for global memory, of the block for shared): of others.
bool ordered(const Record &r, size_t thread, uint32_t began) {
    if (r.stamp < began) return true;
    if (r.stamp < block_began) return false;
    if (r.stamp < now || r.thread == thread) return true;
    if (r.thread / 32 != thread / 32) return false;
    return warps[thread / 32].clock[thread % 32][r.thread % 32] >= r.clock;
}
bool together(const Record &a, const Record &b) { // of one warp
    return a.thread / 32 == b.thread / 32 && (a.stamp < block_began) == (b.stamp < block_began);
}

// ---- memory ------------------------------------------------------------------------------------------------------------
struct Traffic { // of one kernel and one allocation
    uintptr_t address;
    size_t size, read, written;
    Bits bytes_read, bytes_written;
};

struct Region { // an allocation, a __shared__ array or dynamic shared memory
    std::string name;
    size_t size;
    size_t number;  // of an allocation, from 1; 0: shared memory
    unsigned shift; // a cell is 1 << shift bytes: 16, until a smaller access comes
    Lazy<Cell> cells;
    Bits written;
    Traffic *traffic; // of the kernel that runs

    void refine(unsigned finer) {
        Lazy<Cell> old = cells;
        cells = {};
        cells.make((size >> finer) + 1);
        for (size_t i = 0; i < cells.n; i++) {
            const Cell &from = old.at[i >> (shift - finer)];
            if (from.writer.stamp || from.reader[0].stamp) cells.at[i] = from;
        }
        old.drop();
        shift = finer;
    }
};
std::map<uintptr_t, Region> regions; // by address
std::vector<Region *> shared;        // those in shared memory
size_t allocations;
struct Freed {
    std::string name;
    size_t size;
};
std::map<uintptr_t, Freed> freed;
struct {
    uintptr_t at;
    Region *region;
} found[256]; // by instruction: it mostly comes back to the same array

void open_region(uintptr_t at, size_t size, size_t number, const std::string &name) {
    Region &r = regions[at] = {name, size, number, 4, {}, {}, NULL};
    r.cells.make((size >> 4) + 1);
    r.written.make(size);
    if (!number) shared.push_back(&r);
}
void close_region(uintptr_t at) {
    Region &r = regions[at];
    r.cells.drop();
    r.written.bits.drop();
    shared.erase(std::remove(shared.begin(), shared.end(), &r), shared.end());
    regions.erase(at);
    memset(found, 0, sizeof found);
}

[[noreturn]] void outside(uintptr_t at, size_t size, Access access, uint32_t key) {
    std::string where = "which is no memory of the device (the host's?)";
    size_t nearest = 1 << 20;
    for (auto &[low, r] : regions) {
        size_t high = low + r.size, distance = at >= high ? at - high : at < low ? low - at : 0;
        if (distance >= nearest) continue;
        nearest = distance;
        bool after = at + size > high;
        size_t beyond = after ? at + size - high : low - at;
        where = std::to_string(beyond) + (after ? " bytes past the end of " : " bytes before the start of ") +
                r.name;
    }
    for (auto &[low, r] : freed)
        if (at >= low && at < low + r.size) where = "in " + r.name + ", which has been freed";
    error(locate_now(key), "%s of %zu bytes at %p, %s", verb(key, access), size, (void *)at, where.c_str());
    abort();
}

// The region that holds all of these bytes; NULL where they are constants of the library.
Region *find(uintptr_t &low, uintptr_t at, size_t size, Access access, uint32_t key) {
    auto &guess = found[key % 256];
    if (!guess.region || at < guess.at || at + size > guess.at + guess.region->size) {
        auto next = regions.upper_bound(at);
        if (next == regions.begin() || at + size > std::prev(next)->first + std::prev(next)->second.size) {
            if (image->constant(at, size)) return NULL;
            outside(at, size, access, key);
        }
        guess = {std::prev(next)->first, &std::prev(next)->second};
    }
    low = guess.at;
    return guess.region;
}

// ---- counters ----------------------------------------------------------------------------------------------------------
struct Kernel {
    std::string name;
    size_t launches = 0, grid[3], block[3], dynamic_smem = 0;
    size_t global_read = 0, global_written = 0, in_16_bytes = 0, sectors = 0, ideal_sectors = 0;
    size_t shared_read = 0, shared_written = 0, wavefronts = 0, extra_wavefronts = 0;
    size_t barriers = 0, atomics = 0;
    std::map<std::string, size_t> meets, mma; // by name
    std::map<size_t, Traffic> traffic;        // by the allocation's number
};
std::map<std::string, Kernel> kernels; // by mangled name: those of one template are many
Kernel *kernel;

struct Entry {
    uint32_t key;
    uint16_t size;
    bool shared;
    uintptr_t at;
};
std::vector<std::vector<Entry>> logs; // one a thread

struct Placed {        // an entry, in the order of requests
    uint32_t key, nth; // the nth time that this lane has come to this instruction
    int lane;
    const Entry *entry;
};

// One request of a warp: what n lanes ask of one instruction.
void count_request(const Placed *lanes, size_t n) {
    size_t size = lanes->entry->size;
    if (lanes->entry->shared) {
        int group = size <= 4 ? 32 : size == 8 ? 16 : 8; // lanes that are served together
        for (size_t i = 0; i < n;) {
            int first = lanes[i].lane / group, most = 0, words[32] = {};
            std::vector<uintptr_t> seen;
            for (; i < n && lanes[i].lane / group == first; i++) {
                uintptr_t at = lanes[i].entry->at;
                for (uintptr_t word = at / 4; word <= (at + size - 1) / 4; word++)
                    if (std::find(seen.begin(), seen.end(), word) == seen.end()) {
                        seen.push_back(word);
                        most = std::max(most, ++words[word % 32]);
                    }
            }
            kernel->wavefronts += (size_t)most, kernel->extra_wavefronts += (size_t)most - 1;
        }
        return;
    }
    std::vector<std::pair<uintptr_t, uintptr_t>> spans;
    for (size_t i = 0; i < n; i++)
        spans.push_back({lanes[i].entry->at, lanes[i].entry->at + lanes[i].entry->size});
    std::sort(spans.begin(), spans.end());
    uintptr_t bytes = 0, end = 0, next_sector = 0;
    for (auto &[from, to] : spans) {
        if (to > end) bytes += to - std::max(from, end), end = to;
        uintptr_t sector = std::max(from / 32, next_sector);
        next_sector = std::max(next_sector, (to + 31) / 32);
        kernel->sectors += next_sector - sector;
    }
    kernel->ideal_sectors += (bytes + 31) / 32;
}

// These lanes of a warp have met (or are done): what they logged becomes requests.
void count_lanes(size_t warp, uint32_t mask) {
    std::vector<Placed> all;
    for (int lane = 0; lane < 32; lane++) {
        size_t t = 32 * warp + (size_t)lane;
        if (!(mask >> lane & 1) || t >= threads) continue;
        std::unordered_map<uint32_t, uint32_t> count;
        for (const Entry &e : logs[t]) all.push_back({e.key, count[e.key]++, lane, &e});
    }
    std::sort(all.begin(), all.end(), [](const Placed &a, const Placed &b) {
        return a.key != b.key ? a.key < b.key : a.nth != b.nth ? a.nth < b.nth : a.lane < b.lane;
    });
    for (size_t first = 0, i = 0; i < all.size(); first = i) {
        const Placed &f = all[first]; // a copy reads and writes under one key: its two sides are two requests
        while (i < all.size() && all[i].key == f.key && all[i].nth == f.nth &&
               all[i].entry->shared == f.entry->shared)
            i++;
        count_request(&f, i - first);
    }
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && 32 * warp + (size_t)lane < threads) logs[32 * warp + (size_t)lane].clear();
}
void count_block() {
    if (watch_counters && kernel)
        for (size_t w = 0; w < warps.size(); w++) count_lanes(w, 0xffffffff);
}

void count(Region &r, uintptr_t at, size_t place, size_t size, Access access, uint32_t key) {
    bool reads = access == READ || access == ATOMIC, writes = access != READ;
    if (access == ATOMIC) kernel->atomics++;
    if (r.number) {
        if (!r.traffic) {
            Traffic &t = kernel->traffic[r.number];
            if (!t.size) {
                t.address = at - place, t.size = r.size;
                t.bytes_read.make(t.size), t.bytes_written.make(t.size);
            }
            r.traffic = &t;
        }
        if (reads) kernel->global_read += size, r.traffic->read += size, r.traffic->bytes_read.set(place, size);
        if (writes)
            kernel->global_written += size, r.traffic->written += size,
                r.traffic->bytes_written.set(place, size);
        if (size == 16) kernel->in_16_bytes += size * (size_t)(reads + writes);
    } else {
        if (reads) kernel->shared_read += size;
        if (writes) kernel->shared_written += size;
    }
    logs[thread()].push_back({key, (uint16_t)size, !r.number, at});
}

// ---- one access --------------------------------------------------------------------------------------------------------
[[noreturn]] void race(const Region &r, size_t place, const Record &before, Access access, uint32_t key) {
    Site there = locate(before.key), here = locate_now(key);
    char who[64];
    if (before.stamp < block_began)
        snprintf(who, sizeof who, "another block's thread %d", before.thread);
    else
        snprintf(who, sizeof who, "thread %d", before.thread);
    const char *was = verb(before.key, (Access)before.access);
    if (before.access == ISSUED)
        error(here,
              "%s of byte %zu of %s while cp.async of %s, issued at %s:%d, is writing it: no wait and barrier "
              "since",
              verb(key, access), place, r.name.c_str(), who, there.file, there.line);
    else
        error(here, "race: %s of byte %zu of %s, and %s by %s at %s:%d, with no %s between", verb(key, access),
              place, r.name.c_str(), was, who, there.file, there.line,
              before.stamp < block_began                    ? "order of blocks"
              : (size_t)before.thread / 32 == thread() / 32 ? "__syncwarp or barrier"
                                                            : "barrier");
    abort();
}

void check_race(Region &r, size_t place, size_t size, Access access, uint32_t key) {
    unsigned finest = (unsigned)__builtin_ctzll(place | size | 16);
    if (finest < r.shift) r.refine(finest);
    size_t t = thread();
    Record mine = {now, warps[t / 32].clock[t % 32][t % 32], key, (uint16_t)t, (uint16_t)access};
    auto in_order = [t, began = r.number ? launch_began : block_began](const Record &before) {
        return ordered(before, t, began);
    };
    for (size_t i = place >> r.shift, end = (place + size) >> r.shift; i < end; i++) {
        Cell &cell = r.cells.at[i];
        Record &w = cell.writer, *reader = cell.reader;
        bool under_way = w.access == ISSUED && w.stamp >= block_began && access != ARRIVED;
        if (under_way || (!in_order(w) && !(access == ATOMIC && w.access == ATOMIC)))
            race(r, i << r.shift, w, access, key);
        if (access != READ) {
            for (int k = 0; k < 2; k++)
                if (!in_order(reader[k])) race(r, i << r.shift, reader[k], access, key);
            w = mine;
            reader[0].stamp = reader[1].stamp = 0;
        } else if (in_order(reader[0])) // whoever is in order with us is in order with those after us
            reader[0] = mine;
        else if (in_order(reader[1]) || together(reader[0], reader[1])) // of two warps, if two warps read
            reader[1] = mine;
    }
}

void watch(uintptr_t at, size_t size, Access access, uint32_t key) {
    uintptr_t low;
    Region *r = find(low, at, size, access, key);
    if (!r) return;
    size_t place = at - low;
    if (watch_races) check_race(*r, place, size, access, key);
    bool reads = access == READ || access == ATOMIC;
    if (reads && watch_uninitialised && size <= 16 && !r->written.get(place, size))
        error(locate_now(key), "%s of %zu bytes at byte %zu of %s, which nothing has written%s",
              verb(key, access), size, place, r->name.c_str(),
              r->number ? "" : " in this block: is a barrier or wait missing?");
    if (access != READ && access != ISSUED) r->written.set(place, size);
    if (kernel && access != ARRIVED) count(*r, at, place, size, access, key);
}

// A load or store of the kernel's code. Most are of the thread's own stack; outside kernels all are the host's.
inline void touch(const void *address, size_t size, Access access, void *from, bool aligned = true) {
    uintptr_t at = (uintptr_t)address;
    if (!stack_low || (at >= (uintptr_t)stack_low && at + size <= (uintptr_t)stack_high)) return;
    uint32_t key = (uint32_t)((uintptr_t)from - image->base);
    if (aligned && at % size)
        error(locate_now(key), "%s of %zu bytes at %p, which is not aligned to its size", verb(key, access),
              size, address);
    watch(at, size, access, key);
}

} // namespace

// ---- what the emulator tells -------------------------------------------------------------------------------------------
void watch_launch(const char *name, const void *function, unsigned grid[3], unsigned block[3],
                  size_t dynamic_smem) {
    threads = (size_t)block[0] * block[1] * block[2];
    warps.resize((threads + 31) / 32);
    logs.resize(threads);
    launch_began = ++now;
    if (!image) image = new Image;
    for (auto &a : image->arrays) { // those of other kernels are out of bounds
        bool open = regions.count(a.low), wanted = !a.owner || a.owner == (uintptr_t)function;
        if (open && !wanted) close_region(a.low);
        if (!open && wanted) open_region(a.low, a.high - a.low, 0, "the __shared__ array " + a.name);
    }
    if (regions.count((uintptr_t)smem)) close_region((uintptr_t)smem);
    if (dynamic_smem)
        open_region((uintptr_t)smem, dynamic_smem, 0,
                    "the " + std::to_string(dynamic_smem) + " bytes of dynamic shared memory");
    kernel = NULL;
    for (auto &entry : regions) entry.second.traffic = NULL;
    if (!watch_counters) return;
    auto symbol = image->functions.find((uintptr_t)function);
    kernel = &kernels[symbol == image->functions.end() ? name : symbol->second];
    kernel->name = name;
    kernel->launches++;
    for (int i = 0; i < 3; i++) kernel->grid[i] = grid[i], kernel->block[i] = block[i];
    kernel->dynamic_smem = dynamic_smem;
}

void watch_launch_end() {
    count_block();
    for (auto &log : logs) log.clear();
    kernel = NULL;
}

void watch_block() {
    count_block();
    block_began = ++now;
    for (Warp &w : warps)
        for (int lane = 0; lane < 32; lane++) {
            memset(w.clock[lane], 0, sizeof w.clock[lane]);
            w.clock[lane][lane] = 1;
        }
    for (Region *r : shared) memset(r->written.bits.at, 0, r->written.bits.n);
}

void watch_barrier() {
    now++;
    if (!kernel) return;
    kernel->barriers++;
    count_block();
}

void watch_warp(uint32_t mask, const char *what) {
    size_t w = thread() / 32;
    if (kernel) {
        kernel->meets[what]++;
        count_lanes(w, mask);
    }
    if (strcmp(what, "__syncwarp") != 0) return;
    uint32_t(*clock)[32] = warps[w].clock, joined[32] = {};
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1)
            for (int i = 0; i < 32; i++) joined[i] = std::max(joined[i], clock[lane][i]);
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) {
            memcpy(clock[lane], joined, sizeof joined);
            clock[lane][lane]++;
        }
}

void watch_access(const void *address, size_t size, Access access, const char *what, Site site) {
    uintptr_t at = (uintptr_t)address;
    if (at >= (uintptr_t)stack_low && at + size <= (uintptr_t)stack_high) return;
    watch(at, size, access, instruction_key(site, what));
}

void watch_mma(const char *shape) {
    if (kernel) kernel->mma[shape]++;
}

void watch_alloc(const void *address, size_t size) {
    allocations++;
    open_region((uintptr_t)address, size, allocations,
                "allocation " + std::to_string(allocations) + " of " + std::to_string(size) + " bytes");
}

void watch_free(const void *address) {
    const Region &r = regions[(uintptr_t)address];
    freed[(uintptr_t)address] = {r.name, r.size};
    close_region((uintptr_t)address);
}

void watch_host_write(const void *address, size_t size) {
    auto next = regions.upper_bound((uintptr_t)address);
    if (next == regions.begin()) return;
    auto &[low, r] = *std::prev(next);
    if ((uintptr_t)address + size <= low + r.size) r.written.set((uintptr_t)address - low, size);
}

} // namespace emu

// ---- what Python asks --------------------------------------------------------------------------------------------------
extern "C" void emu_watch(bool races, bool uninitialised, bool counters) {
    emu::watch_races = races, emu::watch_uninitialised = uninitialised, emu::watch_counters = counters;
}

// What kernels have done while counters were on, as JSON, as much as fits; returns the bytes needed.
extern "C" size_t emu_counters(char *json, size_t size, bool reset) {
    std::string text = "[";
    for (auto &[symbol, k] : emu::kernels) {
        char part[2048];
        snprintf(part, sizeof part,
                 "%s{\"kernel\":\"%s\",\"symbol\":\"%s\",\"launches\":%zu,"
                 "\"grid\":[%zu,%zu,%zu],\"block\":[%zu,%zu,%zu],\"dynamic_smem\":%zu,"
                 "\"global_read\":%zu,\"global_written\":%zu,\"in_16_bytes\":%zu,\"sectors\":%zu,\"ideal_"
                 "sectors\":%zu,"
                 "\"shared_read\":%zu,\"shared_written\":%zu,\"wavefronts\":%zu,\"extra_wavefronts\":%zu,"
                 "\"barriers\":%zu,\"atomics\":%zu",
                 text.size() > 1 ? ",\n" : "", k.name.c_str(), symbol.c_str(), k.launches, k.grid[0], k.grid[1],
                 k.grid[2], k.block[0], k.block[1], k.block[2], k.dynamic_smem, k.global_read, k.global_written,
                 k.in_16_bytes, k.sectors, k.ideal_sectors, k.shared_read, k.shared_written, k.wavefronts,
                 k.extra_wavefronts, k.barriers, k.atomics);
        text += part;
        for (auto *table : {&k.meets, &k.mma}) {
            text += table == &k.meets ? ",\"meets\":{" : ",\"mma\":{";
            for (auto &[what, n] : *table)
                text += (what == table->begin()->first ? "\"" : ",\"") + what + "\":" + std::to_string(n);
            text += "}";
        }
        text += ",\"allocations\":[";
        for (auto &[number, t] : k.traffic) {
            snprintf(part, sizeof part,
                     "%s{\"number\":%zu,\"address\":%zu,\"size\":%zu,\"read\":%zu,\"written\":%zu,\"unique_"
                     "read\":%zu,\"unique_"
                     "written\":%zu}",
                     number == k.traffic.begin()->first ? "" : ",", number, (size_t)t.address, t.size, t.read,
                     t.written, t.bytes_read.count(), t.bytes_written.count());
            text += part;
        }
        text += "]}";
    }
    text += "]";
    if (json && size) snprintf(json, size, "%s", text.c_str());
    if (reset) {
        for (auto &[symbol, k] : emu::kernels)
            for (auto &[number, t] : k.traffic) t.bytes_read.bits.drop(), t.bytes_written.bits.drop();
        emu::kernels.clear();
    }
    return text.size() + 1;
}

// ---- what the compiler calls -------------------------------------------------------------------------------------------
#define TOUCH(size)                                                                                            \
    extern "C" void __tsan_read##size(void *p) {                                                               \
        emu::touch(p, size, emu::READ, __builtin_return_address(0));                                           \
    }                                                                                                          \
    extern "C" void __tsan_write##size(void *p) {                                                              \
        emu::touch(p, size, emu::WRITE, __builtin_return_address(0));                                          \
    }                                                                                                          \
    extern "C" void __tsan_unaligned_read##size(void *p) {                                                     \
        emu::touch(p, size, emu::READ, __builtin_return_address(0), false);                                    \
    }                                                                                                          \
    extern "C" void __tsan_unaligned_write##size(void *p) {                                                    \
        emu::touch(p, size, emu::WRITE, __builtin_return_address(0), false);                                   \
    }
TOUCH(1)
TOUCH(2)
TOUCH(4)
TOUCH(8)
TOUCH(16)
extern "C" void __tsan_read_range(void *p, size_t size) {
    emu::touch(p, size, emu::READ, __builtin_return_address(0), false);
}
extern "C" void __tsan_write_range(void *p, size_t size) {
    emu::touch(p, size, emu::WRITE, __builtin_return_address(0), false);
}
// In pieces as large as an instruction's at most, so that each byte is asked whether it was written.
static void touch_all(const void *p, size_t size, emu::Access access, void *from) {
    for (const char *at = (const char *)p, *end = at + size; at < end;) {
        size_t n = std::min((size_t)(end - at), 16 - (uintptr_t)at % 16);
        emu::touch(at, n, access, from, false);
        at += n;
    }
}
extern "C" void *emu_memcpy(void *to, const void *from, size_t size) {
    touch_all(from, size, emu::READ, __builtin_return_address(0));
    touch_all(to, size, emu::WRITE, __builtin_return_address(0));
    return memmove(to, from, size);
}
extern "C" void *emu_memset(void *to, int byte, size_t size) {
    touch_all(to, size, emu::WRITE, __builtin_return_address(0));
    return memset(to, byte, size);
}
// Virtual tables and the once-only initialisation of local statics are the host's.
extern "C" void __tsan_vptr_update(void **, void *) {
}
extern "C" void __tsan_vptr_read(void **) {
}
extern "C" uint8_t __tsan_atomic8_load(const uint8_t *p, int) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
extern "C" void __tsan_func_entry(void *) {
}
extern "C" void __tsan_func_exit() {
}
extern "C" void __tsan_init() {
}
