// expert_cases.hpp - what the checks of experts share: routes, places, matrices of experts.
#pragma once
#include "checks.hpp"

// Distinct experts for each token; number 1 is never chosen, unless all are.
static std::vector<int32_t> some_routes(int n_tok, int n_used, int n_expert) {
    std::vector<int32_t> all, v;
    for (int e = 0; e < n_expert; e++)
        if (e != 1 || n_expert <= n_used) all.push_back(e);
    for (int t = 0; t < n_tok; t++) {
        for (size_t i = all.size() - 1; i > 0; i--) std::swap(all[i], all[random_word() % (i + 1)]);
        v.insert(v.end(), all.begin(), all.begin() + n_used);
    }
    return v;
}
// The same, but one is wanted by all tokens and others by a few or none. n_expert: two more than n_used, at least.
static std::vector<int32_t> uneven_routes(int n_tok, int n_used, int n_expert) {
    std::vector<int32_t> v;
    for (int t = 0; t < n_tok; t++) {
        std::vector<int32_t> own = {0};
        while ((int)own.size() < n_used) {
            const double u = random_unit();
            const int32_t e = (int32_t)(n_expert * u * u * u);
            if (e != 1 && std::find(own.begin(), own.end(), e) == own.end()) own.push_back(e);
        }
        std::rotate(own.begin(), own.begin() + t % n_used, own.end());
        v.insert(v.end(), own.begin(), own.end());
    }
    return v;
}
// Places: some there, some not. The call has n of the kind that is wanted, from `first` on.
struct some_places {
    std::vector<int32_t> place;
    int n, first;
    int at(int e, bool missing) const {
        const int p = missing ? -1 - place[(size_t)e] - first : place[(size_t)e];
        return p >= 0 && p < n ? p : -1;
    }
};
static some_places places_new(int n_expert, bool missing) {
    some_places s;
    int there = 0, gone = 0;
    for (int e = 0; e < n_expert; e++) s.place.push_back(e % 3 || n_expert == 1 ? there++ : -1 - gone++);
    s.first = missing && gone > 1 ? 1 : 0;
    s.n = missing ? gone - s.first : there;
    if (missing && s.n > 2) s.n--;
    return s;
}
// The expert that nobody chose holds no numbers.
static matrix expert_matrix(int type, int rows, int cols, const some_places &s, bool missing) {
    std::vector<char> poison((size_t)(s.n * rows), 0);
    const int k = s.place.size() > 1 ? s.at(1, missing) : -1;
    for (int i = 0; k >= 0 && i < rows; i++) poison[(size_t)(k * rows + i)] = 1;
    return matrix_new(type, s.n * rows, cols, 0.1f, poison);
}
