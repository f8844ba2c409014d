/* file.h - pi_file: a GGUF file as the public interface shows it. */
#ifndef PI_FILE_H
#define PI_FILE_H

#include "../../vendor/core/te_gguf.h"
#include "../common.h"

struct pi_file {
    pi_ref ref;
    te_gguf *gguf;
};

#endif
