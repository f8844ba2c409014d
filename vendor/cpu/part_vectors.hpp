// part_vectors.hpp - what works on vectors of floats: norms, activations, attention's rows, recurrent states.
#include "codec.hpp"
#include "elem.hpp"
#include "heads.hpp"
#include "recurrent.hpp"

TE_PART(vectors) {
    using elem = elementwise<isa_vec>;
    table->rms_norm = elem::rms_norm;
    table->layer_norm = elem::layer_norm;
    table->softmax = elem::softmax;
    table->add = elem::add;
    table->sign_pack = elem::sign_pack;
    table->sign_dot = elem::sign_dot;
    table->glu = elem::glu;
    table->xielu = elem::xielu;
    table->soft_cap = elem::soft_cap;
    table->rows_dot = heads<isa_vec>::dot;
    table->rows_sum = heads<isa_vec>::sum;
    table->exp_sum = heads<isa_vec>::exp_sum;
    table->conv = recurrent<isa_vec>::conv;
    table->scan = recurrent<isa_vec>::scan;
}
