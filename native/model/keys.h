/* keys.h - typed reading of architecture keys: "<arch>.<name>". *out keeps its value when the key is absent; found may
 * be NULL. */
#ifndef PI_KEYS_H
#define PI_KEYS_H

#include "file.h"

pi_status pi_key_i64(const te_gguf *g, const char *arch, const char *name, int64_t lo, int64_t hi, int64_t *out,
                     bool *found);
pi_status pi_key_f32(const te_gguf *g, const char *arch, const char *name, float *out, bool *found);
pi_status pi_key_bool(const te_gguf *g, const char *arch, const char *name, bool *out);
pi_status pi_key_str(const te_gguf *g, const char *arch, const char *name, te_str *out, bool *found);
/* A soft cap, `unsaid` where the key is absent; 0: none. FORMAT unless it is positive or 0. */
pi_status pi_key_cap(const te_gguf *g, const char *arch, const char *name, float unsaid, float *out);
/* One number of each of n layers: an array of integers or truth values, or one integer for all. */
pi_status pi_key_each(const te_gguf *g, const char *arch, const char *name, int32_t n, int32_t lo, int32_t hi,
                      int32_t *out, bool *found);
/* The number of layer i of n: of an array of floats, or one for all. FORMAT if the key is absent or it is NaN. */
pi_status pi_key_f32_of(const te_gguf *g, const char *arch, const char *name, int32_t n, int32_t i, float *out);
/* As pi_key_i64, and FORMAT if the key is absent. */
pi_status pi_key_need_i32(const te_gguf *g, const char *arch, const char *name, int32_t lo, int32_t hi, int32_t *out);

#endif
