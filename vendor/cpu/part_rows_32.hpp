// part_rows_32.hpp - rows of blocks of 32 weights.
#include "codec.hpp"
#include "codec_32.hpp"
#include "rows.hpp"
#include "rows_batch.hpp"
#include "rows_table.hpp"
#include "rows_q4_0.hpp"
#include "rows_panel.hpp"
#include "rows_tile.hpp"
#include "rows_q8_0.hpp"

namespace {
template <class V> te_row_kernels rows_of_q4_0() {
    if constexpr (V::q4_0_by_blocks && V::lanes == 8)
        return rows_of<V, q4_0_rows<V>, panel_rows<V, row_tile<V, q4_0_lanes<V>>>>();
    else if constexpr (V::q4_0_by_blocks)
        return rows_of<V, q4_0_rows<V>, panel_rows<V, block_panel<V, q4_0_in_panel<V>>>>();
    else
        return rows_of<V, block_rows<V, codec_q4_0<V>>>();
}
template <class V> te_row_kernels rows_of_q8_0() {
    if constexpr (V::q4_0_by_blocks && V::lanes == 8)
        return rows_of<V, q8_0_rows<V>, panel_rows<V, row_tile<V, q8_0_lanes<V>>>>(writers<V>::q8_0);
    else if constexpr (V::q4_0_by_blocks)
        return rows_of<V, q8_0_rows<V>, panel_rows<V, block_panel<V, q8_0_in_panel<V>>>>(writers<V>::q8_0);
    else
        return rows_of<V, block_rows<V, codec_q8_0<V>>>(writers<V>::q8_0);
}
} // namespace

TE_PART(rows_32) {
    table->row[TE_Q8_0] = rows_of_q8_0<isa_vec>();
    table->row[TE_Q4_0] = rows_of_q4_0<isa_vec>();
    table->row[TE_Q4_1] = rows_of<isa_vec, block_rows<isa_vec, codec_q4_1<isa_vec>>>();
    table->row[TE_Q5_0] = rows_of<isa_vec, block_rows<isa_vec, codec_q5_0<isa_vec>>>();
    table->row[TE_Q5_1] = rows_of<isa_vec, block_rows<isa_vec, codec_q5_1<isa_vec>>>();
    table->row[TE_IQ4_NL] = rows_of<isa_vec, block_rows<isa_vec, codec_iq4_nl<isa_vec>>>();
    table->row[TE_MXFP4] = rows_of<isa_vec, block_rows<isa_vec, codec_mxfp4<isa_vec>>>();
}
