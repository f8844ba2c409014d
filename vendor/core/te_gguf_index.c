/* te_gguf_index.c - the hash index over the names of keys or tensors. */
#include "te_gguf_part.h"

#include <stdlib.h>
#include <string.h>

typedef struct sip {
    uint64_t a, b, c, d;
} sip;

static uint64_t rotate(uint64_t x, int n) { return x << n | x >> (64 - n); }

static void sip_round(sip *s) {
    s->a += s->b;
    s->b = rotate(s->b, 13) ^ s->a;
    s->a = rotate(s->a, 32);
    s->c += s->d;
    s->d = rotate(s->d, 16) ^ s->c;
    s->a += s->d;
    s->d = rotate(s->d, 21) ^ s->a;
    s->c += s->b;
    s->b = rotate(s->b, 17) ^ s->c;
    s->c = rotate(s->c, 32);
}

static void sip_word(sip *s, uint64_t word) {
    s->d ^= word;
    sip_round(s);
    s->a ^= word;
}

/* SipHash-1-3 (Aumasson and Bernstein, 2012) with the key (seed, ~seed); the last word carries the length. */
static uint64_t hash(uint64_t seed, te_str name) {
    sip s = {seed ^ 0x736f6d6570736575u, ~seed ^ 0x646f72616e646f6du, seed ^ 0x6c7967656e657261u,
             ~seed ^ 0x7465646279746573u};
    uint64_t word;
    size_t at = 0;
    for (; at + 8 <= name.n; at += 8) {
        memcpy(&word, name.p + at, 8);
        sip_word(&s, word);
    }
    word = 0;
    if (at < name.n) memcpy(&word, name.p + at, name.n - at);
    sip_word(&s, word | (uint64_t)name.n << 56);
    s.c ^= 0xff;
    for (int i = 0; i < 3; i++) sip_round(&s);
    return s.a ^ s.b ^ s.c ^ s.d;
}

static te_str name_of(const te_gguf_index *x, uint64_t position) {
    te_str name;
    memcpy(&name, x->items + position * x->item_bytes, sizeof name);
    return name;
}

/* The slot that holds the name, or the empty one where it belongs. */
static uint64_t seek(const te_gguf_index *x, te_str name) {
    uint64_t at = hash(x->seed, name) & x->mask;
    while (x->slot[at] != 0) {
        const te_str other = name_of(x, x->slot[at] - 1);
        if (other.n == name.n && memcmp(other.p, name.p, name.n) == 0) break;
        at = (at + 1) & x->mask;
    }
    return at;
}

te_status te_gguf_index_new(te_gguf_index *x, uint64_t seed, const void *items, size_t item_bytes, int64_t n,
                            int64_t *twice) {
    uint64_t n_slots = 4;
    while (n_slots < 2 * (uint64_t)n) n_slots *= 2;
    *twice = -1;
    *x = (te_gguf_index){calloc(n_slots, sizeof(uint32_t)), n_slots - 1, seed, items, item_bytes};
    if (x->slot == NULL) return te_fail(TE_MEMORY, "no memory for an index of %lld names", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t at = seek(x, name_of(x, (uint64_t)i));
        if (x->slot[at] == 0) {
            x->slot[at] = (uint32_t)i + 1;
        } else if (*twice < 0) {
            *twice = i;
        }
    }
    return TE_OK;
}

const void *te_gguf_index_find(const te_gguf_index *x, te_str name) {
    const uint32_t found = x->slot[seek(x, name)];
    return found == 0 ? NULL : x->items + (uint64_t)(found - 1) * x->item_bytes;
}

void te_gguf_index_free(te_gguf_index *x) {
    free(x->slot);
    *x = (te_gguf_index){0};
}
