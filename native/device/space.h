/* space.h - alignments of device memory, and what kernels are allowed for work space. Devices allocate by it and plans
 * count by it. */
#ifndef PI_SPACE_H
#define PI_SPACE_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes: a row is rounded up to the one, an allocation to the other. */
enum { PI_DEVICE_ROW = 16, PI_DEVICE_ALIGN = 256 };

/* What kernels are allowed for work space. At most PI_FEW_TOKENS are computed together with the CPU, with so many partial
 * sums of one token's feed-forward and of attention; chunks of more are matrix products, whose weights are converted in
 * pieces of at most so many bytes, and whose hidden values are made of so many bytes and neurons at a time. Cold weights of
 * such a chunk stream through two buffers, each at most PI_STAGE_BYTES: 0.6 ms of PCIe 5 is more than a transfer takes to
 * start. Shorter chunks of tokens are computed where the weights lie. */
enum {
    PI_FEW_TOKENS = 8,
    PI_PARTS = 384,
    PI_SPLITS = 32,
    PI_PIECE_BYTES = 64 << 20,
    PI_HIDDEN_BYTES = 64 << 20,
    PI_HIDDEN_ROWS = 16384,
    PI_STAGES = 2,
    PI_STAGE_BYTES = 32 << 20
};

/* Partial sums of a feed-forward of n tokens: of several, half as many blocks each make one, where a row is work for
 * several blocks. */
static inline uint64_t pi_parts(uint64_t n_tok, uint64_t n_embd) {
    const uint64_t most = PI_PARTS, each = n_tok > 1 && n_embd >= 4096 ? most / 2 : most;
    return n_tok * each > most ? n_tok * each : most;
}

/* Neurons of a longer chunk's feed-forward that are computed at once, where down is stored by neurons. */
static inline int32_t pi_hidden_rows(int32_t n_ff, int32_t n_tok, bool gated) {
    const int64_t most = PI_HIDDEN_BYTES / (int64_t)sizeof(float) / n_tok / (gated ? 2 : 1) / 256 * 256;
    const int32_t rows = most < 256 ? 256 : most < PI_HIDDEN_ROWS ? (int32_t)most : PI_HIDDEN_ROWS;
    return n_ff < rows ? n_ff : rows;
}

#endif
