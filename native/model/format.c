/* format.c - weight formats by name and number, and turning floats into them on several threads. */
#include <string.h>
#include <strings.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"
#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "../common.h"

int32_t pi_type_find(const char *name) {
    for (int32_t type = 0; name && type < TE_TYPE_LIMIT; type++) {
        const te_type_info *info = te_type_get(type);
        if (info && strcasecmp(info->name, name) == 0) return type;
    }
    return -1;
}

const char *pi_type_name(int32_t type) {
    const te_type_info *info = te_type_get(type);
    return info ? info->name : NULL;
}

int32_t pi_type_block(int32_t type) {
    const te_type_info *info = te_type_get(type);
    return info ? info->block_weights : 0;
}

uint64_t pi_type_bytes(int32_t type, int64_t n) {
    const te_type_info *info = te_type_get(type);
    if (!info || n < 0 || n % info->block_weights) return 0;
    uint64_t bytes;
    return __builtin_mul_overflow((uint64_t)(n / info->block_weights), (uint64_t)info->block_bytes, &bytes) ? 0 : bytes;
}

int32_t pi_type_can_quantize(int32_t type) { return te_can_quantize(type); }

typedef struct quantize_task {
    int32_t type;
    const float *src;
    char *dst;
    int64_t n_rows, n_cols;
    size_t row_bytes;
} quantize_task;

/* Rows are handed out one by one: a row of a K format takes long, and may take longer than another. */
static void quantize_rows(void *ctx, te_team *team) {
    const quantize_task *t = ctx;
    for (;;) {
        const int64_t row = te_counter_take(team, 0, 1);
        if (row >= t->n_rows) return;
        te_quantize_row(t->type, t->src + row * t->n_cols, t->dst + (size_t)row * t->row_bytes, t->n_cols);
    }
}

pi_status pi_quantize(int32_t type, const float *src, int64_t n_rows, int64_t n_cols, void *dst, int32_t n_threads) {
    if (!src || !dst || n_rows < 1 || n_cols < 1)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_quantize: nothing to do for %lld rows of %lld weights", (long long)n_rows,
                       (long long)n_cols);
    if (n_threads < 0 || n_threads > 1024)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_threads is %d, must be 0..1024", n_threads);
    const te_type_info *info = te_type_get(type);
    if (!info || !te_can_quantize(type))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "weights cannot be turned into the format %s",
                       info ? info->name : "of that number");
    if (n_cols % info->block_weights)
        return PI_FAIL(PI_ERROR_ARGUMENT, "rows of %lld weights do not divide into the blocks of %d of %s",
                       (long long)n_cols, info->block_weights, info->name);
    if (pi_mul(pi_mul((size_t)n_rows, (size_t)n_cols), sizeof(float)) == SIZE_MAX)
        return PI_FAIL(PI_ERROR_ARGUMENT, "%lld rows of %lld weights are too many", (long long)n_rows,
                       (long long)n_cols);
    quantize_task task = {type, src, dst, n_rows, n_cols, te_row_bytes(type, n_cols)};
    te_pool *pool = NULL;
    if (n_threads == 0) n_threads = te_os_n_cores();
    if (n_threads > n_rows) n_threads = (int32_t)n_rows;
    PI_TRY(te_pool_new(n_threads, &pool));
    te_pool_run(pool, quantize_rows, &task);
    te_pool_free(pool);
    return PI_OK;
}
