// part_rows_float.hpp - rows of floats, and of the formats that have no codec here.
#include "codec.hpp"
#include "rows.hpp"
#include "rows_batch.hpp"
#include "rows_table.hpp"

TE_PART(rows_float) {
    fill_any_rows<isa_vec>(table);
    table->row[TE_F32] = rows_of<isa_vec, float_rows<isa_vec, codec_f32<isa_vec>>>(writers<isa_vec>::f32);
    table->row[TE_F16] = rows_of<isa_vec, float_rows<isa_vec, codec_f16<isa_vec>>>(writers<isa_vec>::f16);
    table->row[TE_BF16] = rows_of<isa_vec, float_rows<isa_vec, codec_bf16<isa_vec>>>(writers<isa_vec>::bf16);
}
