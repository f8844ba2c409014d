/* te_layout.c - the table behind te_layout.h. */
#include "te_layout.h"

#define BYTES(format, name) ((int32_t)sizeof(((te_block_##format *)0)->name))
#define FIELD(format, name) {offsetof(te_block_##format, name), BYTES(format, name)}
/* From one field on to the end of another that follows it. */
#define FIELDS(format, name, last)                                                                                     \
    {offsetof(te_block_##format, name),                                                                                \
     (int32_t)(offsetof(te_block_##format, last) - offsetof(te_block_##format, name)) + BYTES(format, last)}

static const te_layout layouts[TE_TYPE_LIMIT] = {
    [TE_F32] = {1, true, {{0, 4}}},
    [TE_F16] = {1, true, {{0, 2}}},
    [TE_BF16] = {1, true, {{0, 2}}},
    [TE_Q8_0] = {2, true, {FIELD(q8_0, q), FIELD(q8_0, d)}},
    [TE_Q4_0] = {2, true, {FIELD(q4_0, q), FIELD(q4_0, d)}},
    [TE_Q4_1] = {2, false, {FIELD(q4_1, q), FIELDS(q4_1, d, m)}},
    [TE_Q5_0] = {3, false, {FIELD(q5_0, q), FIELD(q5_0, qh), FIELD(q5_0, d)}},
    [TE_Q5_1] = {3, false, {FIELD(q5_1, q), FIELD(q5_1, qh), FIELDS(q5_1, d, m)}},
    [TE_IQ4_NL] = {2, false, {FIELD(iq4_nl, q), FIELD(iq4_nl, d)}},
    [TE_MXFP4] = {2, false, {FIELD(mxfp4, q), FIELD(mxfp4, e)}},
    [TE_IQ4_XS] = {2, false, {FIELD(iq4_xs, q), FIELDS(iq4_xs, d, scales_l)}},
    [TE_Q2_K] = {3, false, {FIELD(q2_k, q), FIELD(q2_k, scales), FIELDS(q2_k, d, dmin)}},
    [TE_Q3_K] = {3, false, {FIELD(q3_k, q), FIELD(q3_k, qh), FIELDS(q3_k, scales, d)}},
    [TE_Q4_K] = {1, true, {{0, sizeof(te_block_q4_k)}}},
    [TE_Q5_K] = {1, true, {{0, sizeof(te_block_q5_k)}}},
    [TE_Q6_K] = {4, true, {FIELD(q6_k, q), FIELD(q6_k, qh), FIELD(q6_k, scales), FIELD(q6_k, d)}},
};

const te_layout *te_layout_get(int32_t type) {
    return type >= 0 && type < TE_TYPE_LIMIT && layouts[type].n_planes ? &layouts[type] : NULL;
}
