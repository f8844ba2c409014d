// rows_table.hpp - the row kernels of a format, as te_kernels.h wants them.
#ifndef TE_ROWS_TABLE_HPP
#define TE_ROWS_TABLE_HPP

namespace {

// A kernel of rows is one function. Unless told so, gcc does not inline all of a codec (Q6_K, AVX2: dot lost 8 %, axpy
// 10 %).
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

// M: the kernels for several tokens. from_f32: NULL unless the format can be written.
template <class V, class K, class M = typename batch_of<V, flat<K>>::type>
te_row_kernels rows_of(void (*from_f32)(const float *, void *, int32_t) = nullptr) {
    using F = flat<K>;
    return {K::act_bytes, F::act_pack, F::dot, F::axpy, M::dot, M::axpy, K::acc_add, K::to_f32, from_f32};
}

// The types that te_quant.c cannot dequantise: formats of intermediate results, and integers.
constexpr bool is_weight(int type) {
    return type != TE_Q8_1 && type != TE_Q8_K && type != TE_I8 && type != TE_I16 && type != TE_I32 && type != TE_I64;
}
template <class V> void fill_any_rows(te_kernels *table) {
    using K = any_rows<V>;
    using M = batch_of_any<V>;
#define X(tag, id, codec, bytes, n)                                                                                    \
    static_assert(K::piece % n == 0, "whole blocks");                                                                  \
    if constexpr (is_weight(id))                                                                                       \
        table->row[id] = {K::floats::act_bytes, K::floats::act_pack, K::dot, K::axpy, M::dot, M::axpy,                 \
                          K::floats::acc_add,   any_to_f32<id>,      nullptr};
    TE_TYPES(X)
#undef X
}
} // namespace

#endif
