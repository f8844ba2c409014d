/* space.c - what kernels take of a device's memory. */
#include "space.h"

#include "../../vendor/core/te_layout.h"

bool pi_space_reads_rows(int32_t type, uint64_t stride) {
    const te_layout *l = te_layout_get(type);
    return l && l->in_file && (l->n_planes > 1 ? stride % 2 == 0 : stride % PI_DEVICE_ROW == 0);
}

bool pi_space_window(int32_t window) { return !window || window >= PI_SMALL_BATCH; }

bool pi_space_rows_alone(int32_t type) { return type != TE_Q4_0; }

int32_t pi_space_wide(int32_t type) {
    if (type == TE_F16) return PI_WIDE;
    const bool has = type == TE_Q8_0 || type == TE_Q4_0 || type == TE_Q4_K || type == TE_Q5_K || type == TE_Q6_K;
    return has ? PI_WIDE_QUANTISED : 0;
}

int32_t pi_space_heads(int32_t type) { return type == TE_F32 || type == TE_BF16 ? type : TE_F16; }

bool pi_space_latent(int32_t rank, int32_t n_rot, int32_t head_key, int32_t head_value) {
    return rank <= 512 && rank + n_rot <= 640 && rank % 4 == 0 && n_rot % 4 == 0 && head_key % 4 == 0 &&
           head_value % 4 == 0;
}

static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

uint64_t pi_space_converted(int32_t type, uint64_t n_rows, uint64_t cols) {
    return type == TE_F16 ? 0 : least(2 * n_rows * cols, PI_PIECE_BYTES);
}

/* Hidden values, of one of gate and up, that a chunk of at most n_tok tokens makes at once. Whole 256 neurons at a time:
 * fewer tokens may want more than n_tok do. */
static uint64_t hidden_values(const pi_space_shape *s) {
    if (s->by_output) return s->n_tok * s->n_ff;
    const uint64_t room = PI_HIDDEN_BYTES / sizeof(float) / (s->gated ? 2 : 1),
                   all = s->n_tok * least(s->n_ff, PI_HIDDEN_ROWS);
    return all <= room ? all : most(room, s->n_tok * least(s->n_ff, 256));
}

/* Of a mixture's routes, hidden values or columns of their sums that a longer chunk makes at once. */
static uint64_t route_values(const pi_space_shape *s) {
    const uint64_t room = PI_HIDDEN_BYTES / sizeof(float), routes = s->n_tok * s->n_used,
                   all = routes * (least(most(s->n_ff_expert, s->n_embd), PI_HIDDEN_ROWS) + 3);
    if (s->n_tok <= PI_SMALL_BATCH) return 0;
    return all <= room ? all : most(room, routes * (least(most(s->n_ff_expert, s->n_embd), 256) + 3));
}

uint64_t pi_space_attention(const pi_space_shape *s) {
    const uint64_t n_tok = s->n_tok, d = s->n_embd_head, few = least(n_tok, PI_SMALL_BATCH);
    /* Parts of next tokens: of many fewer each; one token has up to twice PI_SPLITS in a long context. */
    const uint64_t next = (n_tok > few ? 3 : 2) * few * (d + 2) * PI_SPLITS + n_tok;
    /* Of a prompt's q in F16, which is rows of 64, 128 or 256 values, and parts of no more than PI_SHARED tokens. */
    const uint64_t wide = d <= 128 ? 128 : 256, row = (d <= 64 ? 64 : wide) / 2;
    const uint64_t shared = least(n_tok, PI_SHARED) * row + least(n_tok, PI_MANY) * PI_SHARES * (d + 4);
    return s->n_head * most(next, n_tok > few ? most(shared, n_tok * row) : 0);
}

uint64_t pi_space_kernels(const pi_space_shape *s) {
    const uint64_t n_tok = s->n_tok, n_q = s->n_head * s->n_embd_head, few = least(n_tok, PI_SMALL_BATCH),
                   /* inputs in F16 are of whole tiles of tokens and columns */
        tiled = n_tok > few ? (n_tok + 31) / 32 * 32 : n_tok, rank = s->adapter_rank, hidden = hidden_values(s),
                   widest = most(most(n_q, s->n_inner), s->n_embd), routes = n_tok * s->n_used,
                   values = route_values(s),
                   /* as are few tokens' routes, or these have hidden values of floats */
        tiled_routes = n_tok > few ? least(n_tok, PI_WIDE_EXPERTS) * s->n_used * 256 + 8 * (s->n_ff_expert + 256) : 0,
                   few_routes = n_tok > few ? least(n_tok, PI_WIDE_EXPERTS) * s->n_used * (s->n_ff_expert + 3) : 0;
    const uint64_t words[] = {
        /* of a feed-forward's adapters: a x, what is added to gate and up, parts of down's; a x in F16 */
        rank ? n_tok * rank + few * (2 * s->n_ff + 6 + rank * PI_PARTS) : 0,
        rank ? n_tok * (rank / 2 + 1) + 128 : 0,
        /* gate, up */
        most(most(hidden * (s->gated ? 2 : 1), few * s->n_ff), most(values, few * s->n_used * (s->n_ff_expert + 3))),
        /* their product and the inputs, in F16, with a scale for each route */
        (most(hidden, most(values + 8 * routes + tiled_routes, 2 * few_routes)) + tiled * (widest + 512) +
         (tiled - n_tok) * s->n_ff) /
                2 +
            16 + (routes ? routes + 64 : 0),
        n_tok > few ? least(tiled, PI_WIDE) * (s->n_embd + 256) / 2 + 2 * PI_WIDE + 1 : 0, /* few tokens' once more */
        routes ? 3 * routes + routes / 8 + 4 * s->n_expert + 4 : 0,                        /* order of routes */
        s->n_expert ? PI_FETCH_BYTES / 4 : 0,
        s->predicted ? n_tok * (s->n_ff / 32 + 1 + 2 * s->sign_words) : 0, /* marks, signs */
        (pi_parts(few, s->n_embd) + few * (s->n_used + (s->n_used > 0))) *
            s->n_embd, /* parts of a feed-forward's sum */
        pi_space_attention(s),
        /* and a chunk's input in the form that products of a few tokens take, twice: at most 48 bytes a column */
        few > 1 ? 12 * (most(widest, s->n_ff) + s->n_embd + 512) : 0,
    };
    uint64_t n = pi_space(s->mapped_bytes / 512); /* a driver's tables: 8 bytes for every 4 KiB */
    if (n_tok > PI_SMALL_BATCH) n += pi_space(s->matrix_bytes);
    for (size_t k = 0; k < sizeof words / sizeof *words; k++) n += pi_space(4 * words[k]);
    return n;
}
