/* te_layout.h - how rows of each weight format lie in the memory of a device.
 *
 * Where a format has one plane, a row is as in the file. Of others the fields of all blocks of a row stand together, a plane
 * behind the other, so that 16 bytes can be loaded at once. */
#ifndef TE_LAYOUT_H
#define TE_LAYOUT_H

#include <stdbool.h>

#include "te_types.h"

enum { TE_PLANES = 4 };

typedef struct te_plane {
    int32_t at, n_bytes; /* of a block */
} te_plane;

typedef struct te_layout {
    int32_t n_planes;
    bool in_file; /* kernels read rows of a file in host memory, too */
    te_plane plane[TE_PLANES];
} te_layout;

#ifdef __cplusplus
extern "C" {
#endif

/* NULL: devices have no kernels for the format. */
const te_layout *te_layout_get(int32_t type);

#ifdef __cplusplus
}
#endif

#endif
