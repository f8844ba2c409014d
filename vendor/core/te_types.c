/* te_types.c - the table behind te_types.h. */
#include "te_types.h"

static const te_type_info infos[TE_TYPE_LIMIT] = {
#define X(tag, id, codec, bytes, n) [id] = {#tag, bytes, n},
    TE_TYPES(X)
#undef X
};

const te_type_info *te_type_get(int32_t id) {
    if (id < 0 || id >= TE_TYPE_LIMIT || infos[id].block_bytes == 0) return NULL;
    return &infos[id];
}

size_t te_row_bytes(int32_t type, int64_t n) {
    const te_type_info *info = te_type_get(type);
    if (info == NULL || n < 0) return 0;
    return (size_t)(n / info->block_weights) * (size_t)info->block_bytes;
}
