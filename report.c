// What a run says of itself. A reader of the training program may skip this file.
#include "report.h"
#include "runtime/log.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// Floating-point operations a token, forward and backward, in PaLM's convention (Chowdhery et al. 2022, App. B): 6 a
// parameter, without the embedding's look-up tables and with the head once, and 12 · L · H·D · T for attention as if unmasked.
// HFU adds what recomputation does again: a forward of the blocks, or attention's two products.
typedef struct {
    double weights, attention, recomputed;
} TokenFlops;

static TokenFlops token_flops(const Model *m) {
    const Config *c = &m->config;
    double C = (double)c->hidden, attention = 12.0 * (double)c->layers * C * (double)c->seq, blocks = 0;
    for (int i = 1; i < m->n_buckets - 1; i++) blocks += (double)m->bucket[i].count;
    double tables = (double)c->positions * C * (c->arch == ARCH_GPT2) + (c->tie ? 0 : (double)c->vocab * C);
    TokenFlops f = {6 * ((double)m->parameters - tables), attention, 0};
    if (c->recompute == RECOMPUTE_FULL) f.recomputed = 2 * blocks + attention / 3;
    if (c->recompute == RECOMPUTE_SELECTIVE && c->attention == ATTENTION_NAIVE) f.recomputed = attention / 3;
    return f;
}

// The estimate most often quoted for a layer's activations (Korthikanti et al. 2022, eq. 1 and 2): 2-byte values, dropout
// masks kept. Ours is smaller in a bf16 build: no dropout, and flash attention
// keeps no matrix. (The first, as a rule of thumb, leaves out the embedding's output, s·b·h; the others count it.)
typedef struct {
    double flash, matrix, selective, full; // bytes of all layers
} ClassicActivations;

static ClassicActivations classic_activations(const Config *c) {
    double sbh = (double)c->seq * (double)c->micro_batch * (double)c->hidden, L = (double)c->layers;
    double scores = 5 * (double)c->heads * (double)c->seq / (double)c->hidden;
    return (ClassicActivations){.flash = 34 * sbh * L,
                                .matrix = (34 + scores) * sbh * L + sbh,
                                .selective = 34 * sbh * L + sbh,
                                .full = 2 * sbh * L + sbh};
}

static double sent_per_step(const Model *m) { // by a rank, the gradients' all-reduce
    double bytes = 0, N = (double)m->config.dp;
    for (int i = 0; i < m->n_buckets; i++)
        bytes +=
            2 * (double)m->bucket[i].count * (N - 1) / N * (m->config.grad_accum_fp32 ? 4 : sizeof(floatX));
    return bytes;
}

// measured: NULL in a dry run.
void report_memory(const Ledger *predicted, const Ledger *measured) {
    say("\nmemory of a rank, GB      predicted%s", measured ? "   measured" : "");
    for (int i = 0; i <= MEM_CATEGORIES; i++) {
        bool total = i == MEM_CATEGORIES;
        size_t p = total ? predicted->total_peak : predicted->peak[i];
        size_t r = measured ? (total ? measured->total_peak : measured->peak[i]) : 0;
        char seen[32] = "";
        if (measured) snprintf(seen, sizeof seen, "%11.6f", (double)r * 1e-9);
        say("  %-21s %11.6f%s", total ? "total" : mem_name[i], (double)p * 1e-9, seen);
    }
}

static cJSON *memory_json(const double *bytes) { // [MEM_CATEGORIES + 1], the last the peak of all together
    cJSON *o = cJSON_CreateObject();
    for (int i = 0; i < MEM_CATEGORIES; i++) cJSON_AddNumberToObject(o, mem_name[i], bytes[i]);
    cJSON_AddNumberToObject(o, "peak", bytes[MEM_CATEGORIES]);
    return o;
}

static void ledger_numbers(const Ledger *l, double *bytes) {
    for (int i = 0; i < MEM_CATEGORIES; i++) bytes[i] = (double)l->peak[i];
    bytes[MEM_CATEGORIES] = (double)l->total_peak;
}

void report_dry_run(const Model *m, const Ledger *predicted) {
    const Config *c = &m->config;
    double P = (double)m->parameters, GB = 1e-9, GiB = 1 / 0x1p30;
    TokenFlops f = token_flops(m);
    ClassicActivations a = classic_activations(c);
    double tokens = (double)c->global_batch * (double)c->seq;
    if (c->json) {
        double bytes[MEM_CATEGORIES + 1];
        ledger_numbers(predicted, bytes);
        cJSON *o = cJSON_CreateObject(), *classic = cJSON_AddObjectToObject(o, "classic_activations");
        cJSON_AddNumberToObject(o, "world", (double)c->dp);
        cJSON_AddNumberToObject(o, "params", P);
        cJSON_AddNumberToObject(o, "accum", (double)c->accum);
        cJSON_AddNumberToObject(o, "tokens_per_step", tokens);
        cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
        cJSON_AddNumberToObject(o, "checkpoint_bytes", 12 * P);
        cJSON_AddNumberToObject(o, "sent_per_step", sent_per_step(m));
        cJSON_AddNumberToObject(classic, "flash", a.flash);
        cJSON_AddNumberToObject(classic, "matrix", a.matrix);
        cJSON_AddNumberToObject(classic, "selective", a.selective);
        cJSON_AddNumberToObject(classic, "full", a.full);
        cJSON_AddItemToObject(o, "memory", memory_json(bytes));
        char *text = cJSON_Print(o);
        say("%s", text);
        cJSON_free(text);
        cJSON_Delete(o);
        return;
    }
    say("%s: %zu parameters (%.1f M); 16 bytes each: %.1f GB; checkpoint, 12 bytes each: %.1f GB",
        flag_choice(ARCHS, c->arch), m->parameters, P * 1e-6, 16 * P * GB, 12 * P * GB);
    say("%ld rank%s, %ld sequences of %ld tokens a micro-batch, accumulation %ld: %.0f tokens a step", c->dp,
        c->dp == 1 ? "" : "s", c->micro_batch, c->seq, c->accum, tokens);
    say("%.3g GFLOP a token (PaLM: 6 a parameter %.3g, attention %.3g), recomputed beside it %.3g",
        1e-9 * (f.weights + f.attention), 1e-9 * f.weights, 1e-9 * f.attention, 1e-9 * f.recomputed);
    say("%.3f GB sent by each rank a step: gradients, all-reduced", sent_per_step(m) * GB);
    report_memory(predicted, NULL);
    say("\nclassic estimate of activations (34 + 5as/h, 2-byte values with dropout)      GB       GiB");
    say("  no recomputation, flash attention (34)        %36.2f %9.4f", a.flash * GB, a.flash * GiB);
    say("  no recomputation, the T×T matrix kept         %36.2f %9.4f", a.matrix * GB, a.matrix * GiB);
    say("  selective                                     %36.2f %9.4f", a.selective * GB, a.selective * GiB);
    say("  full                                          %36.2f %9.4f", a.full * GB, a.full * GiB);
    say("  16 bytes a parameter + activations with flash %36.2f %9.4f", (16 * P + a.flash) * GB,
        (16 * P + a.flash) * GiB);
}

// The grid, who holds what, and the messages of a step.
void report_explain(const Model *m) {
    static const char *const split[] = {"whole", "rows", "columns", "rows by heads", "rows by key/value heads"};
    const Config *c = &m->config;
    say("grid: %ld rank%s = dp %ld", c->dp, c->dp == 1 ? "" : "s", c->dp);
    for (long r = 0; r < c->dp; r++)
        say("  rank %ld: holds every parameter; in micro-batch j, sequences %ld to %ld of each %ld", r,
            r * c->micro_batch, (r + 1) * c->micro_batch - 1, c->dp * c->micro_batch);
    say("\nbuckets and parameters (the last column: how tensor parallelism would cut it)");
    for (int i = 0; i < m->n_buckets; i++) {
        const Bucket *b = &m->bucket[i];
        say("  %s: %zu elements", b->name, b->count);
        if (i > 1 && i < m->n_buckets - 1) continue; // all blocks are alike
        for (const Param *p = m->param + b->first_param; p < m->param + b->first_param + b->n_params; p++)
            say("    %-32s %8zu × %-8zu %s", p->name, p->rows, p->cols, split[p->split]);
    }
    if (c->dp == 1) {
        say("\nno messages: one rank");
        return;
    }
    say("\nmessages of a step, after the last of %ld micro-batch%s, on the ring 0 -> 1%s -> 0", c->accum,
        c->accum == 1 ? "" : "es", c->dp > 2 ? " -> …" : "");
    for (int i = m->n_buckets - 1; i >= 0; i--) {
        double bytes = (double)m->bucket[i].count * (c->grad_accum_fp32 ? 4 : sizeof(floatX));
        say("  all-reduce of %-10s each rank sends its neighbour 2 · %ld pieces of %.0f bytes",
            m->bucket[i].name, c->dp - 1, bytes / (double)c->dp);
    }
    say("  all-reduce of 16 bytes for the loss, of 8 for the gradient's norm");
}

void report_start(const Model *m, const Ledger *predicted, int threads, double peak_flops) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    double bytes[MEM_CATEGORIES + 1];
    ledger_numbers(predicted, bytes);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "start");
    cJSON_AddNumberToObject(o, "world", m->grid.world->size);
    cJSON_AddNumberToObject(o, "dp", m->grid.dp->size);
    static const char *const groups[] = {"tp", "cp", "pp", "ep"}; // of one rank each, in this version
    for (int i = 0; i < 4; i++) cJSON_AddNumberToObject(o, groups[i], 1);
    cJSON_AddNumberToObject(o, "zero", 0);
    cJSON_AddNumberToObject(o, "params", (double)m->parameters);
    cJSON_AddNumberToObject(o, "active_params", (double)m->parameters);
    cJSON_AddNumberToObject(o, "tokens_per_step", (double)c->global_batch * (double)c->seq);
    cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
    cJSON_AddNumberToObject(o, "peak_flops", peak_flops);
    cJSON_AddItemToObject(o, "predicted", memory_json(bytes));
    log_event(o);
    say("%s, %s, %.2f M parameters, vocabulary %ld; %d rank%s of %d thread%s on %s; %.0f tokens a step, %.2f "
        "MFLOP "
        "each",
        flag_choice(ARCHS, c->arch), sizeof(floatX) == 2 ? "bf16" : "fp32", (double)m->parameters * 1e-6,
        c->vocab, m->grid.world->size, m->grid.world->size == 1 ? "" : "s", threads, threads == 1 ? "" : "s",
        device_name(), (double)c->global_batch * (double)c->seq, 1e-6 * (f.weights + f.attention));
}

void report_step(const Model *m, StepReport r, double peak_flops) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    double tokens_per_s = (double)c->global_batch * (double)c->seq / r.seconds;
    double mfu = tokens_per_s * (f.weights + f.attention) / peak_flops;
    long left = lround((double)(c->steps - r.step) * r.seconds);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "step");
    cJSON_AddNumberToObject(o, "step", (double)r.step);
    cJSON_AddNumberToObject(o, "loss", r.loss);
    cJSON_AddNumberToObject(o, "grad_norm", r.grad_norm);
    cJSON_AddNumberToObject(o, "lr", r.lr);
    cJSON_AddNumberToObject(o, "ms", 1e3 * r.seconds);
    cJSON_AddNumberToObject(o, "tokens_per_s", tokens_per_s);
    cJSON_AddNumberToObject(o, "mfu", mfu);
    cJSON_AddNumberToObject(o, "hfu", mfu * (1 + f.recomputed / (f.weights + f.attention)));
    log_event(o);
    status_line(r.step == c->steps,
                "step %ld/%ld  loss %.4f  norm %.2f  lr %.1e  %.1f ms  %.0f tok/s  MFU %.0f %%  %.2f GB  "
                "%ld:%02ld left",
                r.step, c->steps, r.loss, r.grad_norm, r.lr, 1e3 * r.seconds, tokens_per_s, 100 * mfu,
                (double)ledger.total_peak * 1e-9, left / 60, left % 60);
}

void report_validation(long step, double loss) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "val");
    cJSON_AddNumberToObject(o, "step", (double)step);
    cJSON_AddNumberToObject(o, "loss", loss);
    log_event(o);
    say("step %ld: validation loss %.4f", step, loss);
}

// The last event: memory and messages of every rank, gathered to all.
void report_end(const Model *m, const Ledger *predicted, double loss, double peak_before, double peak_after) {
    enum { COMMS = 8, NUMBERS = MEM_CATEGORIES + 1 + COMMS * COMM_OPS * 3 };
    Comm *world = m->grid.world, *comm[COMMS];
    int n_comms = comm_list(comm, COMMS), size = world->size;
    double *all = host_alloc((size_t)size * NUMBERS, sizeof(double)),
           *mine = all + (size_t)world->rank * NUMBERS;
    ledger_numbers(&ledger, mine);
    for (int i = 0; i < n_comms * COMM_OPS; i++) {
        CommCount count = comm[i / COMM_OPS]->count[i % COMM_OPS];
        double *x = mine + MEM_CATEGORIES + 1 + 3 * i;
        x[0] = (double)count.calls, x[1] = (double)count.bytes, x[2] = count.exposed_ms;
    }
    comm_wait(comm_all_gather(world, all, mine, (size_t)size * NUMBERS, DTYPE_F64));

    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "end");
    cJSON *memory = cJSON_AddArrayToObject(o, "memory"), *messages = cJSON_AddArrayToObject(o, "comm");
    for (int r = 0; r < size; r++) {
        const double *x = all + (size_t)r * NUMBERS;
        cJSON *row = memory_json(x);
        cJSON_AddNumberToObject(row, "rank", r);
        cJSON_AddItemToArray(memory, row);
        for (int i = 0; i < n_comms * COMM_OPS; i++) {
            const double *y = x + MEM_CATEGORIES + 1 + 3 * i;
            if (y[0] == 0) continue;
            row = cJSON_CreateObject();
            cJSON_AddNumberToObject(row, "rank", r);
            cJSON_AddStringToObject(row, "group", comm[i / COMM_OPS]->name);
            cJSON_AddStringToObject(row, "op", comm_op_name[i % COMM_OPS]);
            cJSON_AddNumberToObject(row, "calls", y[0]);
            cJSON_AddNumberToObject(row, "bytes", y[1]);
            cJSON_AddNumberToObject(row, "exposed_ms", y[2]);
            cJSON_AddItemToArray(messages, row);
        }
    }
    cJSON *flops = cJSON_AddObjectToObject(o, "flops"); // of rank 0
    cJSON_AddNumberToObject(flops, "gemm_forward", kernel_flops.gemm_forward);
    cJSON_AddNumberToObject(flops, "gemm_backward", kernel_flops.gemm_backward);
    cJSON_AddNumberToObject(flops, "attention_forward", kernel_flops.attention_forward);
    cJSON_AddNumberToObject(flops, "attention_backward", kernel_flops.attention_backward);
    cJSON_AddNumberToObject(o, "loss", loss);
    cJSON_AddNumberToObject(o, "peak_flops", peak_after);
    log_event(o);
    free(all);

    report_memory(predicted, &ledger);
    say("  %-21s %11.6f   by 34 + 5as/h, with 2-byte values", "(activations)",
        classic_activations(&m->config).matrix * 1e-9);
    size_t process = device_process_peak();
    if (process) say("  %-21s %22.6f", "the whole process", (double)process * 1e-9);
    if (m->config.peak_tflops < 0)
        say("\nMFU: PaLM's convention, against a 1024³ sgemm on all ranks: %.1f GFLOP/s before the run, %.1f "
            "after",
            peak_before * 1e-9, peak_after * 1e-9);
}
