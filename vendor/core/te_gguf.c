/* te_gguf.c - a model as one handle, whether it lies in one file or several. */
#include "te_gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "te_gguf_part.h"

struct te_gguf {
    uint64_t seed;
    te_gguf_part *parts;
    int32_t n_parts;
    te_gguf_tensor *tensors; /* of all parts */
    int64_t n_tensors;
    te_gguf_index tensor_index;
};

enum {
    LABEL_BYTES = 320,
    SUFFIX_BYTES = 20, /* "-00001-of-00002.gguf" */
    SUFFIX_ROOM = 40,
};

static char *copy_bytes(const char *p, size_t n) {
    char *copy = malloc(n + 1);
    if (copy == NULL) return NULL;
    memcpy(copy, p, n);
    copy[n] = 0;
    return copy;
}

/* The end of a long path is what tells files apart, and an error has only so much room. */
static char *label_of(const char *path) {
    const size_t n = strlen(path);
    if (n < LABEL_BYTES) return copy_bytes(path, n);
    char *label = copy_bytes(path + n - LABEL_BYTES, LABEL_BYTES);
    if (label != NULL) memcpy(label, "...", 3);
    return label;
}

static void part_free(te_gguf_part *p) {
    te_gguf_index_free(&p->kv_index);
    free(p->kv);
    free(p->tensors);
    if (p->owns_map) te_os_unmap(&p->map);
    free(p->label);
    *p = (te_gguf_part){0};
}

static te_status part_open(te_gguf_part *p, const char *path, uint64_t seed) {
    p->label = label_of(path);
    if (p->label == NULL) return te_fail(TE_MEMORY, "no memory for a path");
    const te_status status = te_os_map(path, &p->map);
    if (status != TE_OK) return status;
    p->owns_map = true;
    return te_gguf_part_read(p, seed);
}

/* Which part of how many a file says it is: 0 of 1 when it is whole. (A merged set keeps the keys with a count of 0.)
 */
static te_status split_of(const te_gguf_part *p, int64_t *no, int64_t *count) {
    bool numbered;
    *no = 0;
    *count = 0;
    te_status status = te_gguf_part_i64(p, "split.count", 0, TE_GGUF_MAX_PARTS, count, NULL);
    if (status != TE_OK) return status;
    if (*count <= 1) {
        *count = 1;
        return TE_OK;
    }
    status = te_gguf_part_i64(p, "split.no", 0, *count - 1, no, &numbered);
    if (status == TE_OK && !numbered)
        return te_fail(TE_FORMAT, "%s: split.count is %" PRId64 ", but split.no is missing", p->label, *count);
    return status;
}

/* Always SUFFIX_BYTES long: a count is at most TE_GGUF_MAX_PARTS. */
static void suffix_of(int64_t no, int64_t count, char out[SUFFIX_ROOM]) {
    snprintf(out, SUFFIX_ROOM, "-%05d-of-%05d.gguf", (int)no + 1, (int)count);
}

static te_status check_part(const te_gguf_part *p, const te_gguf_part *first, int64_t no, int64_t count) {
    int64_t own_no, own_count;
    const te_status status = split_of(p, &own_no, &own_count);
    if (status != TE_OK) return status;
    if (own_no != no || own_count != count) {
        return te_fail(TE_FORMAT,
                       "%s: holds part %" PRId64 " of %" PRId64 ", where part %" PRId64 " of %" PRId64 " is expected",
                       p->label, own_no + 1, own_count, no + 1, count);
    }
    if (p->powerinfer != first->powerinfer)
        return te_fail(TE_FORMAT, "%s: its magic differs from that of the first part", p->label);
    return TE_OK;
}

/* Opens the other parts of the set that `opened`, part `no`, belongs to. g->parts has room for all; `opened` stands in
 * its place. */
static te_status open_rest(te_gguf *g, const char *path, int64_t no, int64_t count) {
    char suffix[SUFFIX_ROOM];
    const size_t n = strlen(path);
    suffix_of(no, count, suffix);
    if (n < SUFFIX_BYTES || strcmp(path + n - SUFFIX_BYTES, suffix) != 0) {
        return te_fail(TE_FORMAT, "%s: holds part %" PRId64 " of %" PRId64 ", so its name must end in %s",
                       g->parts[no].label, no + 1, count, suffix);
    }
    char *other = copy_bytes(path, n);
    if (other == NULL) return te_fail(TE_MEMORY, "no memory for a path");
    te_status status = TE_OK;
    for (int64_t i = 0; status == TE_OK && i < count; i++) {
        if (i != no) {
            suffix_of(i, count, suffix);
            memcpy(other + n - SUFFIX_BYTES, suffix, SUFFIX_BYTES);
            status = part_open(&g->parts[i], other, g->seed);
            if (status != TE_OK) te_fail(status, "part %" PRId64 " of %" PRId64 ": %s", i + 1, count, te_last_error());
        }
        if (status == TE_OK) status = check_part(&g->parts[i], &g->parts[0], i, count);
    }
    free(other);
    return status;
}

/* One list of tensors and one index over all parts. */
static te_status join_parts(te_gguf *g) {
    const te_gguf_part *first = &g->parts[0];
    int64_t total = 0, expected = -1, twice;
    for (int32_t i = 0; i < g->n_parts; i++) total += g->parts[i].n_tensors;
    if (total > INT32_MAX) return te_fail(TE_FORMAT, "%s: %" PRId64 " tensors are too many", first->label, total);
    if (g->n_parts > 1) {
        const te_status status = te_gguf_part_i64(first, "split.tensors.count", 0, INT32_MAX, &expected, NULL);
        if (status != TE_OK) return status;
        if (expected >= 0 && expected != total) {
            return te_fail(TE_FORMAT, "%s: split.tensors.count is %" PRId64 ", but the parts hold %" PRId64 " tensors",
                           first->label, expected, total);
        }
    }
    g->tensors = malloc(((size_t)total + 1) * sizeof *g->tensors);
    if (g->tensors == NULL) return te_fail(TE_MEMORY, "no memory for %" PRId64 " tensors", total);
    for (int32_t i = 0; i < g->n_parts; i++) {
        te_gguf_part *p = &g->parts[i];
        for (int64_t t = 0; t < p->n_tensors; t++) {
            p->tensors[t].tensor.part = i;
            g->tensors[g->n_tensors++] = p->tensors[t].tensor;
        }
        free(p->tensors);
        p->tensors = NULL;
    }
    const te_status status =
        te_gguf_index_new(&g->tensor_index, g->seed, g->tensors, sizeof *g->tensors, g->n_tensors, &twice);
    if (status != TE_OK) return status;
    if (twice >= 0) {
        char name[TE_GGUF_QUOTED];
        te_gguf_quote(g->tensors[twice].name, name);
        return te_fail(TE_FORMAT, "%s: duplicate tensor name '%s'", g->parts[g->tensors[twice].part].label, name);
    }
    return TE_OK;
}

static te_gguf *handle_new(void) {
    te_gguf *g = calloc(1, sizeof *g);
    if (g == NULL) return NULL;
    /* The clock and the address: nothing that the writer of a file can know. */
    g->seed = ((uint64_t)te_os_now_ns() ^ (uint64_t)(uintptr_t)g) * 0x9e3779b97f4a7c15u;
    g->n_parts = 1;
    g->parts = calloc(1, sizeof *g->parts);
    if (g->parts == NULL) {
        free(g);
        return NULL;
    }
    return g;
}

static te_status finish(te_gguf *g, te_status status, te_gguf **out) {
    if (status == TE_OK) status = join_parts(g);
    if (status != TE_OK) {
        te_gguf_close(g);
        return status;
    }
    *out = g;
    return TE_OK;
}

te_status te_gguf_open(const char *path, te_gguf **out) {
    int64_t no = 0, count = 1;
    *out = NULL;
    te_gguf *g = handle_new();
    if (g == NULL) return te_fail(TE_MEMORY, "no memory for a file handle");
    te_status status = part_open(&g->parts[0], path, g->seed);
    if (status == TE_OK) status = split_of(&g->parts[0], &no, &count);
    if (status == TE_OK && count > 1) {
        te_gguf_part *parts = calloc((size_t)count, sizeof *parts);
        if (parts == NULL) return finish(g, te_fail(TE_MEMORY, "no memory for %" PRId64 " parts", count), out);
        parts[no] = g->parts[0];
        free(g->parts);
        g->parts = parts;
        g->n_parts = (int32_t)count;
        status = open_rest(g, path, no, count);
    }
    return finish(g, status, out);
}

te_status te_gguf_open_memory(const void *data, size_t n_bytes, te_gguf **out) {
    int64_t no = 0, count = 1;
    *out = NULL;
    te_gguf *g = handle_new();
    if (g == NULL) return te_fail(TE_MEMORY, "no memory for a file handle");
    te_gguf_part *p = &g->parts[0];
    p->label = label_of("buffer");
    if (p->label == NULL) return finish(g, te_fail(TE_MEMORY, "no memory for a name"), out);
    p->map = (te_mapping){data, n_bytes};
    te_status status = te_gguf_part_read(p, g->seed);
    if (status == TE_OK) status = split_of(p, &no, &count);
    if (status == TE_OK && count > 1) {
        status = te_fail(TE_FORMAT, "buffer: part %" PRId64 " of %" PRId64 " of a split model; only files can be split",
                         no + 1, count);
    }
    return finish(g, status, out);
}

void te_gguf_close(te_gguf *g) {
    if (g == NULL) return;
    te_gguf_index_free(&g->tensor_index);
    free(g->tensors);
    for (int32_t i = 0; i < g->n_parts; i++) part_free(&g->parts[i]);
    free(g->parts);
    free(g);
}

const te_gguf_part *te_gguf_first_part(const te_gguf *g) { return &g->parts[0]; }

bool te_gguf_is_powerinfer(const te_gguf *g) { return g->parts[0].powerinfer; }
int32_t te_gguf_version(const te_gguf *g) { return g->parts[0].version; }
int32_t te_gguf_n_parts(const te_gguf *g) { return g->n_parts; }

uint64_t te_gguf_n_bytes(const te_gguf *g) {
    uint64_t n = 0;
    for (int32_t i = 0; i < g->n_parts; i++) n += g->parts[i].map.n_bytes;
    return n;
}

const void *te_gguf_mapping(const te_gguf *g, int32_t part, size_t *n_bytes) {
    *n_bytes = 0;
    if (part < 0 || part >= g->n_parts) return NULL;
    *n_bytes = g->parts[part].map.n_bytes;
    return g->parts[part].map.data;
}

int64_t te_gguf_n_kv(const te_gguf *g) { return g->parts[0].n_kv; }

const te_kv *te_gguf_kv_at(const te_gguf *g, int64_t i) {
    return i >= 0 && i < te_gguf_n_kv(g) ? &g->parts[0].kv[i] : NULL;
}

const te_kv *te_gguf_find(const te_gguf *g, const char *key) { return te_gguf_part_find(&g->parts[0], key); }

int64_t te_gguf_n_tensors(const te_gguf *g) { return g->n_tensors; }

const te_gguf_tensor *te_gguf_tensor_at(const te_gguf *g, int64_t i) {
    return i >= 0 && i < g->n_tensors ? &g->tensors[i] : NULL;
}

const te_gguf_tensor *te_gguf_find_tensor(const te_gguf *g, const char *name) {
    return te_gguf_index_find(&g->tensor_index, (te_str){name, strlen(name)});
}
