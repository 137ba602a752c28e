// Who is missing when nothing moves.
//
//     rank 1: main thread --notes--> watchdog thread ---+
//     rank 2: main thread --notes--> watchdog thread ---+--- TCP, twice a second ---> watchdog thread of rank 0
//     rank 3: main thread --notes--> watchdog thread ---+
//
// A main thread that hangs cannot say so, but its thread here can: it is awake, makes no MPI calls, and reads the notes of
// the other one (comm_notes).
//
// Who waits for whom? Rank a for b, where b is in the group in which a waits and has not started the work that is under way
// there; or it has, is not through, and is busy elsewhere. In a pipeline a waits for b, b for c, and c may compute for
// long. So a rank that has waited too long is stuck only where nobody in its chain, of all for whom it waits in turn, has
// moved for as long; till then rank 0 tells it to be patient. Of those who are stuck rank 0 asks, in this order:
//
//     whose are missing?               a stopped process, a lost host
//     who is in the chain, and waits   a rank that computes, sleeps or reads for ever: the others wait for it, or for some
//     for nothing?                     that do
//     who does not fit to the others?  a collective left out, or two the wrong way round
//     who waits in a circle?           a message left out, or two awaited the wrong way round
//     who else waits for nothing?
//
// Who does not fit is found by comparing ranks in pairs. All run the same program, so of two ranks in the same groups one is
// further, or they are equally far. A pair *contradicts* itself where one rank has started more in one group and the other
// more in another, or where both have come to the same number with different works. Who is in most contradictions is out
// of order; with two ranks nobody can tell which, and both are named.
// The stages of a pipeline do not run the same: on channels, one end is ahead here and the other one there. Numbers of
// messages contradict nothing; but where each of two has come to a message for which the other one has not, they wait in a
// circle.
#include "watchdog.h"
#include "device.h"
#include "fail.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <math.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { ADDRESSES = 16, STRANGERS = 64, NAMED = 4, AGAIN = 5 }; // AGAIN: seconds between two calls
static const double grace = 1.5; // how much longer than the timeout the others wait for rank 0's verdict

// What a rank tells rank 0. All ranks run the same program, so that a struct is a message.
typedef struct {
    uint64_t token; // known to this job alone
    int rank;
    double quiet; // seconds in which nothing has moved;
    double still; // of these, seconds of waiting
    CommNotes notes;
} Report; // of which the notes of groups that are in use are sent

// Where rank 0 can be reached: all its addresses, because other hosts may not know its name.
typedef struct {
    uint64_t token;
    int n;
    struct sockaddr_storage address[ADDRESSES];
} Invitation;

typedef struct {
    int fd; // −1: free
    bool known;
    size_t have; // bytes of the report that have come
    Report report;
} Connection;

static Comm *world;            // NULL: no watchdog
static double timeout, period; // period: between two reports
static Invitation invitation;
static pthread_t thread;
static int wake[2], listener = -1; // a pipe that ends the thread when closed; rank 0's socket
static atomic_bool leaving;
static Report *latest; // rank 0's: [size]
static double *heard;  // [size] when each of them came

// ---- what a rank does -----------------------------------------------------------------------------------------------

// Seconds count only while this thread runs: a job that was stopped as a whole and goes on has not been stuck.
static Report look(void) {
    static double looked, moved, still, quiet;
    Report r = {.token = invitation.token, .rank = world->rank};
    comm_notes(&r.notes);
    double now = seconds_now();
    double passed = fmin(now - looked, 2 * period);
    bool stands = r.notes.moved == moved;
    r.quiet = quiet = stands ? quiet + passed : 0;
    r.still = still = stands && r.notes.waiting >= 0 ? still + passed : 0;
    looked = now, moved = r.notes.moved;
    return r;
}

static size_t report_bytes(int groups) {
    return offsetof(Report, notes.group) + (size_t)groups * sizeof(CommNote);
}

static bool send_report(int fd, const Report *r) {
    size_t bytes = report_bytes(r->notes.groups);
    return send(fd, r, bytes, 0) == (ssize_t)bytes;
}

enum { LINE = 1800 };
static void add(char line[LINE], const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(char line[LINE], const char *format, ...) {
    size_t length = strlen(line);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + length, LINE - length, format, arguments);
    va_end(arguments);
}

static void add_step(char *line, const CommNote *g, uint64_t number, CommStep step) {
    static const char *const type[] = {[DTYPE_F32] = "fp32",  [DTYPE_BF16] = "bf16", [DTYPE_F64] = "fp64",
                                       [DTYPE_I32] = "int32", [DTYPE_I64] = "int64", [DTYPE_U8] = "bytes"};
    add(line, "%s %llu of %s", comm_op_name[step.op], (unsigned long long)number, g->name);
    if (step.op != OP_BARRIER) add(line, " (%llu %s)", (unsigned long long)step.count, type[step.type]);
}

static void add_wait(char *line, const Report *r) {
    const CommNote *g = &r->notes.group[r->notes.waiting];
    add_step(line, g, g->done + 1, g->turn);
}

static void add_last(char *line, const Report *r) {
    const CommNote *g = &r->notes.group[r->notes.latest];
    if (g->started == 0) return add(line, "it has started nothing");
    add(line, "it last started ");
    add_step(line, g, g->started, g->last);
}

// ---- the verdict of rank 0 ------------------------------------------------------------------------------------------

// The same group among b's; NULL: b is not in it.
static const CommNote *same_group(const CommNote *g, const CommNotes *b) {
    for (const CommNote *h = b->group; h < b->group + b->groups && g->name[0]; h++)
        if (g->first == h->first && strcmp(g->name, h->name) == 0) return h;
    return NULL;
}

static bool contradicts(const CommNotes *a, const CommNotes *b) {
    bool less = false, more = false;
    for (const CommNote *g = a->group; g < a->group + a->groups; g++) {
        const CommNote *h = same_group(g, b);
        if (!h) continue;
        bool channel = g->last.op == OP_SEND || h->last.op == OP_SEND;
        if (g->started < h->started && !channel) less = true;
        if (g->started > h->started && !channel) more = true;
        bool both_there = g->done == h->done && g->started > g->done && h->started > h->done;
        if (both_there &&
            (g->turn.op != h->turn.op || g->turn.type != h->turn.type || g->turn.count != h->turn.count))
            return true;
    }
    return less && more;
}

// For what does rank a wait?
typedef enum { NOT, ITS_MESSAGES, ITS_COMING } Awaited; // of b
static Awaited awaited(const CommNotes *a, const CommNotes *b) {
    if (a == b || a->waiting < 0) return NOT;
    const CommNote *g = &a->group[a->waiting], *h = same_group(g, b);
    if (!h) return NOT;
    if (h->started <= g->done) return ITS_COMING;
    return h->done <= g->done && (b->waiting < 0 || &b->group[b->waiting] != h) ? ITS_MESSAGES : NOT;
}

// [size · size]: what rank a wants of b, at a · size + b.
static Awaited *all_awaited(void) {
    size_t n = (size_t)world->size;
    Awaited *wants = host_alloc(n * n, sizeof *wants);
    for (size_t a = 0; a < n; a++)
        for (size_t b = 0; b < n; b++) wants[a * n + b] = awaited(&latest[a].notes, &latest[b].notes);
    return wants;
}

// Adds to the ranks in `chain` all for which these wait, in turn.
static void follow(const Awaited *wants, bool *chain) {
    int n = world->size;
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < n * n; i++)
            if (wants[i] && chain[i / n] && !chain[i % n]) more = chain[i % n] = true;
    }
}

// Takes from the ranks in `circle` whoever does not wait for one that is left there, or is not awaited by one.
static void close_circle(const Awaited *wants, bool *circle) {
    int n = world->size;
    for (bool less = true; less;) {
        less = false;
        for (int r = 0; r < n; r++) {
            bool waits = false, is_awaited = false;
            for (int b = 0; b < n && circle[r]; b++) {
                waits |= circle[b] && wants[r * n + b] == ITS_COMING;
                is_awaited |= circle[b] && wants[b * n + r] == ITS_COMING;
            }
            if (circle[r] && !(waits && is_awaited)) circle[r] = false, less = true;
        }
    }
}

static bool is_unheard(int r, double now) {
    return now - heard[r] > fmin(3, timeout / 2); // several reports
}

// Marks those who have waited too long, and all for whom they wait, in turn. Is it for ever?
static bool stuck(double now, bool *chain) {
    bool any = false, all_quiet = true, lost = false;
    for (int r = 0; r < world->size; r++) any |= chain[r] = latest[r].still > timeout;
    if (!any) return false;
    Awaited *wants = all_awaited();
    follow(wants, chain);
    free(wants);
    for (int r = 0; r < world->size; r++) {
        lost |= is_unheard(r, now);
        if (chain[r]) all_quiet &= latest[r].quiet > timeout;
    }
    return lost || all_quiet;
}

typedef enum { UNHEARD, ABSENT, OUT_OF_ORDER, IN_A_CIRCLE, ELSEWHERE, VERDICTS } Verdict;

// Marks the ranks that this holds for, and counts them. chain: who is stuck, and all for whom these wait.
static int blame(Verdict v, double now, const bool *chain, const Awaited *wants, bool *blamed) {
    int most = 0, count = 0, *contradictions = host_alloc((size_t)world->size, sizeof *contradictions);
    for (int a = 0; a < world->size && v == OUT_OF_ORDER; a++) {
        for (int b = 0; b < world->size; b++)
            if (latest[a].notes.waiting >= 0 && latest[b].notes.waiting >= 0)
                contradictions[a] += contradicts(&latest[a].notes, &latest[b].notes);
        if (contradictions[a] > most) most = contradictions[a];
    }
    for (int r = 0; r < world->size; r++) {
        bool absent = latest[r].notes.waiting < 0;
        blamed[r] = v == UNHEARD        ? is_unheard(r, now)
                    : v == ABSENT       ? absent && chain[r]
                    : v == OUT_OF_ORDER ? most > 0 && contradictions[r] == most
                    : v == IN_A_CIRCLE  ? chain[r]
                                        : absent;
    }
    if (v == IN_A_CIRCLE) close_circle(wants, blamed);
    for (int r = 0; r < world->size; r++) count += blamed[r];
    free(contradictions);
    return count;
}

static void add_culprit(char *line, Verdict v, int r, double now, bool all, const Awaited *wants,
                        const bool *blamed) {
    add(line, "rank %d ", r);
    if (v == UNHEARD) {
        if (latest[r].token == 0) return add(line, "was never heard of (stopped, or it cannot reach rank 0)");
        add(line, "has not been heard of for %.1f s (stopped, or its host is gone); by its last report, ",
            now - heard[r]);
        add_last(line, &latest[r]);
    } else if (v == ABSENT || v == ELSEWHERE) {
        add(line, "has not come; ");
        add_last(line, &latest[r]);
    } else if (v == IN_A_CIRCLE) {
        int other = 0;
        while (!blamed[other] || wants[r * world->size + other] != ITS_COMING) other++;
        add(line, "waits for rank %d in ", other);
        add_wait(line, &latest[r]);
    } else {
        add(line, all ? "is out of step: it waits in " : "is out of order: it waits in ");
        add_wait(line, &latest[r]);
    }
}

static _Noreturn void judge(double now, const bool *chain) {
    char line[LINE] = "";
    int count = 0, named = 0, witness = -1; // of those who wait rightly, the one that has waited longest
    bool *blamed = host_alloc((size_t)world->size, sizeof *blamed);
    Awaited *wants = all_awaited();
    Verdict v = UNHEARD;
    while (v < VERDICTS && !(count = blame(v, now, chain, wants, blamed))) v++;
    for (int r = 0; r < world->size; r++)
        if (!blamed[r]) {
            if (latest[r].notes.waiting >= 0 && (witness < 0 || latest[r].still > latest[witness].still))
                witness = r;
        } else if (named < NAMED) {
            add(line, "%s", named++ ? "; " : "");
            add_culprit(line, v, r, now, count == world->size, wants, blamed);
        }
    if (count == 0) add(line, "all ranks have come, but no message arrives");
    if (count > named) add(line, "; and %d more", count - named);
    if (witness >= 0) {
        add(line, "; rank %d has waited %.1f s in ", witness, latest[witness].still);
        add_wait(line, &latest[witness]);
    }
    fail_all(EXIT_RUNTIME, "%s", line);
}

// ---- rank 0's side --------------------------------------------------------------------------------------------------

static void hang_up(Connection *c) {
    close(c->fd);
    *c = (Connection){.fd = -1};
}

// False where this process may open no more files.
static bool take_call(Connection *connection, int n) {
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) return errno != EMFILE && errno != ENFILE;
    for (Connection *c = connection; c < connection + n; c++)
        if (c->fd < 0) {
            c->fd = fd;
            return true;
        }
    close(fd);
    return true;
}

static void listen_to(Connection *c) {
    Report *r = &c->report;
    size_t head = report_bytes(0), all = c->have < head ? head : report_bytes(r->notes.groups);
    ssize_t n = recv(c->fd, (char *)r + c->have, all - c->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return hang_up(c);
    c->have += (size_t)n;
    if (c->have < head) return;
    if (r->token != invitation.token || r->rank <= 0 || r->rank >= world->size || r->notes.groups < 0 ||
        r->notes.groups > COMM_MOST)
        return hang_up(c);
    if (c->have < report_bytes(r->notes.groups)) return;
    c->have = 0;
    bool answer = !c->known || r->still > timeout; // "you are right here", "be patient"
    if (answer && send(c->fd, &r->token, sizeof r->token, 0) < 0) return hang_up(c);
    c->known = true;
    latest[r->rank] = *r;
    heard[r->rank] = seconds_now();
}

// Does anybody wait for ever?
static void consider(const Connection *connection, int n) {
    static double hold;
    double now = seconds_now();
    if (heard[0] < now - grace) hold = now + grace; // this process was stopped itself: first hear what is new
    heard[0] = now;
    latest[0] = look();
    if (now < hold) return;
    bool *chain = host_alloc((size_t)world->size, sizeof *chain);
    if (stuck(now, chain)) {
        comm_halt(); // here, and where this word comes
        const uint64_t verdict = ~invitation.token;
        for (int i = 0; i < n; i++)
            if (connection[i].fd >= 0) send(connection[i].fd, &verdict, sizeof verdict, MSG_DONTWAIT);
        usleep(100000);
        judge(now, chain);
    }
    free(chain);
}

static void *serve(void *unused) {
    int n = world->size + STRANGERS; // anybody may call
    Connection *connection = host_alloc((size_t)n, sizeof *connection);
    struct pollfd *call = host_alloc((size_t)n + 2, sizeof *call);
    for (int i = 0; i < n; i++) connection[i].fd = -1;
    bool full = false; // until the next look, callers wait
    for (double next = 0;;) {
        call[n] = (struct pollfd){.fd = wake[0], .events = POLLIN};
        call[n + 1] = (struct pollfd){.fd = full ? -1 : listener, .events = POLLIN};
        for (int i = 0; i < n; i++) call[i] = (struct pollfd){.fd = connection[i].fd, .events = POLLIN};
        poll(call, (nfds_t)n + 2, (int)(1e3 * fmax(0, next - seconds_now())) + 1);
        if (call[n].revents) break;
        for (int i = 0; i < n; i++)
            if (call[i].revents) listen_to(&connection[i]);
        if (call[n + 1].revents) full = !take_call(connection, n);
        if (seconds_now() < next) continue;
        consider(connection, n);
        full = false;
        next = seconds_now() + period;
    }
    for (int i = 0; i < n; i++)
        if (connection[i].fd >= 0) close(connection[i].fd);
    free(connection);
    free(call);
    return unused;
}

// ---- the other ranks' side ------------------------------------------------------------------------------------------

static socklen_t length_of(const struct sockaddr *a) {
    return a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

// A socket on which rank 0 has answered, or −1. What answers otherwise at such an address is another host's.
static int call_rank_0(void) {
    struct timeval patience = {.tv_sec = 3};
    for (int i = 0; i < invitation.n; i++) {
        const struct sockaddr *to = (const struct sockaddr *)&invitation.address[i];
        int fd = socket(to->sa_family, SOCK_STREAM, 0);
        if (fd < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience); // Linux: connect's as well
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        Report first = look();
        uint64_t answer;
        if (connect(fd, to, length_of(to)) == 0 && send_report(fd, &first) &&
            recv(fd, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer == invitation.token)
            return fd;
        close(fd);
    }
    return -1;
}

static void *report(void *unused) {
    int fd = call_rank_0();
    struct pollfd end = {.fd = wake[0], .events = POLLIN};
    if (fd < 0 && poll(&end, 1, 2000) == 0) fd = call_rank_0(); // not where rank 0 has just ended the job
    if (fd < 0 && !leaving)
        fprintf(
            stderr,
            "train: rank %d: cannot reach rank 0's watchdog at any of its %d addresses; training goes on, but "
            "if anything hangs, this rank will be named\n",
            world->rank, invitation.n);
    double patience = 0; // until when rank 0 has time to say more
    for (double again = seconds_now() + AGAIN;;) {
        struct pollfd any[] = {{.fd = wake[0], .events = POLLIN}, {.fd = fd, .events = POLLIN}};
        poll(any, 2, (int)(1e3 * period));
        if (any[0].revents) break;
        uint64_t word = 0;
        bool cut = fd >= 0 && any[1].revents && recv(fd, &word, sizeof word, MSG_DONTWAIT) <= 0;
        if (word == ~invitation.token) comm_halt(); // rank 0 has a verdict, and will say it
        if (word == invitation.token) {             // others move
            patience = seconds_now() + grace;
            continue;
        }
        Report r = look();
        if (fd >= 0 && (cut || !send_report(fd, &r))) {
            close(fd);
            fd = -1;
            again = seconds_now();
        }
        if (fd < 0 && !leaving && seconds_now() >= again) { // a line that is cut is laid anew
            fd = call_rank_0();
            again = seconds_now() + AGAIN;
        }
        if (r.still < timeout + (fd >= 0 ? grace : 6 * grace) || seconds_now() < patience) continue;
        comm_halt();
        usleep(600000); // longer than a period: the others have come to this, too
        char line[LINE] = "";
        add_wait(line, &r);
        fail(EXIT_RUNTIME,
             "rank 0 does not answer (stopped, or its host is gone); this rank has waited %.1f s in %s",
             r.still, line);
    }
    if (fd >= 0) close(fd);
    return unused;
}

// ---- start and end --------------------------------------------------------------------------------------------------

// On a port that the system chooses, for IPv6 and IPv4, or for IPv4 alone where there is no other.
static void invite(void) {
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    struct sockaddr_in any4 = {.sin_family = AF_INET};
    socklen_t length = sizeof any;
    bool bound = false;
    if ((listener = socket(AF_INET6, SOCK_STREAM, 0)) >= 0) {
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int));
        bound = bind(listener, (struct sockaddr *)&any, sizeof any) == 0;
        if (!bound) close(listener);
    }
    if (!bound && (listener = socket(AF_INET, SOCK_STREAM, 0)) >= 0)
        bound = bind(listener, (struct sockaddr *)&any4, sizeof any4) == 0;
    if (!bound || listen(listener, 1024) < 0 || getsockname(listener, (struct sockaddr *)&any, &length) < 0)
        fail(EXIT_RUNTIME, "the watchdog cannot listen for the other ranks: %s", strerror(errno));
    fcntl(listener, F_SETFL, O_NONBLOCK); // who has called may be gone at accept

    struct rlimit files; // a connection a rank
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }

    struct ifaddrs *all = NULL;
    getifaddrs(&all);
    const unsigned loopback[] = {IFF_LOOPBACK, 0}; // the nearest way first
    invitation.n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (struct ifaddrs *i = all; i && invitation.n < ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
            if ((i->ifa_flags & IFF_LOOPBACK) != loopback[pass]) continue;
            if (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) continue;
            struct sockaddr_storage *to = &invitation.address[invitation.n++];
            memcpy(to, i->ifa_addr, length_of(i->ifa_addr));
            ((struct sockaddr_in *)to)->sin_port = any.sin6_port; // both lie at the same place
        }
    freeifaddrs(all);
    if (getentropy(&invitation.token, sizeof invitation.token) < 0) invitation.token = (uint64_t)getpid();
}

void watchdog_start(Comm *all, double seconds) {
    if (all->size == 1) return;
    world = all, timeout = seconds, period = fmin(0.5, timeout / 6), leaving = false;
    if (world->rank == 0) {
        invite();
        latest = host_alloc((size_t)world->size, sizeof *latest);
        heard = host_alloc((size_t)world->size, sizeof *heard);
        for (int r = 0; r < world->size; r++) heard[r] = seconds_now(), latest[r].notes.waiting = -1;
    }
    comm_wait(comm_host_broadcast(world, &invitation, sizeof invitation, DTYPE_U8, 0));
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); // signals are the main thread's
    if (pipe(wake) < 0 || pthread_create(&thread, NULL, world->rank == 0 ? serve : report, NULL) != 0)
        fail(EXIT_RUNTIME, "the watchdog cannot start its thread: %s", strerror(errno));
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void watchdog_stop(void) {
    if (!world) return;
    leaving = true;
    comm_wait(comm_barrier(world)); // nobody waits for one that has gone
    close(wake[1]);
    pthread_join(thread, NULL);
    close(wake[0]);
    if (world->rank == 0) close(listener);
    free(latest);
    free(heard);
    world = NULL;
}
