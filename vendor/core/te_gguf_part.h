/* te_gguf_part.h - private to te_gguf*.c: one file of a model, and the index that finds names. */
#ifndef TE_GGUF_PART_H
#define TE_GGUF_PART_H

#include "te_gguf.h"
#include "te_os.h"

/* Limits beyond the format's own. A key has 1 to 65535 bytes by the specification. */
enum {
    TE_GGUF_MAX_KEY = 65535,
    TE_GGUF_MAX_TENSOR_NAME = 127, /* ggml: 63, builds of it for image models 127 */
    TE_GGUF_MAX_ALIGNMENT = 1 << 20,
    TE_GGUF_MAX_PARTS = 1024,
    TE_GGUF_QUOTED = 68
};

/* Names to positions: open addressing with linear probing, at most half full; slots hold position + 1, or 0. The hash
 * is keyed with a seed that differs from handle to handle, so that a file cannot be made to collide. */
typedef struct te_gguf_index {
    uint32_t *slot;
    uint64_t mask;
    uint64_t seed;
    const uint8_t *items; /* each begins with the te_str that is its name */
    size_t item_bytes;
} te_gguf_index;

/* Indexes n items (n < 2^31). *twice is the position of an item whose name an earlier one has, else -1. TE_MEMORY. */
te_status te_gguf_index_new(te_gguf_index *x, uint64_t seed, const void *items, size_t item_bytes, int64_t n,
                            int64_t *twice);
const void *te_gguf_index_find(const te_gguf_index *x, te_str name); /* the item, or NULL */
void te_gguf_index_free(te_gguf_index *x);

/* A tensor and where its bytes lie in the data of its file. */
typedef struct te_gguf_entry {
    te_gguf_tensor tensor;
    uint64_t offset;
} te_gguf_entry;

typedef struct te_gguf_part {
    char *label; /* how errors call the file */
    te_mapping map;
    bool owns_map;
    bool powerinfer;
    int32_t version;
    te_kv *kv;
    int64_t n_kv;
    te_gguf_index kv_index;
    te_gguf_entry *tensors;
    int64_t n_tensors;
} te_gguf_part;

/* Checks all of p->map and fills what follows it; label and map are set. On failure the part is to be freed all the
 * same. */
te_status te_gguf_part_read(te_gguf_part *p, uint64_t seed);

/* te_gguf_get_i64 for one part. */
te_status te_gguf_part_i64(const te_gguf_part *p, const char *key, int64_t lo, int64_t hi, int64_t *out, bool *found);
const te_kv *te_gguf_part_find(const te_gguf_part *p, const char *key);
const te_gguf_part *te_gguf_first_part(const te_gguf *g);

/* A name as an error shows it: printable, cut to fit. Returns out. */
const char *te_gguf_quote(te_str name, char out[TE_GGUF_QUOTED]);

#endif
