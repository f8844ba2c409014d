// blas.cu - cuBLASLt, opened at run time. Nothing of it is needed to build: the few functions, attributes and structures
// that are used are declared here. They are the same in its versions 12 and 13; another version is refused.
#include <cstdlib>
#include <cstring>

#include "../core/te_os.h"
#include "blas.h"

namespace te {
namespace {

typedef void *handle, *description, *layout, *preference;
struct algorithm {
    uint64_t word[8];
};
struct candidate { // what the library's heuristic answers with
    algorithm algo;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};
static_assert(sizeof(candidate) == 96, "as the library has it");

enum { R_32F = 0, R_16F = 2, COMPUTE_32F = 68, OP_N = 0, OP_T = 1, POINTERS_ON_DEVICE = 1 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_RELU = 2, EPILOGUE_BIAS = 4 }; // of the last two also the sum
enum { DESC_POINTER_MODE = 2, DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS = 8 };
enum {
    PREF_WORKSPACE = 1,
    PREF_REDUCTIONS = 3,
    PREF_ALIGN_A = 5,
    PREF_ALIGN_B = 6,
    PREF_ALIGN_C = 7,
    PREF_ALIGN_D = 8
};

struct functions {
    size_t (*version)();
    int (*create)(handle *);
    int (*destroy)(handle);
    int (*desc_create)(description *, int compute, int scale);
    int (*desc_destroy)(description);
    int (*desc_set)(description, int attribute, const void *, size_t);
    int (*layout_create)(layout *, int type, uint64_t rows, uint64_t cols, int64_t ld);
    int (*layout_destroy)(layout);
    int (*pref_create)(preference *);
    int (*pref_destroy)(preference);
    int (*pref_set)(preference, int attribute, const void *, size_t);
    int (*heuristic)(handle, description, layout, layout, layout, layout, preference, int wanted, candidate *,
                     int *found);
    int (*matmul)(handle, description, const void *alpha, const void *a, layout, const void *b, layout,
                  const void *beta, const void *c, layout, void *d, layout, const algorithm *, void *workspace, size_t,
                  cudaStream_t);
};

// A shape that was asked for before: everything but the pointers.
struct shape {
    int64_t m, n, k, lda, ldb, ldc, ldd;
    bool transposed, relu, bias;
};
struct plan {
    shape of;
    description desc;
    layout a, b, c, d;
    candidate best;
};
constexpr int PLANS = 64;

} // namespace
} // namespace te

struct te_cuda_blas {
    te::functions f;
    te::handle lt;
    int32_t version;
    float *constants; // on the device: 0 and 1
    int n_plans, next;
    te::plan plans[te::PLANS];
};

namespace te {
namespace {

void plan_drop(te_cuda_blas *b, plan *p) {
    if (p->desc) (void)b->f.desc_destroy(p->desc);
    for (layout l : {p->a, p->b, p->c, p->d})
        if (l) (void)b->f.layout_destroy(l);
    *p = plan{};
}

bool same(const shape &a, const shape &b) {
    return a.m == b.m && a.n == b.n && a.k == b.k && a.lda == b.lda && a.ldb == b.ldb && a.ldc == b.ldc &&
           a.ldd == b.ldd && a.transposed == b.transposed && a.relu == b.relu && a.bias == b.bias;
}

template <class T> bool set(const te_cuda_blas *b, description to, int attribute, T value) {
    return b->f.desc_set(to, attribute, &value, sizeof value) == 0;
}
template <class T> bool prefer(const te_cuda_blas *b, preference to, int attribute, T value) {
    return b->f.pref_set(to, attribute, &value, sizeof value) == 0;
}

// The library counts by columns: its result has a column for each token, its matrix A is w, its matrix B x.
bool plan_make(te_cuda_blas *b, const shape &s, const float *bias, plan *p) {
    *p = plan{};
    p->of = s;
    const int64_t rows_a = s.transposed ? s.m : s.k, cols_a = s.transposed ? s.k : s.m;
    const int32_t epilogue =
        s.relu || s.bias ? (s.relu ? EPILOGUE_RELU : 0) + (s.bias ? EPILOGUE_BIAS : 0) : EPILOGUE_DEFAULT;
    bool good = b->f.desc_create(&p->desc, COMPUTE_32F, R_32F) == 0 &&
                set(b, p->desc, DESC_POINTER_MODE, (int32_t)POINTERS_ON_DEVICE) &&
                set(b, p->desc, DESC_TRANSA, (int32_t)(s.transposed ? OP_N : OP_T)) &&
                set(b, p->desc, DESC_TRANSB, (int32_t)OP_N) && set(b, p->desc, DESC_EPILOGUE, epilogue) &&
                (!s.bias || set(b, p->desc, DESC_BIAS, (const void *)bias)) &&
                b->f.layout_create(&p->a, R_16F, (uint64_t)rows_a, (uint64_t)cols_a, s.lda) == 0 &&
                b->f.layout_create(&p->b, R_16F, (uint64_t)s.k, (uint64_t)s.n, s.ldb) == 0 &&
                b->f.layout_create(&p->c, R_32F, (uint64_t)s.m, (uint64_t)s.n, s.ldc) == 0 &&
                b->f.layout_create(&p->d, R_32F, (uint64_t)s.m, (uint64_t)s.n, s.ldd) == 0;
    preference wish = nullptr;
    int found = 0;
    good = good && b->f.pref_create(&wish) == 0 && prefer(b, wish, PREF_WORKSPACE, (uint64_t)BLAS_WORKSPACE);
    // Sums of a split product in whatever order they come would give other bits each time: in place is out.
    good = good && prefer(b, wish, PREF_REDUCTIONS, (uint32_t)2);
    for (int attribute : {PREF_ALIGN_A, PREF_ALIGN_B, PREF_ALIGN_C, PREF_ALIGN_D})
        good = good && prefer(b, wish, attribute, (uint32_t)16);
    good = good && b->f.heuristic(b->lt, p->desc, p->a, p->b, p->c, p->d, wish, 1, &p->best, &found) == 0 &&
           found > 0 && p->best.status == 0;
    if (wish) (void)b->f.pref_destroy(wish);
    if (!good) plan_drop(b, p);
    return good;
}

plan *plan_of(te_cuda_blas *b, const shape &s, const float *bias) {
    for (int i = 0; i < b->n_plans; i++)
        if (same(b->plans[i].of, s)) return &b->plans[i];
    plan made;
    if (!plan_make(b, s, bias, &made)) return nullptr;
    plan *to = &b->plans[b->next]; // the oldest gives way
    plan_drop(b, to);
    *to = made;
    if (b->n_plans < PLANS) b->n_plans++;
    b->next = (b->next + 1) % PLANS;
    return to;
}

} // namespace

te_status blas_open(const char *path, te_cuda_blas **out) {
    *out = nullptr;
    char why[256] = "";
    void *library = te_os_library(path, why, sizeof why);
    if (!library) return te_fail(TE_UNSUPPORTED, "cuBLASLt cannot be opened: %s", why);
    te_cuda_blas *b = (te_cuda_blas *)calloc(1, sizeof *b);
    if (!b) return te_fail(TE_MEMORY, "out of memory");
    functions *f = &b->f;
#define GET(member, name) te_os_symbol(library, "cublasLt" name, &f->member, sizeof f->member)
    const bool all = GET(version, "GetVersion") && GET(create, "Create") && GET(destroy, "Destroy") &&
                     GET(desc_create, "MatmulDescCreate") && GET(desc_destroy, "MatmulDescDestroy") &&
                     GET(desc_set, "MatmulDescSetAttribute") && GET(layout_create, "MatrixLayoutCreate") &&
                     GET(layout_destroy, "MatrixLayoutDestroy") && GET(pref_create, "MatmulPreferenceCreate") &&
                     GET(pref_destroy, "MatmulPreferenceDestroy") && GET(pref_set, "MatmulPreferenceSetAttribute") &&
                     GET(heuristic, "MatmulAlgoGetHeuristic") && GET(matmul, "Matmul");
#undef GET
    te_status s = TE_OK;
    if (!all) {
        s = te_fail(TE_UNSUPPORTED, "%s is not cuBLASLt: functions are missing", path);
    } else {
        const size_t v = f->version(); // 1000 * major before 12.? and 10000 * major since
        b->version = (int32_t)(v < 100000 ? v / 1000 * 10000 + v % 1000 : v);
        const int major = b->version / 10000;
        if (major != 12 && major != 13)
            s = te_fail(TE_UNSUPPORTED, "%s: cuBLASLt is of version %d, 12 or 13 is needed", path, major);
    }
    if (s == TE_OK && f->create(&b->lt) != 0) s = te_fail(TE_UNSUPPORTED, "%s: cublasLtCreate failed", path);
    const float values[2] = {0, 1};
    if (s == TE_OK) s = cuda_status(cudaMalloc((void **)&b->constants, sizeof values), "cudaMalloc");
    if (s == TE_OK)
        s = cuda_status(cudaMemcpy(b->constants, values, sizeof values, cudaMemcpyHostToDevice), "cudaMemcpy");
    if (s != TE_OK) {
        blas_close(b);
        return s;
    }
    *out = b;
    return TE_OK;
}

void blas_close(te_cuda_blas *b) {
    if (!b) return;
    for (plan &p : b->plans) plan_drop(b, &p);
    if (b->constants) (void)cudaFree(b->constants);
    if (b->lt) (void)b->f.destroy(b->lt);
    free(b);
}

int32_t blas_version(const te_cuda_blas *b) { return b->version; }

te_status blas_multiply(te_cuda *d, te_cuda_blas *b, const half_product *p, void *workspace) {
    const shape s = {p->n_out,          p->n_tok,        p->k,
                     (int64_t)p->ldw,   (int64_t)p->ldx, (int64_t)(p->add ? p->ld_add : p->ldy),
                     (int64_t)p->ldy,   p->transposed,   p->relu,
                     p->bias != nullptr};
    // What the library does when it meets a shape first may not be recorded, and need not be.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    TE_CUDA_TRY(cuda_status(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode"));
    plan *use = plan_of(b, s, p->bias);
    const bool has = use && (!s.bias || set(b, use->desc, DESC_BIAS, (const void *)p->bias));
    const int status =
        has ? b->f.matmul(b->lt, use->desc, p->scale, p->w, use->a, p->x, use->b, b->constants + (p->add ? 1 : 0),
                          p->add ? p->add : p->y, use->c, p->y, use->d, &use->best.algo, workspace, BLAS_WORKSPACE,
                          d->capturing ? d->capture : d->stream)
            : 0;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (!has)
        return te_fail(TE_UNSUPPORTED, "cuBLASLt has no product of %d tokens, %d values and %d outputs", p->n_tok, p->k,
                       p->n_out);
    return status == 0 ? TE_OK : te_fail(TE_DEVICE, "cublasLtMatmul: status %d", status);
}

} // namespace te
