// activation.cuh - what a feed-forward makes of a neuron's products.
#ifndef TE_CUDA_ACTIVATION_CUH
#define TE_CUDA_ACTIVATION_CUH

#include "te_cuda.h"

namespace te {

__device__ __forceinline__ float activate(te_activation act, float threshold, float x) {
    switch (act) {
    case TE_RELU:
        return x > threshold ? x : 0;
    case TE_DRELU:
        return fmaxf(x, 0);
    case TE_RELU2:
        return x > 0 ? x * x : 0;
    case TE_SILU:
        return x / (1 + expf(-x));
    case TE_GELU:
        return 0.5f * x * erfcf(-0.707106781f * x);
    case TE_CLAMPED:
        x = x > 7 ? 7 : x; // what is no number stays none
        return x / (1 + expf(-1.702f * x));
    case TE_GELU_TANH:
    case TE_XIELU: // activate_up
        break;
    }
    return x / (1 + expf(-x * fmaf(x * x, 0.0713548163f, 1.59576912f)));
}

// The hidden value of a neuron without a gate.
__device__ __forceinline__ float activate_up(te_activation act, float threshold, const te_xielu &c, float x) {
    if (act != TE_XIELU) return activate(act, threshold, x);
    return fmaf(c.beta, x, x > 0 ? c.alpha_p * x * x : c.alpha_n * (expm1f(x < c.eps ? x : c.eps) - x));
}

// The hidden value of a gated neuron; gate: activated. Of ReLU a gate of 0 decides, whatever up is (it may be no number):
// as if up had not been computed.
__device__ __forceinline__ float gated_value(te_activation act, float gate, float up) {
    if (gate == 0 && (act == TE_RELU || act == TE_DRELU || act == TE_RELU2)) return 0;
    if (act == TE_CLAMPED) return gate * ((up > 7 ? 7 : up < -7 ? -7 : up) + 1);
    return gate * (act == TE_DRELU ? fmaxf(up, 0) : up);
}

} // namespace te

#endif
