/* experts.cu - a mixture of experts: the router's choice, and the experts of a few tokens. */
#include "cuda.cuh"

namespace pi {

static void expect_route(Cuda *c, const te_route_args *a) {
    if (!a->uses) return; /* experts may come and go: what that takes is had before anything runs */
    (void)room(c, FETCH, PI_FETCH_BYTES);
    if (c->mode == MEASURE) note(c, c->te->fetch_open(c->d));
}

void op_route(pi_device *dev, const te_route_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    expect_route(c, a);
    if (ready(c)) note(c, c->te->route(c->d, a));
    if (a->loads && ready(c)) note(c, c->te->load_after(c->d));
}

namespace {

void decode_experts(Cuda *c, const te_experts_args *a) {
    te_experts_args op = *a;
    const size_t part = (size_t)a->n_tok * (size_t)a->up.cols;
    for (te_mat *m : {&op.gate, &op.up, &op.down}) {
        if (!a->kept) break;
        if (!m->w) continue; // experts without a gate
        m->w = mapped(c, m->w);
        if (!m->w) return note(c, te_fail(TE_ARGUMENT, "experts in host memory that the GPU does not map"));
    }
    if (a->choice) expect_route(c, a->choice);
    op.ldh = (size_t)(a->n_ff + 3) / 4 * 4;
    op.h = (float *)room(c, HIDDEN, sizeof(float) * op.ldh * (size_t)a->n_tok * (size_t)a->n_used);
    /* Parts of the sum, behind those of the same layer that are there, until merge adds them up. Routes that are kept and
     * those of the call behind leave theirs in the same parts. */
    const int32_t n = c->te->expert_parts(c->d, a), before = a->add ? c->sum.n_parts - (a->beside ? n : 0) : 0,
                  n_parts = before + n;
    op.partial = (float *)room(c, PARTIAL, sizeof(float) * (size_t)n_parts * part) + (size_t)before * part;
    c->sum = {};
    if (!a->merge) c->sum = {a->y, n_parts, false, {}};
    if (ready(c)) note(c, c->te->experts(c->d, &op));
}

} // namespace

void op_experts(pi_device *dev, const te_experts_args *a) {
    Cuda *c = of(dev);
    if (idle(c)) return;
    run_last_rows(c);
    /* Kernels of experts add to a sum, and no more. */
    const te_merge_args *m = a->merge;
    te_experts_args op = *a;
    const bool apart = m && (m->words || m->norm.kind != TE_NO_NORM);
    if (apart) op.merge = nullptr;
    if (a->n_tok > TE_CUDA_MAX_TOK) {
        if (a->choice) expect_route(c, a->choice);
        prefill_experts(c, &op);
    } else {
        if (a->staged) return note(c, te_fail(TE_ARGUMENT, "experts of %d tokens that are loaded", (int)a->n_tok));
        decode_experts(c, &op);
    }
    if (apart) op_merge(dev, m);
}

} // namespace pi
