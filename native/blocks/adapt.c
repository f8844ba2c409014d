/* adapt.c - what adapters (model/lora.c) add to products. */
#include <string.h>

#include "ops.h"

void pi_adapt(pi_session *s, te_team *team, const pi_adapter *d, const float *x, size_t ldx, int32_t n_tok, te_way way,
              float *y, size_t ldy) {
    if (!d || !d->a.w) return;
    const size_t rank = (size_t)d->a.n_rows;
    const te_linear a = {.w = d->a, .y = s->adapt, .ldy = rank, .way = way},
                    b = {.w = d->b, .y = y, .ldy = ldy, .add = true, .way = way};
    te_barrier(team);
    te_op_linear(team, s->ws, &a, 1, x, ldx, n_tok);
    te_barrier(team);
    te_op_linear(team, s->ws, &b, 1, s->adapt, rank, n_tok);
    te_barrier(team);
}

void pi_adapt_chunk(pi_session *s, te_team *team, const pi_layer *layer, int32_t which, const float *x, size_t ldx,
                    float *y, size_t ldy) {
    const pi_adapter *d = pi_adapter_of(layer, which);
    const int32_t n_prefill = s->chunk.n_prefill, n_few = s->chunk.n_tok - n_prefill;
    if (n_prefill > 0) pi_adapt(s, team, d, x, ldx, n_prefill, TE_BY_GEMM, y, ldy);
    if (n_few > 0)
        pi_adapt(s, team, d, x + ldx * (size_t)n_prefill, ldx, n_few, TE_BY_ROWS, y + ldy * (size_t)n_prefill, ldy);
}

void pi_adapt_embedding(pi_session *s, te_team *team) {
    const pi_adapter *d = &s->model->embd_adapter;
    if (!d->a.w) return;
    const size_t rank = (size_t)d->b.cols, n_embd = (size_t)s->model->info.n_embd;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth)
        memcpy(s->adapt + rank * (size_t)t, (const float *)d->b.w + rank * (size_t)s->chunk.token[t],
               rank * sizeof *s->adapt);
    te_barrier(team);
    const te_linear a = {.w = d->a, .y = s->x, .ldy = n_embd, .add = true};
    pi_linear(s, team, &a, 1, s->adapt, rank, 0, s->chunk.n_tok);
    te_barrier(team);
}
