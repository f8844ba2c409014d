// rows_tile.hpp - AVX2's dot products of Q4_0 for a few tokens: sixteen rows, a lane for each, by four tokens at a time.
//
// A chunk of the rows is unpacked once into the first cache, four bytes of a row to a lane, and then meets the tokens in
// tiles, whose sums stay in registers for a block: a load of weights serves four tokens, one of a token's bytes both
// registers of rows, and nothing is added up across a register. Sums of floats wait in memory as in rows_panel.hpp.
//
// One thread of a Zen 5, billions of products a second of 4, 8, 16 and 32 tokens, 4096 columns, weights in memory: eight
// rows by one token 102, 125, 139 and 143, so 112, 138, 154 and 161; with AVX-VNNI 116, 144, 161 and 169, so 125, 156, 177
// and 188. A block of eight rows and one token takes 6 cycles, of which 5.5 are multiplications (VNNI 5.1 and 5),
// unpacking 11.
namespace {

template <class V> struct q4_0_tile {
    using K = q4_0_rows<V>;
    using act = typename K::act;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, chunk = K::chunk, block_bytes = K::block_bytes;
    static constexpr int G = 2, ROWS = G * L, PASS = 32, ABREAST = 4; // tokens of a pass and of a tile
    using tokens = panel_tokens<PASS>;
    using panel = panel_of<ROWS>;
    struct unpacked {
        alignas(32) uint8_t q[L][8][G][4 * L]; // of block b, four weights of each row
        alignas(32) uint16_t d[L][ROWS];
    };
    typedef float sums[PASS][L][ROWS];

    // n blocks of L rows from byte `at` on, which are the lanes of register g.
    __attribute__((noinline, flatten)) static void unpack(const uint8_t *const *row, size_t at, int n, int g,
                                                          unpacked &w) {
        const uint8_t *p[L]; // in registers
        TE_EACH_ROW(L) p[r] = row[r] + at;
        for (int b = 0; b < n; b++) {
            i32 q[8];
            V::q4_0_tile(p, q, &w.d[b][g * L]);
            for (int k = 0; k < 8; k++) V::store_i32(w.q[b][k][g], q[k]);
            TE_EACH_ROW(L) p[r] += block_bytes;
        }
    }
    // to += a block of the rows times T tokens'. Where the block is in an act: at_q, its bytes; at_lane, its number.
    template <int T>
    static void tile(const uint8_t (*w)[G][4 * L], const f32 *scale, const char *const *acts, size_t at_q,
                     size_t at_lane, float *to) {
        i32 sum[G][T];
        const char *x[T], *start[T];
        TE_EACH(T) {
            x[t] = acts[t] + at_q;
            start[t] = acts[t] + at_lane + offsetof(act, start);
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            i32 own[T];
            TE_EACH(T) own[t] = V::four_of(x[t] + 4 * (k % 4) + (k < 4 ? 0 : 4 * L));
            TE_EACH_ROW(G) {
                const i32 q = V::load_bytes(w[k][r]);
                TE_EACH(T) sum[r][t] = k ? V::tile_dot(sum[r][t], q, own[t]) : V::tile_begin(q, own[t], start[t]);
            }
        }
        TE_EACH(T) {
            const f32 d = V::splat(*(const float *)(acts[t] + at_lane + offsetof(act, d)));
            TE_EACH_ROW(G) {
                float *y = to + t * L * ROWS + r * L;
                const f32 whole = V::to_f32(V::tile_end(sum[r][t], start[t]));
                V::store(y, V::fma(whole, V::mul(scale[r], d), V::load(y)));
            }
        }
    }
    // sum += n blocks times T tokens'; at: of their act. next: where the chunk is of which two rows are fetched beside each
    // block.
    template <int T>
    __attribute__((noinline, flatten)) static void blocks(const unpacked &w, int n, const char *const *who, size_t at,
                                                          float (*sum)[L][ROWS], const uint8_t *const *next,
                                                          size_t at_next) {
        const char *acts[T];
        TE_EACH(T) acts[t] = who[t] + at;
        for (int b = 0; b < n; b++) {
            const int i = b / (L / 4), j = b % (L / 4), lane = 4 * j + i;
            if (next) TE_EACH_ROW(G) prefetch<L * block_bytes>(next[G * b + r] + at_next);
            const f32 scale[G] = {V::load_f16(w.d[b]), V::load_f16(w.d[b] + L)};
            tile<T>(w.q[b], scale, acts, offsetof(act, q) + (size_t)(8 * L * i + 16 * j),
                    sizeof(int32_t) * (size_t)lane, sum[0][lane]);
        }
    }
    static void dot_panel(const panel &p, int32_t cols, const tokens &who, bool fetch) {
        alignas(64) sums sum;
        unpacked w;
        memset(sum, 0, sizeof sum[0] * (size_t)who.n);
        for (int32_t c = 0; c < cols; c += chunk) {
            const int n = cols - c < chunk ? (cols - c) / 32 : L;
            const size_t at = (size_t)(c / 32) * block_bytes, at_act = (size_t)(c / chunk) * sizeof(act);
            for (int g = 0; g < G; g++) unpack(p.row + g * L, at, n, g, w);
            for (int t = 0, some; t < who.n; t += some) {
                const int left = who.n - t; // a tile of one token is slow
                some = left < ABREAST ? left : left == ABREAST + 1 ? ABREAST - 1 : ABREAST;
                const char *const *acts = who.act + t;
                const uint8_t *const *next = fetch && t == 0 ? p.next : nullptr;
                switch (some) {
                case 1:
                    blocks<1>(w, n, acts, at_act, sum + t, next, at);
                    break;
                case 2:
                    blocks<2>(w, n, acts, at_act, sum + t, next, at);
                    break;
                case 3:
                    blocks<3>(w, n, acts, at_act, sum + t, next, at);
                    break;
                default:
                    blocks<ABREAST>(w, n, acts, at_act, sum + t, next, at);
                    break;
                }
            }
        }
        for (int t = 0; t < who.n; t++)
            for (int g = 0; g < G; g++) V::store(who.y[t] + g * L, add_lanes<V, ROWS>(sum[t], g * L));
    }
};
} // namespace
