/* te_layout.c - the table behind te_layout.h. */
#include "te_layout.h"

#define FIELD(format, name) {offsetof(te_block_##format, name), sizeof(((te_block_##format *)0)->name)}

static const te_layout layouts[TE_TYPE_LIMIT] = {
    [TE_F32] = {1, {{0, 4}}},
    [TE_F16] = {1, {{0, 2}}},
    [TE_BF16] = {1, {{0, 2}}},
    [TE_Q8_0] = {2, {FIELD(q8_0, q), FIELD(q8_0, d)}},
    [TE_Q4_0] = {2, {FIELD(q4_0, q), FIELD(q4_0, d)}},
    [TE_Q4_K] = {1, {{0, sizeof(te_block_q4_k)}}},
    [TE_Q5_K] = {1, {{0, sizeof(te_block_q5_k)}}},
    [TE_Q6_K] = {4, {FIELD(q6_k, q), FIELD(q6_k, qh), FIELD(q6_k, scales), FIELD(q6_k, d)}},
};

const te_layout *te_layout_get(int32_t type) {
    return type >= 0 && type < TE_TYPE_LIMIT && layouts[type].n_planes ? &layouts[type] : NULL;
}
