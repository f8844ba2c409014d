/* te_gguf_read.c - checks one GGUF file and notes where its keys and tensors lie.
 *
 * Nothing in the file is believed: every length is compared with the bytes that are left before it is used, and memory
 * is taken as entries are really met, never because a count in the header promises them. */
#include "te_gguf_part.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "te_types.h"

/* After a failure nothing more is read: every take gives NULL or 0, and status and the thread's sentence stay. */
typedef struct reader {
    const uint8_t *data;
    size_t n_bytes;
    size_t at;
    const char *label;
    te_status status;
} reader;

/* Bytes of a scalar, by te_kv_type; 0 for strings and arrays. */
static const uint8_t scalar_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
enum { N_KV_TYPES = sizeof scalar_bytes, MIN_KV_BYTES = 8 + 1 + 4 + 1, MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8 };

const char *te_gguf_quote(te_str name, char out[TE_GGUF_QUOTED]) {
    const size_t n = name.n < TE_GGUF_QUOTED - 4 ? name.n : TE_GGUF_QUOTED - 4;
    for (size_t i = 0; i < n; i++) out[i] = name.p[i] >= ' ' && name.p[i] <= '~' ? name.p[i] : '?';
    memcpy(out + n, n < name.n ? "..." : "", n < name.n ? 4 : 1);
    return out;
}

static size_t left(const reader *r) { return r->n_bytes - r->at; }

static const void *take(reader *r, uint64_t n, const char *what) {
    if (r->status != TE_OK) return NULL;
    if (n > left(r)) {
        r->status = te_fail(TE_FORMAT, "%s: %s takes %" PRIu64 " bytes at byte %zu, but only %zu are left", r->label,
                            what, n, r->at, left(r));
        return NULL;
    }
    r->at += (size_t)n;
    return r->data + r->at - n;
}

static uint32_t take_u32(reader *r, const char *what) {
    uint32_t value = 0;
    const void *p = take(r, sizeof value, what);
    if (p != NULL) memcpy(&value, p, sizeof value);
    return value;
}

static uint64_t take_u64(reader *r, const char *what) {
    uint64_t value = 0;
    const void *p = take(r, sizeof value, what);
    if (p != NULL) memcpy(&value, p, sizeof value);
    return value;
}

static te_str take_name(reader *r, const char *what, uint64_t limit) {
    const size_t at = r->at;
    const uint64_t n = take_u64(r, what);
    if (r->status == TE_OK && (n < 1 || n > limit)) {
        r->status = te_fail(TE_FORMAT, "%s: %s at byte %zu is %" PRIu64 " bytes long; 1 to %" PRIu64 " are possible",
                            r->label, what, at, n, limit);
    }
    const char *p = take(r, n, what);
    if (p != NULL && memchr(p, 0, (size_t)n) != NULL) {
        r->status = te_fail(TE_FORMAT, "%s: %s at byte %zu holds a zero byte", r->label, what, at);
    }
    return (te_str){p, p ? (size_t)n : 0};
}

/* Room for one more item in an array of n; grows by doubling. */
static te_status make_room(void **items, int64_t n, int64_t *capacity, size_t item_bytes) {
    if (n < *capacity) return TE_OK;
    const int64_t wanted = *capacity == 0 ? 64 : 2 * *capacity;
    void *grown = realloc(*items, (size_t)wanted * item_bytes);
    if (grown == NULL) return te_fail(TE_MEMORY, "no memory for %lld entries", (long long)wanted);
    *items = grown;
    *capacity = wanted;
    return TE_OK;
}

/* Walks the strings of an array. */
static void skip_strings(reader *r, const char *key, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t length = 0;
        if (left(r) >= 8) memcpy(&length, r->data + r->at, 8);
        if (left(r) < 8 || length > left(r) - 8) {
            r->status =
                te_fail(TE_FORMAT, "%s: string %" PRIu64 " of key '%s' at byte %zu runs past the end of the file",
                        r->label, i, key, r->at);
            return;
        }
        r->at += 8 + (size_t)length;
    }
}

static void check_bools(reader *r, const char *key, const uint8_t *p, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        if (p[i] > 1) {
            r->status =
                te_fail(TE_FORMAT, "%s: key '%s' holds a bool of value %d; 0 or 1 are possible", r->label, key, p[i]);
            return;
        }
    }
}

static te_status read_array(reader *r, const char *key, te_kv *kv) {
    const uint32_t type = take_u32(r, "an array's element type");
    kv->n = take_u64(r, "an array's length");
    if (r->status != TE_OK) return r->status;
    if (type == TE_KV_ARRAY)
        return te_fail(TE_FORMAT, "%s: key '%s' is an array of arrays, which is not read", r->label, key);
    if (type >= N_KV_TYPES)
        return te_fail(TE_FORMAT, "%s: key '%s' is an array of the unknown type %u", r->label, key, type);
    kv->element_type = (int32_t)type;
    const uint64_t least = type == TE_KV_STRING ? 8 : scalar_bytes[type];
    if (kv->n > left(r) / least) {
        return te_fail(TE_FORMAT, "%s: key '%s' is an array of %" PRIu64 " elements, but only %zu bytes are left",
                       r->label, key, kv->n, left(r));
    }
    const size_t start = r->at;
    kv->data = r->data + start;
    if (type == TE_KV_STRING) {
        skip_strings(r, key, kv->n);
    } else {
        r->at += (size_t)(kv->n * least);
        if (type == TE_KV_BOOL) check_bools(r, key, kv->data, kv->n);
    }
    kv->n_bytes = r->at - start;
    return r->status;
}

static te_status read_kv(reader *r, te_kv *kv) {
    char key[TE_GGUF_QUOTED];
    kv->key = take_name(r, "the name of a key", TE_GGUF_MAX_KEY);
    const uint32_t type = take_u32(r, "the type of a key");
    if (r->status != TE_OK) return r->status;
    te_gguf_quote(kv->key, key);
    if (type >= N_KV_TYPES)
        return te_fail(TE_FORMAT, "%s: key '%s' has the unknown value type %u", r->label, key, type);
    kv->type = (int32_t)type;
    kv->element_type = -1;
    kv->n = 1;
    if (type == TE_KV_ARRAY) return read_array(r, key, kv);
    const uint64_t n_bytes = type == TE_KV_STRING ? take_u64(r, "the length of a string") : scalar_bytes[type];
    kv->data = take(r, n_bytes, "the value of a key");
    kv->n_bytes = (size_t)n_bytes;
    if (kv->data != NULL && type == TE_KV_BOOL) check_bools(r, key, kv->data, 1);
    return r->status;
}

/* A promised number of entries against what the rest of the file can hold. */
static te_status check_count(const reader *r, const char *what, uint64_t n, size_t entry_bytes) {
    if (n > left(r) / entry_bytes || n > INT32_MAX) {
        return te_fail(TE_FORMAT, "%s: the header promises %" PRIu64 " %s, more than %zu bytes can hold", r->label, n,
                       what, left(r));
    }
    return TE_OK;
}

static te_status read_kvs(reader *r, te_gguf_part *p, uint64_t n) {
    int64_t capacity = 0;
    te_status status = check_count(r, "keys", n, MIN_KV_BYTES);
    for (int64_t i = 0; status == TE_OK && i < (int64_t)n; i++) {
        void *items = p->kv;
        status = make_room(&items, i, &capacity, sizeof *p->kv);
        p->kv = items;
        if (status == TE_OK) status = read_kv(r, &p->kv[i]);
        if (status == TE_OK) p->n_kv = i + 1;
    }
    return status;
}

/* Dimensions, type and size of a tensor; its name is known. */
static te_status check_shape(const reader *r, const char *name, const uint64_t *dims, uint32_t type,
                             te_gguf_tensor *t) {
    enum { I2_S = 36 }; /* of files whose weights ggml has no type for */
    const te_type_info *info = type < TE_TYPE_LIMIT ? te_type_get((int32_t)type) : NULL;
    if (type == I2_S) {
        return te_fail(TE_FORMAT, "%s: tensor '%s' is of the type I2_S (%u) of bitnet.cpp, which is not read", r->label,
                       name, type);
    }
    if (info == NULL) return te_fail(TE_FORMAT, "%s: tensor '%s' has the unknown type %u", r->label, name, type);
    uint64_t n = 1;
    for (int32_t i = 0; i < 4; i++) {
        const uint64_t ne = i < t->n_dims ? dims[i] : 1;
        if (ne < 1) return te_fail(TE_FORMAT, "%s: dimension %d of tensor '%s' is 0", r->label, i, name);
        if (ne > INT64_MAX / n) {
            return te_fail(TE_FORMAT,
                           "%s: dimension %d of tensor '%s' is %" PRIu64 ", more weights than can be counted", r->label,
                           i, name, ne);
        }
        t->ne[i] = (int64_t)ne;
        n *= ne;
    }
    if (t->ne[0] % info->block_weights != 0) {
        return te_fail(TE_FORMAT, "%s: tensor '%s' has rows of %" PRId64 " weights, not a multiple of %d as %s needs",
                       r->label, name, t->ne[0], info->block_weights, info->name);
    }
    n /= (uint64_t)info->block_weights;
    if (n > (uint64_t)INT64_MAX / (uint64_t)info->block_bytes) {
        return te_fail(TE_FORMAT, "%s: tensor '%s' has more bytes than can be counted", r->label, name);
    }
    t->type = (int32_t)type;
    t->n_bytes = (size_t)(n * (uint64_t)info->block_bytes);
    return TE_OK;
}

static te_status read_tensor(reader *r, te_gguf_entry *entry) {
    char name[TE_GGUF_QUOTED];
    uint64_t dims[4];
    te_gguf_tensor *t = &entry->tensor;
    *t = (te_gguf_tensor){.name = take_name(r, "the name of a tensor", TE_GGUF_MAX_TENSOR_NAME)};
    const uint32_t n_dims = take_u32(r, "a tensor's number of dimensions");
    if (r->status != TE_OK) return r->status;
    te_gguf_quote(t->name, name);
    if (n_dims < 1 || n_dims > 4) {
        return te_fail(TE_FORMAT, "%s: tensor '%s' has %u dimensions; 1 to 4 are possible", r->label, name, n_dims);
    }
    t->n_dims = (int32_t)n_dims;
    for (uint32_t i = 0; i < n_dims; i++) dims[i] = take_u64(r, "a tensor's dimension");
    const uint32_t type = take_u32(r, "a tensor's type");
    entry->offset = take_u64(r, "a tensor's offset");
    return r->status == TE_OK ? check_shape(r, name, dims, type, t) : r->status;
}

static te_status read_tensors(reader *r, te_gguf_part *p, uint64_t n) {
    int64_t capacity = 0;
    te_status status = check_count(r, "tensors", n, MIN_TENSOR_BYTES);
    for (int64_t i = 0; status == TE_OK && i < (int64_t)n; i++) {
        void *items = p->tensors;
        status = make_room(&items, i, &capacity, sizeof *p->tensors);
        p->tensors = items;
        if (status == TE_OK) status = read_tensor(r, &p->tensors[i]);
        if (status == TE_OK) p->n_tensors = i + 1;
    }
    return status;
}

static int by_place(const void *a, const void *b) {
    const te_gguf_entry *x = *(const te_gguf_entry *const *)a, *y = *(const te_gguf_entry *const *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->tensor.n_bytes > y->tensor.n_bytes) - (x->tensor.n_bytes < y->tensor.n_bytes);
}

/* No two tensors may share a part of their bytes. All of them is allowed: tied weights. */
static te_status check_overlap(const te_gguf_part *p) {
    char one[TE_GGUF_QUOTED], other[TE_GGUF_QUOTED];
    if (p->n_tensors < 2) return TE_OK;
    const te_gguf_entry **sorted = malloc((size_t)p->n_tensors * sizeof *sorted);
    if (sorted == NULL) return te_fail(TE_MEMORY, "no memory for %" PRId64 " tensors", p->n_tensors);
    for (int64_t i = 0; i < p->n_tensors; i++) sorted[i] = &p->tensors[i];
    qsort(sorted, (size_t)p->n_tensors, sizeof *sorted, by_place);
    te_status status = TE_OK;
    for (int64_t i = 1; status == TE_OK && i < p->n_tensors; i++) {
        const te_gguf_entry *a = sorted[i - 1], *b = sorted[i];
        if (by_place(&a, &b) == 0 || a->offset + a->tensor.n_bytes <= b->offset) continue;
        status = te_fail(TE_FORMAT,
                         "%s: tensors '%s' and '%s' overlap: %zu bytes at offset %" PRIu64 ", and %zu at %" PRIu64,
                         p->label, te_gguf_quote(a->tensor.name, one), te_gguf_quote(b->tensor.name, other),
                         a->tensor.n_bytes, a->offset, b->tensor.n_bytes, b->offset);
    }
    free(sorted);
    return status;
}

/* Offsets into pointers. r stands behind the last tensor info. */
static te_status place_tensors(const reader *r, te_gguf_part *p, uint64_t alignment) {
    const size_t padding = (size_t)(-(uint64_t)r->at & (alignment - 1));
    const size_t n_data = padding < left(r) ? left(r) - padding : 0;
    for (int64_t i = 0; i < p->n_tensors; i++) {
        char name[TE_GGUF_QUOTED];
        te_gguf_tensor *t = &p->tensors[i].tensor;
        const uint64_t offset = p->tensors[i].offset;
        te_gguf_quote(t->name, name);
        if (offset % alignment != 0) {
            return te_fail(TE_FORMAT,
                           "%s: tensor '%s' has offset %" PRIu64 ", not a multiple of the alignment %" PRIu64, p->label,
                           name, offset, alignment);
        }
        if (offset > n_data || t->n_bytes > n_data - offset) {
            return te_fail(TE_FORMAT,
                           "%s: tensor '%s' takes %zu bytes at offset %" PRIu64
                           ", but the file has only %zu bytes of data",
                           p->label, name, t->n_bytes, offset, n_data);
        }
        t->data = r->data + r->at + padding + offset;
    }
    return check_overlap(p);
}

static te_status read_header(reader *r, te_gguf_part *p, uint64_t *n_tensors, uint64_t *n_kv) {
    char shown[TE_GGUF_QUOTED];
    if (r->n_bytes == 0) return te_fail(TE_FORMAT, "%s: the file is empty", r->label);
    const char *magic = take(r, 4, "the magic");
    if (magic == NULL) return r->status;
    p->powerinfer = memcmp(magic, "PWRI", 4) == 0;
    if (!p->powerinfer && memcmp(magic, "GGUF", 4) != 0) {
        te_gguf_quote((te_str){magic, 4}, shown);
        return te_fail(TE_FORMAT, "%s: not a GGUF file: it begins with '%s' instead of 'GGUF' or 'PWRI'", r->label,
                       shown);
    }
    const uint32_t version = take_u32(r, "the version");
    if (r->status != TE_OK) return r->status;
    if (version != 0 && (version & 0xffffu) == 0) {
        return te_fail(TE_FORMAT, "%s: a big-endian GGUF file; only little-endian ones are read", r->label);
    }
    if (version != 2 && version != 3) {
        return te_fail(TE_FORMAT, "%s: GGUF version %u is not read, only 2 and 3", r->label, version);
    }
    p->version = (int32_t)version;
    *n_tensors = take_u64(r, "the number of tensors");
    *n_kv = take_u64(r, "the number of keys");
    return r->status;
}

static te_status read_alignment(const te_gguf_part *p, uint64_t *out) {
    int64_t alignment = 32;
    const te_status status = te_gguf_part_i64(p, "general.alignment", 8, TE_GGUF_MAX_ALIGNMENT, &alignment, NULL);
    if (status != TE_OK) return status;
    if ((alignment & (alignment - 1)) != 0) {
        return te_fail(TE_FORMAT, "%s: general.alignment is %" PRId64 ", not a power of two", p->label, alignment);
    }
    *out = (uint64_t)alignment;
    return TE_OK;
}

te_status te_gguf_part_read(te_gguf_part *p, uint64_t seed) {
    reader r = {p->map.data, p->map.n_bytes, 0, p->label, TE_OK};
    uint64_t n_tensors = 0, n_kv = 0, alignment = 32;
    int64_t twice = -1;
    te_status status = read_header(&r, p, &n_tensors, &n_kv);
    if (status == TE_OK) status = read_kvs(&r, p, n_kv);
    if (status == TE_OK) status = te_gguf_index_new(&p->kv_index, seed, p->kv, sizeof *p->kv, p->n_kv, &twice);
    if (status != TE_OK) return status;
    if (twice >= 0) {
        char key[TE_GGUF_QUOTED];
        return te_fail(TE_FORMAT, "%s: duplicate key '%s'", p->label, te_gguf_quote(p->kv[twice].key, key));
    }
    status = read_alignment(p, &alignment);
    if (status != TE_OK) return status;
    status = read_tensors(&r, p, n_tensors);
    return status == TE_OK ? place_tensors(&r, p, alignment) : status;
}
