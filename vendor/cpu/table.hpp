// table.hpp - fills the table of one instruction set; the only place where kernels are enumerated.
namespace {

// A kernel of rows is one function. Unless told so, gcc stops to inline codecs in a file that has become as large as this
// one (Q6_K, AVX2: dot lost 8 %, axpy 10 %).
#define TE_FLAT __attribute__((flatten)) static void
template <class K> struct flat {
    using walk = typename K::walk;
    TE_FLAT act_pack(const float *x, int32_t cols, void *act) { K::act_pack(x, cols, act); }
    TE_FLAT dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y) {
        K::dot(m, rows, ahead, act, y);
    }
    TE_FLAT axpy(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc) {
        K::axpy(m, rows, ahead, a, acc);
    }
};
#undef TE_FLAT
template <class V, class K> constexpr te_row_kernels rows_of(void (*from_f32)(const float *, void *, int32_t)) {
    using F = flat<K>;
    using M = typename few_of<V, F>::type;
    return {K::act_bytes, F::act_pack, F::dot, F::axpy, M::dot, M::axpy, K::acc_add, K::to_f32, from_f32};
}
template <class V, int type, int block, int block_bytes> constexpr te_row_kernels rows_of_any() {
    using K = any_rows<V, type, block, block_bytes>;
    using M = few_of_any<V, type, block, block_bytes>;
    return {K::floats::act_bytes, K::floats::act_pack, K::dot, K::axpy, M::dot, M::axpy,
            K::floats::acc_add,   K::to_f32,           nullptr};
}

// The types that te_quant.c cannot dequantise: formats of intermediate results, and integers.
constexpr bool is_weight(int type) {
    return type != TE_Q8_1 && type != TE_Q8_K && type != TE_I8 && type != TE_I16 && type != TE_I32 && type != TE_I64;
}

struct row_kernels {
    te_row_kernels of[TE_TYPE_LIMIT];
};
template <class V> constexpr row_kernels all_rows() {
    row_kernels k = {};
#define X(tag, id, codec, bytes, n)                                                                                    \
    if (is_weight(id)) k.of[id] = rows_of_any<V, id, n, bytes>();
    TE_TYPES(X)
#undef X
    k.of[TE_F32] = rows_of<V, float_rows<V, codec_f32<V>>>(writers<V>::f32);
    k.of[TE_F16] = rows_of<V, float_rows<V, codec_f16<V>>>(writers<V>::f16);
    k.of[TE_BF16] = rows_of<V, float_rows<V, codec_bf16<V>>>(writers<V>::bf16);
    k.of[TE_Q8_0] = rows_of<V, block_rows<V, codec_q8_0<V>>>(writers<V>::q8_0);
    k.of[TE_Q4_0] = rows_of<V, block_rows<V, codec_q4_0<V>>>(nullptr);
    k.of[TE_Q4_1] = rows_of<V, block_rows<V, codec_q4_1<V>>>(nullptr);
    k.of[TE_Q5_0] = rows_of<V, block_rows<V, codec_q5_0<V>>>(nullptr);
    k.of[TE_Q5_1] = rows_of<V, block_rows<V, codec_q5_1<V>>>(nullptr);
    k.of[TE_IQ4_NL] = rows_of<V, block_rows<V, codec_iq4_nl<V>>>(nullptr);
    k.of[TE_Q2_K] = rows_of<V, k_rows<V, codec_q2_k<V>>>(nullptr);
    k.of[TE_Q3_K] = rows_of<V, k_rows<V, codec_q3_k<V>>>(nullptr);
    k.of[TE_Q4_K] = rows_of<V, k_rows<V, codec_q4_k<V>>>(nullptr);
    k.of[TE_Q5_K] = rows_of<V, k_rows<V, codec_q5_k<V>>>(nullptr);
    k.of[TE_Q6_K] = rows_of<V, k_rows<V, codec_q6_k<V>>>(nullptr);
    k.of[TE_IQ4_XS] = rows_of<V, k_rows<V, codec_iq4_xs<V>>>(nullptr);
    return k;
}
// The row kernels of this object, for kernels that want weights of any type as floats.
template <class V> constexpr row_kernels rows_table = all_rows<V>();
template <class V> const te_row_kernels &row_table(int32_t type) { return rows_table<V>.of[type]; }

template <class V> constexpr te_kernels make_table(const char *name, te_gemm_kernels gemm) {
    te_kernels k = {};
    k.name = name;
    for (int i = 0; i < TE_TYPE_LIMIT; i++) k.row[i] = rows_table<V>.of[i];
    k.gemm = gemm;
    k.rms_norm = elementwise<V>::rms_norm;
    k.layer_norm = elementwise<V>::layer_norm;
    k.softmax = elementwise<V>::softmax;
    k.add = elementwise<V>::add;
    k.sign_pack = elementwise<V>::sign_pack;
    k.sign_dot = elementwise<V>::sign_dot;
    k.glu = elementwise<V>::glu;
    k.rows_dot = heads<V>::dot;
    k.rows_sum = heads<V>::sum;
    k.exp_sum = heads<V>::exp_sum;
    return k;
}
} // namespace

#define TE_KERNEL_TABLE(isa, V, gemm)                                                                                  \
    extern "C" {                                                                                                       \
    extern const te_kernels te_kernels_##isa;                                                                          \
    constexpr te_kernels te_kernels_##isa = make_table<V>(#isa, gemm);                                                 \
    }
