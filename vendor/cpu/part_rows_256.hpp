// part_rows_256.hpp - rows of the other formats of 256 weights.
#include "codec.hpp"
#include "codec_k.hpp"
#include "codec_32.hpp"
#include "codec_256.hpp"
#include "rows.hpp"
#include "rows_k.hpp"
#include "rows_batch.hpp"
#include "rows_table.hpp"

TE_PART(rows_256) {
    table->row[TE_Q2_K] = rows_of<isa_vec, k_rows<isa_vec, codec_q2_k<isa_vec>>>();
    table->row[TE_Q3_K] = rows_of<isa_vec, k_rows<isa_vec, codec_q3_k<isa_vec>>>();
    table->row[TE_IQ4_XS] = rows_of<isa_vec, k_rows<isa_vec, codec_iq4_xs<isa_vec>>>();
}
