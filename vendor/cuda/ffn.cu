// ffn.cu - te_marks_args and te_ffn_args: which neurons are wanted, and the feed-forward over them.
#include "../core/te_layout.h"
#include "ffn.cuh"
#include "launch.h"

namespace te {

constexpr int SIGN_THREADS = 256;

// A block has a part of the rows (te_marks_args), of one token, a warp a row; without publish, a word of bits.
__global__ void __launch_bounds__(SIGN_THREADS)
    sign_kernel(const te_scores a, int n, uint64_t *publish, const te_ticket ticket, uint32_t *bits) {
    extern __shared__ uint64_t signs[];
    __shared__ uint32_t on[SIGN_THREADS / 32];
    dep_go();
    dep_wait();
    const int t = blockIdx.y, b = blockIdx.x, nb = gridDim.x, warp = threadIdx.x / 32, n_signs = (a.cols + 63) / 64;
    pack_signs(a.h + t * a.ldh, a.cols, signs);
    const float threshold = __ldcg(a.threshold);
    const int words = publish ? ((n + nb - 1) / nb + 31) / 32 : 1;
    const int lo = publish ? (int)((int64_t)n * b / nb) : 32 * b,
              hi = publish ? (int)((int64_t)n * (b + 1) / nb) : min(n, lo + 32);
    const uint32_t number = publish ? ticket_number(ticket) : 0;
    for (int w = 0; w < words; w++) {
        __syncthreads();
        uint32_t mine = 0; // rows warp, warp + 8 ... of this word
        for (int i = warp; i < 32 && lo + 32 * w + i < hi; i += SIGN_THREADS / 32)
            mine |= (uint32_t)signs_agree(a.sign + (size_t)(lo + 32 * w + i) * n_signs, signs, a.cols, threshold) << i;
        if (threadIdx.x % 32 == 0) on[warp] = mine;
        __syncthreads();
        if (threadIdx.x) continue;
        for (int k = 1; k < SIGN_THREADS / 32; k++) mine |= on[k];
        if (publish)
            store_word(publish + ((size_t)t * nb + b) * words + w, mine, number);
        else
            bits[(size_t)t * nb + b] = mine;
    }
}

static te_status check_signs(te_cuda *d, const char *op, const te_scores *s) {
    if (s->cols < 1 || !s->h || !s->threshold || !aligned(s->sign, 8) || s->cols > 1 << 18)
        return refuse(d,
                      te_fail(TE_ARGUMENT, "%s: signs of %d columns at %p", op, (int)s->cols, (const void *)s->sign));
    return TE_OK;
}
static te_status run_signs(te_cuda *d, const te_scores *s, int n, int n_tok, uint64_t *publish, te_ticket ticket,
                           uint32_t *bits) {
    const int blocks = publish ? mark_parts(d) : divide_up(n, 32);
    return launch(d, "signs", sign_kernel, dim3((unsigned)blocks, (unsigned)n_tok), SIGN_THREADS,
                  (size_t)(s->cols + 63) / 64 * 8, *s, n, publish, ticket, bits);
}

te_status marks(te_cuda *d, const te_marks_args *op) {
    const te_scores *s = &op->scores;
    if (op->n_rows < 1 || op->n_tok < 1 || op->n_tok > TE_CUDA_MAX_TOK || !op->publish || !op->ticket.base)
        return refuse(d, te_fail(TE_ARGUMENT, "marks: of %d rows and %d tokens", (int)op->n_rows, (int)op->n_tok));
    if (s->fc2.w && s->threshold) return post_scores(d, op);
    if (!s->sign) return refuse(d, te_fail(TE_ARGUMENT, "marks: no scores"));
    TE_CUDA_TRY(check_signs(d, "marks", s));
    return run_signs(d, s, op->n_rows, op->n_tok, op->publish, op->ticket, nullptr);
}

static const ffn_kernels *ffn_kernels_of(int type, bool file) {
    const ffn_kernels *k = file ? ffn_file(type) : nullptr;
    for (auto *of : {ffn_float, ffn_32, ffn_bits, ffn_table, ffn_k, ffn_k23})
        if (!k) k = of(type);
    return k;
}

// The columns of a tile, and the tasks of a row in it.
static void set_tile(rows_args *a, int task, size_t most_bytes, size_t per_column) {
    const int all = divide_up(a->cols, task);
    int most = (int)(most_bytes / per_column) / task;
    if (most < 1) most = 1;
    const int n = divide_up(all, divide_up(all, most));
    a->tile = n * task;
    a->parts = n;
}

static int neurons(const te_ffn_args *op) { return op->list ? op->n_list : op->up.n_rows; }

static te_cuda_hidden hidden_of(const te_ffn_args *op) {
    te_cuda_hidden a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.n_tok = op->n_tok;
    a.norm = op->norm;
    a.prepared = op->prepared;
    a.gate = op->gate;
    a.up = op->up;
    a.up_bias = op->up_bias;
    a.act = (te_activation)op->act;
    a.threshold = op->threshold;
    a.curve = op->curve;
    a.mode = op->skip ? TE_CUDA_SKIP : TE_CUDA_DENSE;
    a.gate_add = op->gate_add;
    a.up_add = op->up_add;
    a.ld_add = op->ld_add;
    a.h = op->h;
    a.ldh = op->ldh;
    a.fired = op->fired;
    a.counts = op->counts;
    return a;
}

// How one kernel does it; false if it cannot: then there is one kernel for each step.
struct ffn_plan {
    ffn_args a;
    ffn_function kernel;
    int grid;
    unsigned cluster;
    size_t smem;
};
static bool make_plan(te_cuda *d, const te_ffn_args *op, ffn_plan *p) {
    const te_scores *s = &op->scores;
    const ffn_kernels *k = ffn_kernels_of(op->up.type, op->zero_copy != 0);
    const int n = neurons(op);
    if (!k || !op->down.w || op->down.type != op->up.type) return false;
    if (op->gate_add || op->up_add || op->store_h) return false;
    if (op->n_tok < 1 || op->n_tok > TE_CUDA_MAX_TOK || n < 1) return false;
    if (!k->kernel[op->n_tok > 1]) return false;
    if (!s->fc2.w && !s->sign && !op->skip && !op->list) return false; // all rows: two kernels read them faster
    // Of many tokens most neurons are wanted by some: single steps deal these out evenly, and leave fewer parts of the sum.
    if (op->n_tok > 4 && (s->fc2.w || s->sign) && !op->list && !op->beside) return false;
    const bool own_scores = s->fc2.w && s->fc2.type == k->score_type;
    *p = {};
    ffn_args *a = &p->a;
    const bool several = op->n_tok > 1, batch = several && k->batch.column_bytes,
               score_batch = several && k->score_batch.column_bytes;
    const int tokens = several ? BATCH_TOKENS : 1;
    p->kernel = k->kernel[several];
    const te_cuda_hidden hidden = hidden_of(op);
    a->k = hidden_args(&hidden);
    a->k.n = n;
    // A predictor is mostly right: gate and up of its neurons are read at once, which saves a wait for memory.
    if (own_scores && a->k.gated && !op->zero_copy) a->k.skip = false;
    a->score = own_scores ? SCORE_ROWS : s->fc2.w ? SCORE_BITS : s->sign ? SCORE_SIGNS : SCORE_NONE;
    a->bits = op->bits;
    a->ld_bits = divide_up(n, 32);
    a->list = op->list;
    a->file = op->zero_copy != 0;
    a->first = op->first != 0;
    a->beside = op->beside != 0 && a->score != SCORE_BITS;
    a->sign = s->sign;
    a->sign_h = s->h;
    a->sign_ldh = s->ldh;
    a->threshold = s->threshold;
    a->down = (const uint8_t *)op->down.w;
    a->down_stride = op->down.stride;
    a->partial = op->partial;
    a->cols = op->down.cols;
    // Host memory is read no faster by more blocks; the others are for what is computed beside. (7.5 has little shared
    // memory, and of a list there are no single steps.)
    const bool little = d->smem_sm < 96 * 1024;
    const int blocks_per_sm = op->n_tok == 1 && !(little && op->list) ? 2 : 1,
              batch_blocks = divide_up(d->info.n_sm, 8) * 2, all_blocks = blocks_per_sm * d->info.n_sm,
              at_once = op->zero_copy ? batch_blocks
                        : op->beside  ? all_blocks - batch_blocks
                                      : all_blocks;
    size_t room = d->smem_sm / (size_t)blocks_per_sm - 3072;
    if (room > d->smem_block - 2048) room = d->smem_block - 2048;
    const int usual = divide_up(n, at_once);
    if (batch)
        set_batch_tile(&a->k, k->batch, little ? room / 2 : room * 5 / 8, usual);
    else
        set_tile(&a->k, 32 * k->steps * k->lane_weights, room / 2, (size_t)tokens * (k->int8 ? 1 : 4));
    size_t z = 0, z_scales = 0;
    if (own_scores) {
        a->s.x = s->z;
        a->s.ldx = s->ldz;
        a->s.n_tok = op->n_tok;
        a->s.cols = s->fc2.cols;
        a->s.n = n;
        a->s.product[0].w = (const uint8_t *)s->fc2.w;
        a->s.product[0].stride = s->fc2.stride;
        if (score_batch) {
            set_batch_tile(&a->s, k->score_batch, room / 6, usual);
            z = batch_tile_bytes(k->score_batch, a->s.tile);
            z_scales = batch_scale_bytes(k->score_batch, a->s.tile);
        } else {
            set_tile(&a->s, 32 * k->score_steps * k->score_weights, room / 4, (size_t)tokens * (k->score_int8 ? 1 : 4));
            z = (size_t)tokens * (size_t)a->s.tile * (k->score_int8 ? 1 : 4);
            z_scales = k->score_int8 ? (size_t)tokens * (size_t)(a->s.tile / 32) * 8 : 0;
        }
    } else if (s->sign) {
        z = ((size_t)op->n_tok * (size_t)divide_up(op->up.cols, 64) * 8 + 15) / 16 * 16;
    }
    const int pieces = divide_up(op->down.cols, k->down_weights);
    a->tiles = divide_up(pieces, ROWS_THREADS);
    a->lanes = divide_up(divide_up(pieces, a->tiles), 16) * 16;
    a->groups = ROWS_THREADS / a->lanes < 4 ? ROWS_THREADS / a->lanes : 4;
    const size_t acts = batch ? batch_tile_bytes(k->batch, a->k.tile)
                              : (size_t)tokens * (size_t)a->k.tile * (k->int8 ? 1 : 4),
                 scales = batch     ? batch_scale_bytes(k->batch, a->k.tile)
                          : k->int8 ? (size_t)tokens * (size_t)(a->k.tile / 32) * 8
                                    : 0;
    const bool pairs = op->gate.w && !a->k.skip;
    for (p->grid = at_once;; p->grid += at_once) {
        if (p->grid > n) p->grid = n;
        const size_t own = (size_t)divide_up(n, p->grid), rows = own * (pairs ? 2 : 1);
        size_t part = batch ? batch_sum_bytes(rows) : rows * (size_t)(a->k.parts * tokens) * 4;
        if (own_scores) {
            const size_t score_part = score_batch ? batch_sum_bytes(own) : own * (size_t)(a->s.parts * tokens) * 4;
            if (score_part > part) part = score_part;
        }
        const size_t sums = batch ? (size_t)batch_factor_bytes((int)own, k->factor_parts)
                                  : (size_t)a->lanes * (size_t)k->down_weights * 4;
        auto room16 = [](size_t n_bytes) { return (n_bytes + 15) / 16 * 16; };
        size_t at = acts + scales > sums ? acts + scales : sums;
        auto take = [&](size_t n_bytes) {
            const size_t was = at;
            at += room16(n_bytes);
            return (int)was;
        };
        a->at.scales = (int)acts;
        a->at.z = take(z);
        a->at.z_scales = take(z_scales);
        a->at.part = take(part);
        a->at.pointer = take(rows * 8);
        a->at.place = take(own * 4);
        a->own = (int)own;
        a->at.chosen_bytes = (int)room16(own * (size_t)(2 + tokens) * 4);
        a->at.chosen = take(2 * (size_t)a->at.chosen_bytes);
        p->smem = at;
        if (at <= room) break;
        if (p->grid == n || (p->grid >= 8 * at_once && !op->list)) return false;
    }
    if (k->one && a->score == SCORE_ROWS && !several && a->k.gated && !a->k.skip && !op->list && !op->first &&
        !a->beside && fills_once(a->s) && fills_once(a->k) && a->k.norm.kind == TE_NO_NORM)
        p->kernel = k->one;
    // Larger clusters do not all find room at once: then their blocks come in two waves.
    p->cluster = d->info.major >= 9 && p->grid % 2 == 0 ? 2 : 1;
    return true;
}

int32_t ffn_parts(te_cuda *d, const te_ffn_args *op) {
    ffn_plan p;
    if (!op->down.w) return 0;
    return make_plan(d, op, &p) ? p.grid : parts(d, &op->down, op->up.n_rows);
}

te_status check_file(te_cuda *d, const char *op, const te_mat *m) {
    const te_layout *l = te_layout_get(m->type);
    if (l && !l->in_file)
        return refuse(d, te_fail(TE_UNSUPPORTED, "%s: no kernel for rows of type %d in host memory", op, (int)m->type));
    if (!ffn_file(m->type)) return check_matrix(d, op, m);
    if (!stride(m->type, m->cols) || !m->w || !aligned(m->w, 2) || m->stride % 2 || m->n_rows < 1 ||
        m->stride < te_row_bytes(m->type, m->cols))
        return refuse(d, te_fail(TE_ARGUMENT, "%s: a matrix at %p with %d rows of %d weights, %zu bytes apart", op,
                                 m->w, (int)m->n_rows, (int)m->cols, m->stride));
    return TE_OK;
}

static te_status check_ffn(te_cuda *d, const te_ffn_args *op) {
    const te_scores *s = &op->scores;
    const te_cuda_hidden hidden = hidden_of(op);
    const check_function check = op->zero_copy ? check_file : check_matrix;
    TE_CUDA_TRY(check_hidden(d, &hidden, check));
    if (op->zero_copy && !op->list)
        return refuse(d, te_fail(TE_UNSUPPORTED, "ffn: rows in host memory without a list"));
    if (op->list && (op->n_list < 1 || !op->down.w || op->down.type != op->up.type))
        return refuse(d, te_fail(TE_UNSUPPORTED, "ffn: a list of %d rows of types %d and %d", (int)op->n_list,
                                 (int)op->up.type, op->down.w ? (int)op->down.type : -1));
    if (s->fc2.w) {
        const te_norm none = {};
        TE_CUDA_TRY(check_matrix(d, "ffn", &s->fc2));
        TE_CUDA_TRY(check_input(d, "ffn", s->z, s->ldz, op->n_tok, s->fc2.cols, &none));
        if (s->fc2.n_rows < neurons(op))
            return refuse(d, te_fail(TE_ARGUMENT, "ffn: scores of %d of %d neurons", (int)s->fc2.n_rows, neurons(op)));
    } else if (s->sign) {
        TE_CUDA_TRY(check_signs(d, "ffn", s));
    }
    if ((s->fc2.w || s->sign) && (!op->bits || !s->threshold))
        return refuse(d, te_fail(TE_ARGUMENT, "ffn: scores without a threshold or room for bits"));
    if (!op->down.w) return TE_OK;
    TE_CUDA_TRY(check(d, "ffn", &op->down));
    if (op->down.n_rows < op->up.n_rows || !op->partial)
        return refuse(d,
                      te_fail(TE_ARGUMENT, "ffn: %d rows of down, %d of up", (int)op->down.n_rows, (int)op->up.n_rows));
    return TE_OK;
}

// Scores by products of their own: bits of the wanted ones.
static te_status mark_wanted(te_cuda *d, const te_ffn_args *op) {
    const te_scores *s = &op->scores;
    if (!s->fc2.w) return run_signs(d, s, neurons(op), op->n_tok, nullptr, {}, op->bits);
    te_linear_args l = {};
    l.x = s->z;
    l.ldx = s->ldz;
    l.n_tok = op->n_tok;
    l.n_products = 1;
    l.product[0].w = s->fc2;
    l.product[0].w.n_rows = neurons(op);
    l.product[0].mark = (uint8_t *)op->bits;
    l.product[0].ld_mark = (size_t)divide_up(neurons(op), 32) * 4;
    l.product[0].mark_threshold_at = s->threshold;
    return linear(d, &l);
}

te_status ffn(te_cuda *d, const te_ffn_args *op) {
    const bool scored = op->scores.fc2.w || op->scores.sign;
    TE_CUDA_TRY(check_ffn(d, op));
    ffn_plan p;
    if (make_plan(d, op, &p)) {
        if (p.a.score == SCORE_BITS) TE_CUDA_TRY(mark_wanted(d, op));
        return launch_clusters(d, "ffn", p.kernel, dim3((unsigned)p.grid), p.cluster, ROWS_THREADS, p.smem, p.a);
    }
    if (op->list)
        return refuse(d, te_fail(TE_UNSUPPORTED, "ffn: no kernel for a list of %d rows of %d weights of type %d",
                                 (int)op->n_list, (int)op->up.cols, (int)op->up.type));
    te_cuda_hidden a = hidden_of(op);
    if (scored) {
        TE_CUDA_TRY(mark_wanted(d, op));
        a.mode = TE_CUDA_DENSE; // as in one kernel: gate and up at once
        a.mask = (const uint8_t *)op->bits;
        a.ld_mask = (size_t)divide_up(op->up.n_rows, 32) * 4;
    }
    TE_CUDA_TRY(hidden(d, &a));
    if (!op->down.w) return TE_OK;
    te_cuda_down b = {};
    b.w = op->down;
    b.h = op->h;
    b.ldh = op->ldh;
    b.n_tok = op->n_tok;
    b.w.n_rows = op->up.n_rows;
    b.all = !scored && !op->skip;
    b.partial = op->partial;
    return down(d, &b);
}

} // namespace te
