/* te_quant.h - scalar conversion between float rows and every weight format: the reference that fast kernels are held
 * to. */
#ifndef TE_QUANT_H
#define TE_QUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "te_status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* True if te_dequantize_row knows the type (every type that gguf.quants can dequantise, and the float types). */
bool te_can_dequantize(int32_t type);

/* n weights (a multiple of the type's block) at src to floats; src needs no alignment. The type must pass
 * te_can_dequantize. */
void te_dequantize_row(int32_t type, const void *src, float *dst, int64_t n);

/* The reverse, for F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 with the bits of ggml's reference, and for Q2_K to Q6_K
 * and IQ4_NL, which search for the block of least error; false for other types. What is written for infinities and NaNs
 * is not defined, but written it is. */
bool te_can_quantize(int32_t type);
void te_quantize_row(int32_t type, const float *src, void *dst, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
