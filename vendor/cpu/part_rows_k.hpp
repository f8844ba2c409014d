// part_rows_k.hpp - rows of Q4_K, Q5_K and Q6_K.
#include "codec.hpp"
#include "codec_k.hpp"
#include "rows.hpp"
#include "rows_k.hpp"
#include "rows_batch.hpp"
#include "rows_table.hpp"
#include "rows_q4_0.hpp"
#include "rows_panel.hpp"
#include "rows_tile.hpp"
#include "rows_units.hpp"
#include "rows_units_wide.hpp"

namespace {
template <class V, class C, class B> te_row_kernels rows_of_units() {
    if constexpr (V::q4_0_by_blocks && V::lanes == 8)
        return rows_of<V, units_rows<V, C, B>, panel_rows<V, row_tile<V, units_lanes<V, C, B>>>>();
    else if constexpr (V::q4_0_by_blocks)
        return rows_of<V, wide_units<V, C, B>, panel_rows<V, wide_panel<V, C, B>>>();
    else
        return rows_of<V, k_rows<V, C>>();
}
} // namespace

TE_PART(rows_k) {
    table->row[TE_Q4_K] = rows_of_units<isa_vec, codec_q4_k<isa_vec>, te_block_q4_k>();
    table->row[TE_Q5_K] = rows_of_units<isa_vec, codec_q5_k<isa_vec>, te_block_q5_k>();
    table->row[TE_Q6_K] = rows_of_units<isa_vec, codec_q6_k<isa_vec>, te_block_q6_k>();
}
