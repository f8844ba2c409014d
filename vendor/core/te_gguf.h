/* te_gguf.h - reads GGUF files (versions 2 and 3, magic "GGUF" or PowerInfer's "PWRI"), memory-mapped, hostile until
 * checked.
 *
 * Layout, little endian:
 *   1. magic[4], version u32, n_tensors u64, n_kv u64
 *   2. n_kv pairs: key string (u64 length, bytes), value type u32, value (an array is: element type u32, count u64,
 *      elements)
 *   3. n_tensors infos: name string, n_dims u32, dims u64[n_dims] (dims[0] contiguous), type u32, offset u64 into the
 *      data
 *   4. padding to general.alignment (default 32), then the data
 * A model may be split into files NAME-00001-of-0000N.gguf with the keys split.no, split.count and split.tensors.count;
 * opening any one of them opens all, as one. */
#ifndef TE_GGUF_H
#define TE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "te_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_gguf te_gguf;

typedef enum te_kv_type {
    TE_KV_U8,
    TE_KV_I8,
    TE_KV_U16,
    TE_KV_I16,
    TE_KV_U32,
    TE_KV_I32,
    TE_KV_F32,
    TE_KV_BOOL,
    TE_KV_STRING,
    TE_KV_ARRAY,
    TE_KV_U64,
    TE_KV_I64,
    TE_KV_F64
} te_kv_type;

/* Bytes in the file: not terminated by a zero, may hold one, need not be UTF-8. */
typedef struct te_str {
    const char *p;
    size_t n;
} te_str;
bool te_str_is(te_str s, const char *text);

/* One key and its value. data points into the mapping and may be unaligned. For a string: its bytes (n_bytes long). For
 * an array: the elements as they stand in the file (strings: u64 length and bytes, one after the other; nested arrays
 * are refused on opening). */
typedef struct te_kv {
    te_str key;
    int32_t type;         /* te_kv_type */
    int32_t element_type; /* of an array, else -1 */
    uint64_t n;           /* elements of an array, else 1 */
    const void *data;
    size_t n_bytes;
} te_kv;

typedef struct te_gguf_tensor {
    te_str name;
    int32_t type;     /* te_type: always a known one with size > 0 */
    int32_t n_dims;   /* 1..4 */
    int64_t ne[4];    /* ne[0] contiguous; 1 beyond n_dims; each >= 1, the product of all checked against overflow */
    const void *data; /* n_bytes inside the mapping, checked, aligned to general.alignment (>= 8) within its file;
                         tensors share all bytes or none */
    size_t n_bytes;
    int32_t part; /* which file of a split, from 0 */
} te_gguf_tensor;

/* Opens path and the other parts of a split. On any failure nothing stays open and *out is NULL.
 * Errors: TE_IO (cannot open or map), TE_FORMAT (what is wrong, with the value and the offset), TE_MEMORY. */
te_status te_gguf_open(const char *path, te_gguf **out);
/* The same over a buffer that the caller keeps (tests, fuzzing); splits are refused. */
te_status te_gguf_open_memory(const void *data, size_t n_bytes, te_gguf **out);
void te_gguf_close(te_gguf *g); /* NULL is allowed */

bool te_gguf_is_powerinfer(const te_gguf *g); /* magic PWRI */
int32_t te_gguf_version(const te_gguf *g);
int32_t te_gguf_n_parts(const te_gguf *g);
uint64_t te_gguf_n_bytes(const te_gguf *g); /* of all parts */
/* The mapping of a part, for advice and locking. */
const void *te_gguf_mapping(const te_gguf *g, int32_t part, size_t *n_bytes);

int64_t te_gguf_n_kv(const te_gguf *g); /* of the first part; the others' keys are only checked */
const te_kv *te_gguf_kv_at(const te_gguf *g, int64_t i);
const te_kv *te_gguf_find(const te_gguf *g, const char *key); /* NULL if absent; O(1) */

int64_t te_gguf_n_tensors(const te_gguf *g); /* of all parts; names are unique over all (checked) */
const te_gguf_tensor *te_gguf_tensor_at(const te_gguf *g, int64_t i);
const te_gguf_tensor *te_gguf_find_tensor(const te_gguf *g, const char *name); /* O(1) */

/* Typed scalars. Integers of any width convert when the value fits; f32 takes F32 and F64; a wrong type or a value out
 * of range is TE_FORMAT with key and value named. If the key is absent *out keeps its value and *found (may be NULL) is
 * false. */
te_status te_gguf_get_i64(const te_gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *out, bool *found);
te_status te_gguf_get_f32(const te_gguf *g, const char *key, float *out, bool *found);
te_status te_gguf_get_bool(const te_gguf *g, const char *key, bool *out, bool *found);
te_status te_gguf_get_str(const te_gguf *g, const char *key, te_str *out, bool *found);

#ifdef __cplusplus
}
#endif
#endif
