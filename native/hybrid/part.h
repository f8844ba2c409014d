/* part.h - a part of prompts while some of its layers are computed (part.c). */
#ifndef PI_PART_H
#define PI_PART_H

#include "hybrid.h"

typedef struct pi_hybrid_part {
    pi_hybrid run; /* what its programs read: the session's devices, with tokens and inputs of its own */
    pi_device_part device;
    int32_t n_done, n_next; /* layers that are computed; that come with the next run */
    bool is_under_way, is_lost;
    int64_t ns; /* that its layers took since they were asked for last */
} pi_hybrid_part;

#endif
