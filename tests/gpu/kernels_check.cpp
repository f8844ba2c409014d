// kernels_check.cpp - every operation of te_cuda.h against doubles, on the first GPU.
//
//     kernels_check [PART ...] [FORMAT ...]      parts: device linear ffn fused routes choices experts kept merge
//                                              fetches attention latent recurrent embed graph; all by default
//
// Exits with 1 if a value is off, with 2 if there is no GPU. Rows that must not be read hold no numbers, results are
// surrounded by values that must stay, and every operation is run twice for the same bits. Tolerances: the error of a sum
// of floats, 8 eps sqrt(n) sum|w x|. Integer formats see their input as bytes: without a norm the same bytes are made here;
// behind a norm, whose last bit may tip a byte, the error of making bytes, half a step a value, is allowed.
#include "check_attention.hpp"
#include "check_device.hpp"
#include "check_elem.hpp"
#include "check_experts.hpp"
#include "check_fused.hpp"
#include "check_hidden.hpp"
#include "check_latent.hpp"
#include "check_linear.hpp"
#include "check_recurrent.hpp"

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const bool some = choose_types(argc, argv);
    open_gpu();
    const struct {
        const char *name;
        void (*run)();
    } parts[] = {{"device", check_device},       {"linear", check_linear},       {"ffn", check_ffn},
                 {"fused", check_fused},         {"routes", check_routes},       {"choices", check_choices},
                 {"experts", check_experts},     {"kept", check_kept},           {"merge", check_expected},
                 {"fetches", check_fetches},     {"attention", check_attention}, {"latent", check_latent},
                 {"recurrent", check_recurrent}, {"embed", check_embed},         {"graph", check_graph}};
    for (auto &p : parts) {
        bool wanted = !some;
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], p.name);
        if (!wanted) continue;
        const long n = n_checked, off = n_off;
        p.run();
        printf("%s: %ld values, %ld off\n", p.name, n_checked - n, n_off - off);
    }
    api->close(dev);
    return n_off ? 1 : 0;
}
