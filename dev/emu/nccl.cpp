// NCCL for the program on the emulator: groups of devices, collectives and messages queued on streams, by messages of MPI.
//
// A call is a piece of work on its stream. When its turn comes it reads its input; then ranks exchange, while other streams
// and the host go on (each question of the program polls it once); at its end it writes its output. A send or a receive is one
// such message, and over at both ends at once: a ring of ranks that first send and then receive waits for ever, unless both are
// in one ncclGroupStart … ncclGroupEnd. Every collective is the same walk, of which it takes one half or both. For 3 ranks, each
// with an input of shards a b c:
//
//                  rank 0      rank 1      rank 2
//     reduce       a0+a1+a2    b0+b1+b2    c0+c1+c2       all-reduce, reduce-scatter; reduce: the root's shard is everything
//     gather       a b c       a b c       a b c          all-reduce, all-gather; broadcast: the root's shard is everything
//
// A shard is summed by one rank, from a rank and in a direction that follow the seed, in fp32 where it is bf16, rounded once;
// so all ranks have the same bits. Cost: (N-1)/N of the buffer sent a rank for each half, N-1 messages.
//
// Stricter than NCCL, each by name, at the first rank that sees it and then at all:
//
//     one order    A rank tells each peer of a call as soon as the host has made it. The k'th call between two ranks, over all
//                  communicators, must be the same call for both: operation, count, type, root, communicator; or the send
//                  of the one and the receive of the other. (Calls of one ncclGroupStart … ncclGroupEnd are told in the
//                  order of communicators, collectives before messages, and of these first what goes to the higher rank,
//                  for their own order does not matter.)
//     hands off    While a call is under way its output is 0xff, NaN: who reads it without waiting sees that. Who writes to
//                  its buffers meanwhile is found out at its end.
//
// A mistake is a device error (streams.cpp), so that whatever waits ends, and NCCL's asynchronous one.
//
// Messages go over MPI_COMM_WORLD, under tags of their own, from the host's memory. MPI's calls here are PMPI_: the program's
// MPI_Testall is caught, below, since a device goes on while its host waits for messages.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

enum { MOST_COMMS = 4096 }; // that a rank makes ids for

struct ncclComm {
    uint64_t key; // the maker of its id, times MOST_COMMS, and its number there
    int rank, device;
    std::vector<int> world; // its ranks' numbers in the world
    uint64_t issued, done;
    bool aborted;
    int size() const {
        return (int)world.size();
    }
    std::string name() const {
        std::string text =
            "communicator " + std::to_string(key / MOST_COMMS) + "." + std::to_string(key % MOST_COMMS);
        for (size_t r = 0; r < world.size(); r++)
            text += (r ? " " : " (world ranks ") + std::to_string(world[r]);
        return text + ")";
    }
};

namespace emu {
namespace {

enum {
    TAG_HELLO = 40001,
    TAG_RECORD,
    TAG_COMM = 50000,
    TAG_MESSAGE = 1 << 30
}; // the last two plus a communicator's key

enum Op { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECEIVE };
const char *const op_name[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast",
                               "reduce",     "send",           "receive"};
bool is_message(int op) {
    return op == SEND || op == RECEIVE;
}
const char *const redop_name[] = {"sum", "prod", "max", "min", "avg"};
struct Type {
    const char *name;
    size_t size; // 0: not here
} const types[ncclNumTypes] = {{"int8", 1},    {"uint8", 1},    {"int32", 4},      {"uint32", 4},
                               {"int64", 8},   {"uint64", 8},   {"float16", 0},    {"float32", 4},
                               {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 0}, {"float8e5m2", 0}};

// What a rank tells a peer of a call.
struct Record {
    uint64_t comm, sequence, count;
    int op, type, redop, root, rank; // root: of a message the other end
    char failure[600];               // instead: what has gone wrong there
};

std::map<uint64_t, ncclComm *> comms; // alive
std::string last_error = "no error";
ncclResult_t failure; // of all communicators

[[gnu::format(printf, 2, 3)]] ncclResult_t refuse_call(ncclResult_t code, const char *format, ...) {
    char text[900];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_error = text;
    return code;
}

// ---- one order for each pair of ranks ------------------------------------------------------------------------------
struct Peer {
    std::deque<Record> mine, theirs; // calls that the other one has not told of yet
    uint64_t issued, matched;        // of mine, in all
};
std::map<int, Peer> peers; // by rank in the world

struct Letter {
    Record record;
    MPI_Request request;
};
std::deque<Letter> outbox; // on their way

void tell(int world, const Record &record) {
    outbox.push_back({record, MPI_REQUEST_NULL}); // and stays in its place
    Letter &l = outbox.back();
    PMPI_Isend(&l.record, sizeof l.record, MPI_BYTE, world, TAG_RECORD, MPI_COMM_WORLD, &l.request);
}

// Everything of this rank's stops, and that of all whom it has met.
void break_down(ncclResult_t code, const std::string &text) {
    if (failure) return;
    failure = code, last_error = text;
    fail("NCCL: %s", text.c_str());
    Record record = {};
    snprintf(record.failure, sizeof record.failure, "%s", text.c_str());
    for (auto &[world, peer] : peers) tell(world, record);
}

std::string describe(const Record &r) {
    std::string text = std::string(op_name[r.op]) + " " + std::to_string(r.sequence) + " (" +
                       std::to_string(r.count) + " " + types[r.type].name;
    if (r.redop != ncclSum) text += std::string(" ") + redop_name[r.redop];
    if (r.op == BROADCAST || r.op == REDUCE) text += ", root " + std::to_string(r.root);
    if (is_message(r.op)) text += (r.op == SEND ? ", to " : ", from ") + std::to_string(r.root);
    return text + ")";
}

// Calls of two ranks in one communicator, which are one.
bool fit(const Record &a, const Record &b) {
    if (a.count != b.count || a.type != b.type) return false;
    if (is_message(a.op)) return is_message(b.op) && a.op != b.op; // not two that send, face to face
    return a.op == b.op && a.root == b.root && a.redop == b.redop;
}

void match(int world) {
    Peer &peer = peers[world];
    while (!peer.mine.empty() && !peer.theirs.empty() && !failure) {
        int here;
        PMPI_Comm_rank(MPI_COMM_WORLD, &here);
        const Record &a = here < world ? peer.mine.front() : peer.theirs.front(), // the lower rank's
            &b = here < world ? peer.theirs.front() : peer.mine.front();
        auto name = [](const Record &r) {
            return comms.count(r.comm) ? comms[r.comm]->name() : std::string("another communicator");
        };
        if (a.comm != b.comm)
            break_down(ncclInvalidUsage, "world ranks " + std::to_string(std::min(here, world)) + " and " +
                                             std::to_string(std::max(here, world)) +
                                             " make their calls in different orders: call " +
                                             std::to_string(peer.matched + 1) + " between them is " +
                                             describe(a) + " of " + name(a) + " for the one, " + describe(b) +
                                             " of " + name(b) + " for the other");
        else if (!fit(a, b))
            break_down(ncclInvalidUsage, "in " + name(a) + " rank " + std::to_string(b.rank) + " is in " +
                                             describe(b) + " where rank " + std::to_string(a.rank) + " is in " +
                                             describe(a));
        peer.mine.pop_front(), peer.theirs.pop_front();
        peer.matched++;
    }
}

// Takes what peers have told.
void listen() {
    int flag = 1;
    while (!outbox.empty() && flag) {
        PMPI_Test(&outbox.front().request, &flag, MPI_STATUS_IGNORE);
        if (flag) outbox.pop_front();
    }
    for (;;) {
        MPI_Status status;
        PMPI_Iprobe(MPI_ANY_SOURCE, TAG_RECORD, MPI_COMM_WORLD, &flag, &status);
        if (!flag) return;
        Record record;
        PMPI_Recv(&record, sizeof record, MPI_BYTE, status.MPI_SOURCE, TAG_RECORD, MPI_COMM_WORLD,
                  MPI_STATUS_IGNORE);
        if (record.failure[0]) {
            break_down(ncclRemoteError, record.failure);
        } else {
            peers[status.MPI_SOURCE].theirs.push_back(record);
            match(status.MPI_SOURCE);
        }
    }
}

// ---- sums ----------------------------------------------------------------------------------------------------------
template <typename T, typename Sum>
void fold(char *out, const std::vector<std::vector<char>> &parts, size_t n, int redop, int first, int step) {
    int ranks = (int)parts.size();
    for (size_t i = 0; i < n; i++) {
        Sum sum = 0;
        for (int k = 0, r = first; k < ranks; k++, r = (r + step + ranks) % ranks) {
            Sum x = ((const T *)parts[(size_t)r].data())[i];
            sum = k == 0              ? x
                  : redop == ncclProd ? (Sum)(sum * x)
                  : redop == ncclMax  ? (sum != sum || x > sum ? x : sum) // a NaN gives way, as in fmaxf
                  : redop == ncclMin  ? (sum != sum || x < sum ? x : sum)
                                      : (Sum)(sum + x);
        }
        ((T *)out)[i] = (T)(redop == ncclAvg ? (Sum)(sum / (Sum)ranks) : sum);
    }
}
decltype(&fold<float, float>) const folds[ncclNumTypes] = {fold<int8_t, int8_t>,
                                                           fold<uint8_t, uint8_t>,
                                                           fold<int32_t, int32_t>,
                                                           fold<uint32_t, uint32_t>,
                                                           fold<int64_t, int64_t>,
                                                           fold<uint64_t, uint64_t>,
                                                           NULL,
                                                           fold<float, float>,
                                                           fold<double, double>,
                                                           fold<__nv_bfloat16, float>};

// ---- one call ------------------------------------------------------------------------------------------------------
struct Call {
    ncclComm *comm;
    Record what;
    const char *send;
    char *receive;
    cudaStream_t stream;
    size_t send_bytes, receive_bytes;
    std::vector<uint64_t> turn;       // of each rank of the communicator: which call between it and this rank
    uint64_t send_hash, receive_hash; // of the buffers, as they were left
    std::vector<char> input, own, result;
    std::vector<std::vector<char>> parts;         // of all ranks, for the sum of this rank's shard
    std::vector<MPI_Request> reducing, gathering; // the latter for messages, too
    enum { WAITING, REDUCING, GATHERING } stage;

    size_t element() const {
        return types[what.type].size;
    }
    bool reduces() const {
        return what.op == ALL_REDUCE || what.op == REDUCE_SCATTER || what.op == REDUCE;
    }
    bool gathers() const {
        return what.op == ALL_REDUCE || what.op == ALL_GATHER || what.op == BROADCAST;
    }
    // Is it a call of this other rank, too?
    bool with(int rank) const {
        return rank != comm->rank && (!is_message(what.op) || rank == what.root);
    }
    bool is_root(int rank) const {
        return rank == what.root;
    }
    // In bytes: where rank's shard begins, and what it has.
    size_t begin(int rank) const {
        size_t n = (size_t)comm->size(), r = (size_t)rank, each = what.count / n, longer = what.count % n;
        return element() * (what.op == ALL_REDUCE                       ? r * each + std::min(r, longer)
                            : what.op == BROADCAST || what.op == REDUCE ? 0
                                                                        : r * what.count);
    }
    size_t bytes(int rank) const {
        size_t all = what.count * element();
        return what.op == ALL_REDUCE ? (rank + 1 < comm->size() ? begin(rank + 1) : all) - begin(rank)
               : what.op == BROADCAST || what.op == REDUCE ? (is_root(rank) ? all : 0)
                                                           : all;
    }
    std::string name() const {
        return describe(what) + " of " + comm->name();
    }
};

uint64_t hash(const void *p, size_t n) {
    uint64_t h = n, word;
    const char *at = (const char *)p;
    for (; n >= 8; at += 8, n -= 8) memcpy(&word, at, 8), h = (h ^ word) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    for (; n; at++, n--) h = (h ^ (unsigned char)*at) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return h;
}

void begin(Call *c) {
    c->input.assign(c->send, c->send + c->send_bytes);
    bool keeps = c->what.op == BROADCAST && c->send == c->receive;
    for (size_t i = 0; i < c->receive_bytes && !keeps;) { // all but what is the input, too
        if (c->what.op == ALL_GATHER && c->receive + i == c->send && c->send_bytes) {
            i += c->send_bytes;
            continue;
        }
        size_t end =
            c->what.op == ALL_GATHER && c->send > c->receive + i && c->send < c->receive + c->receive_bytes
                ? (size_t)(c->send - c->receive)
                : c->receive_bytes;
        memset(c->receive + i, 0xff, end - i);
        i = end;
    }
    c->send_hash = hash(c->send, c->send_bytes);
    c->receive_hash = hash(c->receive, c->receive_bytes);
}

const size_t MOST_BYTES = (size_t)1 << 30; // of a message: counts are int
void post(bool sends, char *at, size_t n, int rank, const ncclComm *comm, std::vector<MPI_Request> &requests,
          int tags = TAG_COMM) {
    int tag = tags + (int)comm->key, world = comm->world[(size_t)rank];
    for (size_t i = 0; i < n; i += MOST_BYTES) {
        int bytes = (int)std::min(MOST_BYTES, n - i);
        requests.push_back(MPI_REQUEST_NULL);
        if (sends && tags == TAG_MESSAGE)
            PMPI_Issend(at + i, bytes, MPI_BYTE, world, tag, MPI_COMM_WORLD, &requests.back());
        else if (sends)
            PMPI_Isend(at + i, bytes, MPI_BYTE, world, tag, MPI_COMM_WORLD, &requests.back());
        else
            PMPI_Irecv(at + i, bytes, MPI_BYTE, world, tag, MPI_COMM_WORLD, &requests.back());
    }
}

bool arrived(std::vector<MPI_Request> &requests) {
    int all = 1;
    if (!requests.empty()) PMPI_Testall((int)requests.size(), requests.data(), &all, MPI_STATUSES_IGNORE);
    return all;
}

// All peers have told of this call: what it sends and receives is certain.
void start(Call *c) {
    const ncclComm *comm = c->comm;
    int me = comm->rank, n = comm->size();
    if (is_message(c->what.op)) {
        bool sends = c->what.op == SEND;
        c->result.resize(c->receive_bytes);
        std::vector<char> &all = sends ? c->input : c->result;
        post(sends, all.data(), all.size(), c->what.root, comm, c->gathering, TAG_MESSAGE);
        c->stage = Call::GATHERING;
        return;
    }
    c->stage = Call::REDUCING;
    size_t mine = c->bytes(me);
    if (c->reduces()) {
        c->parts.resize((size_t)n);
        for (int r = 0; r < n; r++) {
            c->parts[(size_t)r].resize(mine);
            if (r == me) {
                if (mine) memcpy(c->parts[(size_t)r].data(), c->input.data() + c->begin(me), mine);
                continue;
            }
            post(true, c->input.data() + c->begin(r), c->bytes(r), r, comm, c->reducing);
            post(false, c->parts[(size_t)r].data(), mine, r, comm, c->reducing);
        }
    }
    if (c->gathers()) {
        c->result.resize(c->receive_bytes);
        for (int r = 0; r < n; r++)
            if (r != me) post(false, c->result.data() + c->begin(r), c->bytes(r), r, comm, c->gathering);
    }
}

void sum(Call *c) {
    const ncclComm *comm = c->comm;
    int n = comm->size(), me = comm->rank;
    if (c->reduces()) {
        uint32_t random = ((seed & 0xffff) * 0x9e3779b9u) ^ (uint32_t)c->what.sequence * 0x85ebca6bu;
        random = seed & 0xffff ? (random ^ random >> 15) * 0x2c1b3c6du : 0;
        c->own.resize(c->bytes(me));
        folds[c->what.type](c->own.data(), c->parts, c->own.size() / c->element(), c->what.redop,
                            (int)(random >> 8) % n, random & 1 ? -1 : 1);
    } else if (c->bytes(me)) {
        c->own = c->input;
    }
    if (!c->gathers()) {
        c->result = c->own;
        return;
    }
    if (!c->own.empty()) memcpy(c->result.data() + c->begin(me), c->own.data(), c->own.size());
    for (int r = 0; r < n; r++)
        if (r != me) post(true, c->own.data(), c->own.size(), r, comm, c->gathering);
}

// Takes it as far as it goes; true: all has come.
bool exchange(Call *c) {
    if (c->stage == Call::WAITING) {
        for (int r = 0; r < c->comm->size(); r++)
            if (c->with(r) && peers[c->comm->world[(size_t)r]].matched < c->turn[(size_t)r]) return false;
        start(c);
    }
    if (c->stage == Call::REDUCING) {
        if (!arrived(c->reducing)) return false;
        sum(c);
        c->stage = Call::GATHERING;
    }
    return arrived(c->gathering);
}

void end(Call *c) {
    bool input = hash(c->send, c->send_bytes) == c->send_hash,
         output = hash(c->receive, c->receive_bytes) == c->receive_hash;
    if (!input || !output)
        break_down(ncclInvalidUsage, c->name() + ": its " + (input ? "output" : "input") +
                                         " was written while it was under way: is a wait or an event missing?");
    if (c->receive_bytes) memcpy(c->receive, c->result.data(), c->receive_bytes);
    watch_host_write(c->receive, c->receive_bytes);
    c->comm->done = c->what.sequence;
}

// ---- a piece of work: the calls of one group on one stream ---------------------------------------------------------
struct Together {
    std::vector<Call *> calls;
    bool begun;
};

bool go_on(void *context) {
    Together *t = (Together *)context;
    for (Call *aborted : t->calls) {
        if (!aborted->comm->aborted) continue;
        for (Call *c : t->calls) { // messages may still come: their memory stays
            for (auto *requests : {&c->reducing, &c->gathering})
                for (MPI_Request &r : *requests)
                    if (r != MPI_REQUEST_NULL) PMPI_Cancel(&r), PMPI_Request_free(&r);
            c->comm->done = std::max(c->comm->done, c->what.sequence);
        }
        return true;
    }
    listen();
    if (failure) return false;
    if (!t->begun) {
        std::map<ncclComm *, uint64_t> done; // calls of a communicator go one after another, on whatever stream
        for (Call *c : t->calls) {
            uint64_t &before = done.emplace(c->comm, c->comm->done).first->second;
            if (++before != c->what.sequence) return false;
        }
        for (Call *c : t->calls) begin(c);
        t->begun = true;
    }
    bool all = true, next = true; // collectives take turns, messages do not
    for (Call *c : t->calls) {
        bool through = (next || is_message(c->what.op)) && exchange(c);
        if (!is_message(c->what.op)) next &= through;
        all &= through;
    }
    if (!all) return false;
    for (Call *c : t->calls) {
        if (!failure) end(c);
        delete c;
    }
    delete t;
    return true;
}

int group_depth;
std::vector<Call *> group;

void issue() {
    std::vector<Call *> calls;
    calls.swap(group);
    auto place = [](const Call *c) {
        bool up = (c->what.op == SEND) == (c->what.root > c->comm->rank);
        return std::make_pair(c->comm->key, !is_message(c->what.op) ? 0 : up ? 1 : 2);
    };
    std::stable_sort(calls.begin(), calls.end(),
                     [place](const Call *a, const Call *b) { return place(a) < place(b); });
    std::vector<std::pair<cudaStream_t, Together *>> works;
    for (Call *c : calls) {
        c->what.sequence = ++c->comm->issued;
        for (int r = 0; r < c->comm->size(); r++) {
            Peer *peer = c->with(r) ? &peers[c->comm->world[(size_t)r]] : NULL;
            c->turn.push_back(peer ? ++peer->issued : 0);
            if (!peer) continue;
            peer->mine.push_back(c->what);
            tell(c->comm->world[(size_t)r], c->what);
        }
        auto work = std::find_if(works.begin(), works.end(), [c](auto &w) { return w.first == c->stream; });
        if (work == works.end()) work = works.insert(works.end(), {c->stream, new Together()});
        work->second->calls.push_back(c);
    }
    for (auto &[stream, together] : works) enqueue_long(stream, go_on, together);
    for (auto &[world, peer] : peers) match(world);
    listen();
}

bool alive(const ncclComm *comm) {
    return std::any_of(comms.begin(), comms.end(), [comm](auto &c) { return c.second == comm; });
}

ncclResult_t call(Op op, const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t redop,
                  int root, ncclComm_t comm, cudaStream_t stream) {
    if (failure) return failure;
    if (failed()) return refuse_call(ncclUnhandledCudaError, "%s", cudaGetErrorString(status()));
    if (!alive(comm)) return refuse_call(ncclInvalidArgument, "%s: no communicator", op_name[op]);
    int n = comm->size(), me = comm->rank;
    if ((unsigned)type >= ncclNumTypes || !types[type].size)
        return refuse_call(ncclInvalidArgument, "%s: type %d is not in the emulator", op_name[op], (int)type);
    if ((unsigned)redop >= ncclNumOps)
        return refuse_call(ncclInvalidArgument, "%s: operation %d is not in the emulator", op_name[op],
                           (int)redop);
    if (root < 0 || root >= n)
        return refuse_call(ncclInvalidArgument, "%s: %s %d of %d ranks", op_name[op],
                           is_message(op) ? "peer" : "root", root, n);
    if (is_message(op) && root == me)
        return refuse_call(ncclInvalidUsage, "%s: rank %d to itself is not in the emulator", op_name[op], me);
    size_t bytes = count * types[type].size, all = bytes * (size_t)n, at = (size_t)me * bytes;
    Call c = {};
    c.comm = comm, c.stream = stream, c.send = (const char *)send, c.receive = (char *)receive;
    c.what = {comm->key, 0, count, op, type, redop, root, me, ""};
    c.send_bytes = op == REDUCE_SCATTER ? all : op == RECEIVE || (op == BROADCAST && me != root) ? 0 : bytes;
    c.receive_bytes = op == ALL_GATHER ? all : op == SEND || (op == REDUCE && me != root) ? 0 : bytes;
    for (bool sends : {true, false}) {
        const void *p = sends ? send : receive;
        size_t size = sends ? c.send_bytes : c.receive_bytes;
        if (size && !on_device(p, size))
            return refuse_call(ncclInvalidArgument,
                               "%s: %s buffer of %zu bytes at %p is not in the device's memory", op_name[op],
                               sends ? "send" : "receive", size, p);
    }
    bool in_place = op == ALL_GATHER       ? c.send == c.receive + at
                    : op == REDUCE_SCATTER ? c.receive == c.send + at
                                           : c.send == c.receive;
    if (!in_place && c.send_bytes && c.receive_bytes && c.send < c.receive + c.receive_bytes &&
        c.receive < c.send + c.send_bytes)
        return refuse_call(ncclInvalidArgument, "%s: buffers overlap, and not in place", op_name[op]);
    group.push_back(new Call(c));
    if (!group_depth) issue();
    return failure;
}

// ---- how ranks find each other -------------------------------------------------------------------------------------
// The maker of the id hears who takes part, and tells all.
struct Id {
    char word[16];
    int maker, number;
};
const char WORD[16] = "emulated NCCL";
struct Hello {
    uint64_t key;
    int size, rank, device;
    char host[64];
};
std::deque<std::pair<int, Hello>> hellos; // to this rank, by rank in the world: those of other ids stay

// To the device, while this waits for others.
void wait_a_moment() {
    if (!turn()) idle();
}

// The answer to all: a word of complaint, or nothing; then their ranks in the world.
std::string gather_ranks(const Hello &mine, int world, std::vector<int> &table) {
    std::vector<Hello> all((size_t)mine.size);
    std::string complaint;
    table.assign((size_t)mine.size, -1);
    auto take = [&](int from, const Hello &h) {
        char text[200] = "";
        if (h.size != mine.size || h.rank < 0 || h.rank >= mine.size)
            snprintf(text, sizeof text, "rank %d of %d, where rank %d is of %d", h.rank, h.size, mine.rank,
                     mine.size);
        else if (table[(size_t)h.rank] >= 0)
            snprintf(text, sizeof text, "world ranks %d and %d are both rank %d", table[(size_t)h.rank], from,
                     h.rank);
        else
            table[(size_t)h.rank] = from, all[(size_t)h.rank] = h;
        if (text[0]) complaint = text;
    };
    take(world, mine);
    std::vector<int> answer_to;
    while ((int)answer_to.size() < mine.size - 1) {
        for (size_t i = 0; i < hellos.size(); i++) {
            if (hellos[i].second.key != mine.key) continue;
            take(hellos[i].first, hellos[i].second);
            answer_to.push_back(hellos[i].first);
            hellos.erase(hellos.begin() + (ptrdiff_t)i--);
        }
        int flag;
        MPI_Status status;
        PMPI_Iprobe(MPI_ANY_SOURCE, TAG_HELLO, MPI_COMM_WORLD, &flag, &status);
        if (flag) {
            hellos.push_back({status.MPI_SOURCE, {}});
            PMPI_Recv(&hellos.back().second, sizeof(Hello), MPI_BYTE, status.MPI_SOURCE, TAG_HELLO,
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else if ((int)answer_to.size() < mine.size - 1)
            wait_a_moment();
    }
    for (size_t i = 0; i < all.size() && complaint.empty(); i++)
        for (size_t j = 0; j < i && complaint.empty(); j++)
            if (all[i].device == all[j].device && !strcmp(all[i].host, all[j].host))
                complaint = "Duplicate GPU detected : rank " + std::to_string(i) + " and rank " +
                            std::to_string(j) + " both on CUDA device " + std::to_string(all[i].device);
    char text[200];
    snprintf(text, sizeof text, "%s", complaint.c_str());
    for (int to : answer_to) {
        PMPI_Send(text, sizeof text, MPI_CHAR, to, TAG_COMM + (int)mine.key, MPI_COMM_WORLD);
        PMPI_Send(table.data(), mine.size, MPI_INT, to, TAG_COMM + (int)mine.key, MPI_COMM_WORLD);
    }
    return complaint;
}

std::string ask_maker(const Hello &mine, int maker, std::vector<int> &table) {
    char text[200];
    table.resize((size_t)mine.size);
    int tag = TAG_COMM + (int)mine.key, done = 0;
    MPI_Request request;
    PMPI_Send(&mine, sizeof mine, MPI_BYTE, maker, TAG_HELLO, MPI_COMM_WORLD);
    PMPI_Irecv(text, sizeof text, MPI_CHAR, maker, tag, MPI_COMM_WORLD, &request);
    while (PMPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) wait_a_moment();
    PMPI_Recv(table.data(), mine.size, MPI_INT, maker, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return text;
}

} // namespace
} // namespace emu

using namespace emu;

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const names[ncclNumResults] = {"no error",
                                                      "unhandled cuda error",
                                                      "unhandled system error",
                                                      "internal error",
                                                      "invalid argument",
                                                      "invalid usage",
                                                      "remote process exited or there was a network error",
                                                      "NCCL operation in progress"};
    return (unsigned)result < ncclNumResults ? names[result] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) {
    return emu::last_error.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int number;
    int started;
    Id made = {};
    PMPI_Initialized(&started);
    if (!started) return refuse_call(ncclInvalidUsage, "ncclGetUniqueId before MPI_Init");
    if (number == MOST_COMMS) return refuse_call(ncclInternalError, "a rank makes %d ids at most", MOST_COMMS);
    memcpy(made.word, WORD, sizeof WORD);
    PMPI_Comm_rank(MPI_COMM_WORLD, &made.maker);
    made.number = number++;
    *id = {};
    memcpy(id->internal, &made, sizeof made);
    return ncclSuccess;
}

enum { COMMUNICATOR = 4000000 }; // bytes of device memory

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    Id from;
    memcpy(&from, id.internal, sizeof from);
    *comm = NULL;
    if (failure) return failure;
    if (memcmp(from.word, WORD, sizeof WORD) || size < 1 || rank < 0 || rank >= size)
        return refuse_call(ncclInvalidArgument,
                           "ncclCommInitRank: rank %d of %d, or an id that nobody has made", rank, size);
    if (!library_takes(COMMUNICATOR))
        return refuse_call(ncclUnhandledCudaError, "Cuda failure 'out of memory'");
    Hello mine = {(uint64_t)from.maker * MOST_COMMS + (uint64_t)from.number, size, rank, 0, ""};
    cudaGetDevice(&mine.device);
    gethostname(mine.host, sizeof mine.host - 1);
    int world;
    PMPI_Comm_rank(MPI_COMM_WORLD, &world);
    std::vector<int> table;
    std::string complaint =
        world == from.maker ? gather_ranks(mine, world, table) : ask_maker(mine, from.maker, table);
    if (!complaint.empty()) return refuse_call(ncclInvalidUsage, "%s", complaint.c_str());
    *comm = comms[mine.key] = new ncclComm{mine.key, rank, mine.device, table, 0, 0, false};
    for (int w : table)
        if (w != world) peers[w];
    return ncclSuccess;
}

// Waits for its work, here as there.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!alive(comm)) return refuse_call(ncclInvalidArgument, "ncclCommDestroy: no communicator");
    while (comm->done < comm->issued && !failed()) wait_a_moment();
    comms.erase(comm->key);
    library_takes(-COMMUNICATOR);
    if (!failed()) delete comm;
    return failure;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!alive(comm)) return refuse_call(ncclInvalidArgument, "ncclCommAbort: no communicator");
    comms.erase(comm->key);
    library_takes(-COMMUNICATOR);
    comm->aborted = true; // its works end in their turns
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (!alive(comm)) return refuse_call(ncclInvalidArgument, "ncclCommGetAsyncError: no communicator");
    listen();
    *error = failure;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size();
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    *device = comm->device;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return call(ALL_REDUCE, send, receive, count, type, op, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return call(REDUCE_SCATTER, send, receive, count, type, op, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return call(ALL_GATHER, send, receive, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return call(BROADCAST, send, receive, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    return call(REDUCE, send, receive, count, type, op, root, comm, stream);
}
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return call(SEND, send, NULL, count, type, ncclSum, peer, comm, stream);
}
ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return call(RECEIVE, NULL, receive, count, type, ncclSum, peer, comm, stream);
}
ncclResult_t ncclGroupStart() {
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (group_depth == 0) return refuse_call(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group_depth == 0) issue();
    return failure;
}

// ---- the host waits for messages -----------------------------------------------------------------------------------
extern "C" int MPI_Testall(int n, MPI_Request requests[], int *all, MPI_Status statuses[]) {
    int error = PMPI_Testall(n, requests, all, statuses);
    if (!*all) host_polls();
    return error;
}
