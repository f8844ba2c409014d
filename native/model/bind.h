/* bind.h - finding a model's tensors by name; a wrong type or shape fails here, by name. */
#ifndef PI_BIND_H
#define PI_BIND_H

#include "model.h"

typedef struct pi_name {
    char text[96];
} pi_name;
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
pi_name pi_name_of(const char *format, ...);

/* What the file calls a tensor that this model has by that name: a head's layer 0 is one behind the others. */
pi_name pi_name_in_file(const pi_model *m, pi_name name);
/* Whether the file has it. */
bool pi_bind_has(const pi_model *m, pi_name name);
/* The tensor of a name, or NULL; from now on it counts as bound. */
const te_gguf_tensor *pi_bind_take(pi_model *m, const char *name);
/* A matrix of so many rows and cols; 0: any. An absent one is an error unless optional, then mat->w is NULL. */
pi_status pi_bind_mat(pi_model *m, pi_name name, int32_t rows, int32_t cols, bool optional, te_mat *mat);
/* n matrices, one behind the other in a tensor of three dimensions, as one of n * rows rows. */
pi_status pi_bind_mats(pi_model *m, pi_name name, int32_t n, int32_t rows, int32_t cols, te_mat *mat);
/* A vector of n floats, copied. */
pi_status pi_bind_vec(pi_model *m, pi_name name, int32_t n, bool optional, const float **out);
/* The same of n vectors, one behind the other in a tensor of two dimensions. */
pi_status pi_bind_vecs(pi_model *m, pi_name name, int32_t n, int32_t cols, const float **out);
/* n floats of a tensor of one or two dimensions, copied. */
pi_status pi_bind_values(pi_model *m, pi_name name, int32_t n, bool optional, const float **out);
/* Room for n floats, for as long as there is the model. */
pi_status pi_bind_room(pi_model *m, int64_t n, float **out);
/* A vector of n times the same number, which no file has: of norms that do without. */
pi_status pi_bind_constant(pi_model *m, int32_t n, float value, const float **out);
/* Room for n addresses, for as long as there is the model. */
pi_status pi_bind_parts(pi_model *m, int32_t n, const void ***out);
/* The norm of what layer i's feed-forward reads, by the name that its architecture has for it. */
pi_status pi_bind_ffn_norm(pi_model *m, int32_t i, pi_norm *out);
/* A norm's weight and, for LayerNorm, its bias: "PREFIX.weight", "PREFIX.bias". */
pi_status pi_bind_norm(pi_model *m, const char *prefix, bool optional, pi_norm *out);
/* A tensor that nobody asked for is a part of the model that would not be computed: the answers would be wrong. */
pi_status pi_bind_check_all(const pi_model *m);
void pi_bind_free_vectors(pi_model *m);

#endif
