// pinned.cu - host memory that GPUs read. The driver registers a page once for all of them, so who asks for memory that is
// registered shares it, and the last to give it back ends it.
#include <cstdlib>

#include "../core/te_os.h"
#include "launch.h"

namespace te {
namespace {

struct piece {
    piece *next;
    const void *p;
    size_t n_bytes;
    int32_t users;
};
piece *pieces;
te_mutex lock;

piece **find(const void *p) {
    piece **at = &pieces;
    while (*at && (*at)->p != p) at = &(*at)->next;
    return at;
}

cudaError_t add(const void *p, size_t n_bytes, unsigned flags) {
    piece *b = *find(p);
    if (b && b->n_bytes < n_bytes) return cudaErrorHostMemoryAlreadyRegistered;
    if (b) { // of all of it or of its beginning
        b->users++;
        return cudaSuccess;
    }
    b = (piece *)malloc(sizeof *b);
    if (!b) return cudaErrorMemoryAllocation;
    const cudaError_t e = cudaHostRegister((void *)p, n_bytes, flags);
    if (e != cudaSuccess) {
        free(b);
        return e;
    }
    *b = {pieces, p, n_bytes, 1};
    pieces = b;
    return cudaSuccess;
}

cudaError_t remove(const void *p) {
    piece **at = find(p), *b = *at;
    if (!b || --b->users) return b ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
    *at = b->next;
    free(b);
    return cudaHostUnregister((void *)p);
}

} // namespace

cudaError_t pin(const void *p, size_t n_bytes, unsigned flags) {
    te_os_mutex_lock(&lock);
    const cudaError_t e = add(p, n_bytes, flags);
    te_os_mutex_unlock(&lock);
    return e;
}

cudaError_t unpin(const void *p) {
    te_os_mutex_lock(&lock);
    const cudaError_t e = remove(p);
    te_os_mutex_unlock(&lock);
    return e;
}

} // namespace te
