/* upload.h - weights on their way to a device. After an error calls do nothing and give nothing. */
#ifndef PI_UPLOAD_H
#define PI_UPLOAD_H

#include "hybrid.h"

typedef struct pi_upload {
    pi_hybrid *h;
    pi_device *dev;
    pi_status status; /* the first error */
    char problem[512];
} pi_upload;

/* Memory of this side. */
void *pi_upload_take(pi_upload *u, size_t n_bytes);
/* Memory of the device, zeros; bytes to it. */
void *pi_upload_reserve(pi_upload *u, size_t n_bytes);
void pi_upload_bytes(pi_upload *u, void *to, const void *from, size_t n_bytes);
/* All that follows returns what lies on the device. v NULL, m->w NULL: nothing. */
const float *pi_upload_vector(pi_upload *u, const float *v, int64_t n);
/* Elements ids[0..n-1] of v. */
const float *pi_upload_some(pi_upload *u, const float *v, const int32_t *ids, int32_t n);
const int32_t *pi_upload_ids(pi_upload *u, const int32_t *ids, int32_t n);
te_norm pi_upload_norm(pi_upload *u, const pi_norm *norm); /* of the residual stream, or of what blocks give */
te_mat pi_upload_mat(pi_upload *u, const te_mat *m);
/* All of m to a place that is reserved. */
void pi_upload_to(pi_upload *u, const te_mat *m, void *at);
/* Rows ids[0..n-1] of m; columns ids[0..n-1] of m, whole blocks of its format. */
te_mat pi_upload_rows(pi_upload *u, const te_mat *m, const int32_t *ids, int32_t n);
te_mat pi_upload_columns(pi_upload *u, const te_mat *m, const int32_t *ids, int32_t n);
/* Numbers of the blocks of m's format that columns ids[0..n-1] are; returns how many. */
int32_t pi_upload_block_ids(const te_mat *m, const int32_t *ids, int32_t n, int32_t *out);
/* Rows ids[0..n-1] of words that have n_words each. */
const uint64_t *pi_upload_words(pi_upload *u, const uint64_t *from, int32_t n_words, const int32_t *ids, int32_t n);

#endif
