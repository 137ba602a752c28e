// In which order things happen, and what is left out: a seed, and one site that is skipped.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <set>
#include <string>
#include "dev/emu/emu.h"

namespace emu {

uint32_t seed;

namespace {
uint32_t launches;
const char *kernel_name = "-"; // of the launch under way
uint64_t random_state;

// The sites that this launch has passed already: after the first time, one comparison a barrier or guard.
struct Passed {
    const char *file;
    int line;
    uint32_t launch;
    bool skip;
} passed[4096];
std::set<std::string> executed; // "kind file:line kernel"
std::string skip_site;

// Another launch, or a new start.
void forget_passed() {
    memset(passed, 0, sizeof passed);
}
} // namespace

void emu_set_seed(uint32_t s) {
    seed = s;
    launches = 0;
    forget_passed();
    begin_launch("-");
}

void begin_launch(const char *name) {
    kernel_name = name;
    random_state = (seed & 0xffff) * 0xd1342543de82ef95u + ++launches * 0xaf251af3b0f025b5u;
}
void end_launch() {
    kernel_name = "-";
}

uint32_t random_bits() { // splitmix64 (Steele et al. 2014)
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}
uint32_t random_order() {
    return seed & 0xffff ? random_bits() : 0;
}
Mood mood() {
    uint32_t s = seed & 0xffff;
    return !s ? NATURAL : s % 3 == 1 ? OTHERS_LATE : s % 3 == 2 ? OTHERS_EARLY : ANY_ORDER;
}

double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    double value = strtod(text, &end);
    if (*end || !(value >= 0)) fprintf(stderr, "%s=%s is not a number\n", name, text), exit(2);
    return value;
}
uint32_t setting(const char *name, uint32_t otherwise, uint32_t most) {
    double value = setting(name, (double)otherwise);
    if (value > most || value != (double)(uint32_t)value)
        fprintf(stderr, "%s=%s is no whole number up to %u\n", name, getenv(name), most), exit(2);
    return (uint32_t)value;
}

const char *short_name(const char *file) {
    return file[0] == '.' && file[1] == '/' ? file + 2 : file;
}

void emu_set_skip(const char *site) {
    skip_site = site ? site : "";
    forget_passed();
}

bool skipped(Site site, const char *kind) {
    Passed &p = passed[((uintptr_t)site.file * 31 + (unsigned)site.line) % 4096];
    if (p.file == site.file && p.line == site.line && p.launch == launches) return p.skip;
    std::string place = std::string(short_name(site.file)) + ":" + std::to_string(site.line);
    executed.insert(std::string(kind) + " " + place + " " + kernel_name);
    p = {site.file, site.line, launches, place == skip_site};
    return p.skip;
}

size_t emu_sites(char *text, size_t size, bool reset) {
    std::string all;
    for (const std::string &site : executed) all += site + "\n";
    if (size) snprintf(text, size, "%s", all.c_str());
    if (reset) executed.clear(), forget_passed();
    return all.size() + 1;
}

namespace {
struct Environment {
    Environment() {
        emu_set_seed(setting("EMU_SEED", 0, UINT32_MAX));
        emu_set_skip(getenv("EMU_SKIP"));
    }
} environment;
} // namespace

} // namespace emu
