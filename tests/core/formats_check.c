/* formats_check.c - te_dequantize_row and te_quantize_row give the same bits on every machine.
 *
 *     formats_check            prints a line per format and direction, with a number that stands for all bits
 *     formats_check GOLDEN     compares them with those of a file; exits with 1 if a line differs or is missing
 *
 * Where the tests against other programs run, they hold these functions to them; this carries the result over to
 * machines where only C programs run. Its golden is written again when a format or a way of rounding is added:
 * formats_check > tests/golden/formats.txt */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/te_quant.h"
#include "core/te_types.h"

enum { N = 8192, N_LINES = 2 * TE_TYPE_LIMIT, LINE = 64 };

static uint64_t random_state;

static uint32_t random_word(void) { /* a multiplicative generator; its upper half is used */
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static uint64_t fold(uint64_t sum, uint32_t word) { return (sum ^ word) * 1099511628211u; }

/* Random bytes as a row. Which NaN a machine makes is its own business: all count as one. */
static uint64_t dequantized(int32_t type) {
    static uint8_t row[8 * N];
    static float out[N];
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < sizeof row; i++) row[i] = (uint8_t)random_word();
    te_dequantize_row(type, row, out, N);
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &out[i], 4);
        sum = fold(sum, isnan(out[i]) ? 0x7fc00000u : bits);
    }
    return sum;
}

/* Rows of many sizes: each 256 a scale of their own, with zeros, outliers, and whole numbers and halves, which are ties. */
static uint64_t quantized(int32_t type) {
    static uint8_t row[8 * N];
    static float x[N];
    uint64_t sum = 14695981039346656037u;
    for (int i = 0; i < N; i++) {
        const int block = i / 256;
        const float uniform = (float)(random_word() >> 8) * 0x1p-23f - 1.0f;
        x[i] = ldexpf(uniform, block % 16 - 8);
        if (block % 5 == 1) x[i] *= uniform * uniform; /* few large ones */
        if (block % 5 == 2) x[i] = (float)((int)(random_word() % 255) - 127) * 0.5f;
        if (block % 7 == 6 && i % 64 < 32) x[i] = 0;
        if (i % 509 == 0) x[i] *= 30;
    }
    te_quantize_row(type, x, row, N);
    for (size_t i = 0; i < te_row_bytes(type, N); i++) sum = fold(sum, row[i]);
    return sum;
}

static int lines(char out[][LINE]) {
    int n = 0;
    for (int32_t type = 0; type < TE_TYPE_LIMIT; type++) {
        const te_type_info *info = te_type_get(type);
        random_state = (uint64_t)type + 1;
        if (info && te_can_dequantize(type))
            snprintf(out[n++], LINE, "dequantize %s %016llx", info->name, (unsigned long long)dequantized(type));
        if (info && te_can_quantize(type))
            snprintf(out[n++], LINE, "quantize %s %016llx", info->name, (unsigned long long)quantized(type));
    }
    return n;
}

int main(int argc, char **argv) {
    static char own[N_LINES][LINE], stored[N_LINES][LINE];
    const int n = lines(own);
    if (argc < 2) {
        for (int i = 0; i < n; i++) puts(own[i]);
        return 0;
    }
    FILE *file = fopen(argv[1], "r");
    if (!file) return fprintf(stderr, "%s cannot be read\n", argv[1]), 2;
    int n_stored = 0, n_off = 0;
    while (n_stored < N_LINES && fgets(stored[n_stored], LINE, file)) {
        stored[n_stored][strcspn(stored[n_stored], "\n")] = 0;
        n_stored++;
    }
    fclose(file);
    for (int i = 0; i < n; i++) {
        int found = 0;
        for (int j = 0; j < n_stored && !found; j++) found = strcmp(own[i], stored[j]) == 0;
        if (!found) fprintf(stderr, "%s has no line \"%s\"\n", argv[1], own[i]);
        n_off += !found;
    }
    if (n_stored != n) fprintf(stderr, "%s has %d lines, not %d\n", argv[1], n_stored, n);
    printf("%d of %d lines\n", n - n_off, n);
    return n_off > 0 || n_stored != n;
}
