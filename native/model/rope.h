/* rope.h - rotary position embedding: angle of pair i at position p is p * freq[i]; cos and sin are multiplied by
 * `magnitude` (YaRN). NORM rotates neighbours (2i, 2i+1), NEOX rotates (i, i + n_rot/2). */
#ifndef PI_ROPE_H
#define PI_ROPE_H

#include "file.h"

typedef enum pi_rope_kind { PI_ROPE_NONE, PI_ROPE_NORM, PI_ROPE_NEOX } pi_rope_kind;

typedef struct pi_rope {
    pi_rope_kind kind;
    int32_t n_rot; /* leading values of a head that are rotated; even */
    float magnitude;
    float log_factor; /* ln of YaRN's factor; 0: there is none */
    float *freq;      /* [n_rot/2] radians per position; owned */
    char text[48];
} pi_rope;

/* Reads the rope keys of arch and, if present, the tensor rope_freqs.weight. Errors: FORMAT, UNSUPPORTED (unknown
 * scaling), MEMORY. yarn_exact: the borders of YaRN's ramp may lie between pairs; no key says so.
 * factors: the tensor that divides frequencies, "rope_freqs.weight" or one of longrope's. */
pi_status pi_rope_init(pi_rope *r, pi_rope_kind kind, const te_gguf *g, const char *arch, int32_t n_embd_head,
                       int32_t n_ctx_train, bool yarn_exact, const char *factors);
/* That of layers with a window, which some models have apart: rope.freq_base_swa, without scaling. base: where the
 * file does not say it; 0: that of the full ones. n_embd_head: of these layers, 0: the others'. */
pi_status pi_rope_init_window(pi_rope *r, const pi_rope *full, const te_gguf *g, const char *arch, float base,
                              int32_t n_embd_head);
void pi_rope_free(pi_rope *r);

/* cos and sin of position pos: cs[2*i], cs[2*i+1], i < n_rot/2, times magnitude. */
void pi_rope_angles(const pi_rope *r, double pos, float magnitude, float *cs);
/* Rotates one head in place. */
void pi_rope_apply(const pi_rope *r, const float *cs, float *head);

#endif
