// part_rows_k.hpp - rows of Q4_K, Q5_K and Q6_K.
#include "codec.hpp"
#include "codec_k.hpp"
#include "rows.hpp"
#include "rows_k.hpp"
#include "rows_batch.hpp"
#include "rows_table.hpp"

TE_PART(rows_k) {
    table->row[TE_Q4_K] = rows_of<isa_vec, k_rows<isa_vec, codec_q4_k<isa_vec>>>();
    table->row[TE_Q5_K] = rows_of<isa_vec, k_rows<isa_vec, codec_q5_k<isa_vec>>>();
    table->row[TE_Q6_K] = rows_of<isa_vec, k_rows<isa_vec, codec_q6_k<isa_vec>>>();
}
TE_ISA_END
