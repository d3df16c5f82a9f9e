// Products with the matrix unit (AMX): bf16 weights in place, tokens rounded to bf16, as in torch's own bf16 products, and fp32
// sums.
//
// The order of a sum does not depend on the rest of its tile, so a token's result is a function of that token alone: the
// instructions are the same for one token and for a thousand.
#pragma once

#include "product.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__AVX512BF16__)
#define STRETTO_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stretto {

constexpr int TILE_TOKENS = 16, TILE_ROWS = 16, TILE_DEPTH = 32;  // tokens, weight rows and channels of a tile

// Channels of a packed token: a multiple of TILE_DEPTH, padded with zeros.
inline size_t packed_width(int width) { return size_t(width + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH; }

// Tokens of one tile; `is_alone`: the product has only one token, and the tile one column.
struct Span {
    int32_t first, num;
    bool is_alone;
};

#if defined(__AVX512F__)

// Transposes a matrix of 16 × 16 numbers.
inline void transpose(Vec r[16]) {
#pragma GCC unroll 4
    for (int at = 0; at < 16; at += 4) {  // squares of 4 by 4, within lanes of four
        Vec a = __builtin_shufflevector(r[at], r[at + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        Vec b = __builtin_shufflevector(r[at], r[at + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        Vec c = __builtin_shufflevector(r[at + 2], r[at + 3], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        Vec d = __builtin_shufflevector(r[at + 2], r[at + 3], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        r[at] = __builtin_shufflevector(a, c, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        r[at + 1] = __builtin_shufflevector(a, c, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        r[at + 2] = __builtin_shufflevector(b, d, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        r[at + 3] = __builtin_shufflevector(b, d, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    Vec to[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // then the squares are exchanged
        Vec a = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        Vec b = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        Vec c = __builtin_shufflevector(r[i + 8], r[i + 12], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        Vec d = __builtin_shufflevector(r[i + 8], r[i + 12], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        to[i] = __builtin_shufflevector(a, c, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        to[i + 4] = __builtin_shufflevector(b, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        to[i + 8] = __builtin_shufflevector(a, c, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        to[i + 12] = __builtin_shufflevector(b, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = to[i];
}

#endif

#if defined(STRETTO_TILES)

// Whether the kernel lets this process use the matrix unit; requested once.
inline bool has_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

// The instructions. GCC's own intrinsics do not declare that they read and write memory.
template <int T>
inline void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Sets the tile configuration of this thread, and restores the earlier one (of torch's library) in the destructor.
class Tiles {
  public:
    explicit Tiles(bool is_used) : is_used(is_used) {
        if (is_used) asm volatile("sttilecfg %0" : "=m"(before));
    }
    ~Tiles() {
        if (!is_used || !num_tokens) return;
        if (before.palette) asm volatile("ldtilecfg %0" ::"m"(before));
        else asm volatile("tilerelease");
    }
    Tiles(const Tiles&) = delete;

    // Configures tiles of `num` tokens: 1, or TILE_TOKENS. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 tokens.
    void shape(int num) {
        if (num == num_tokens) return;
        num_tokens = num;
        Shapes shapes = {};
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            shapes.rows[tile] = 16;
            shapes.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? 64 : 4 * num);
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }

  private:
    struct alignas(64) Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    Shapes before;
    bool is_used;
    int num_tokens = 0;
};

// Packs the tokens of a span for `tile_product`: one token as a row, several as [width / 2, TILE_TOKENS] pairs of channels.
inline void pack_span(const float* const* x, Span span, int width, bfloat16* to) {
    for (int k = 0; k < width; k += TILE_DEPTH) {
        auto pairs = [&](int t) {  // 32 channels of a token as 16 numbers
            const float* from = x[span.first + t] + k;
            const int left = width - k;
            Vec low = left >= LANES ? load(from) : load_part(from, left);
            Vec high = left >= 2 * LANES ? load(from + LANES) : left > LANES ? load_part(from + LANES, left - LANES) : Vec{};
            auto both = _mm512_cvtne2ps_pbh(high, low);
            Vec v;
            std::memcpy(&v, &both, sizeof v);
            return v;
        };
        Vec* out = reinterpret_cast<Vec*>(to + size_t(k) * (span.is_alone ? 1 : TILE_TOKENS));
        if (span.is_alone) {
            Vec v = pairs(0);
            std::memcpy(out, &v, sizeof v);
            continue;
        }
        Vec square[16];
        for (int t = 0; t < 16; t++) square[t] = t < span.num ? pairs(t) : Vec{};
        transpose(square);
        std::memcpy(out, square, sizeof square);
    }
}

// Loads weights [row, row + 16) by [k, k + 32), in place or, at the end of the matrix, from a copy padded with zeros.
template <int T>
[[gnu::always_inline]] inline void load_weights(const bfloat16* w, size_t stride, int row, int end, int k, int width) {
    const int rows = std::min(TILE_ROWS, end - row), depth = std::min(TILE_DEPTH, width - k);
    const bfloat16* from = w + row * stride + k;
    if (rows == TILE_ROWS && depth == TILE_DEPTH) return tile_load<T>(from, stride * sizeof *w);
    alignas(64) bfloat16 edge[TILE_ROWS * TILE_DEPTH] = {};
    for (int r = 0; r < rows; r++) std::memcpy(edge + r * TILE_DEPTH, from + r * stride, depth * sizeof *w);
    tile_load<T>(edge, TILE_DEPTH * sizeof *w);
}

// Sums of MR × NT tiles: 16 or 32 weight rows, and 16 or 32 tokens.
template <int MR, int NT>
inline void tile_sums(const bfloat16* w, size_t stride, int row, int end, const bfloat16* x, int width, int span, bool is_first,
                      float out[4][256]) {
    const size_t tokens = size_t(span) * packed_width(width);  // distance between tiles of tokens
    tile_zero<0>();
    if constexpr (NT > 1) tile_zero<1>();
    if constexpr (MR > 1) tile_zero<2>();
    if constexpr (MR > 1 && NT > 1) tile_zero<3>();
    const int ahead = std::min<int>(AHEAD / int(sizeof *w), width);
    const ptrdiff_t next = ptrdiff_t(MR * TILE_ROWS * stride) - width;
    for (int k = 0; k < width; k += TILE_DEPTH) {
        if (is_first) {  // prefetch as in `tile`
            const bfloat16* soon = w + row * stride + k + ahead + (k + ahead < width ? 0 : next);
#pragma GCC unroll 32
            for (int r = 0; r < MR * TILE_ROWS; r++) __builtin_prefetch(soon + r * stride, 0, 2);
        }
        const bfloat16* from = x + size_t(k) * span;
        tile_load<6>(from, 4 * span);
        if constexpr (NT > 1) tile_load<7>(from + tokens, 4 * span);
        load_weights<4>(w, stride, row, end, k, width);
        if constexpr (MR > 1) load_weights<5>(w, stride, row + TILE_ROWS, end, k, width);
        tile_multiply<0, 4, 6>();
        if constexpr (NT > 1) tile_multiply<1, 4, 7>();
        if constexpr (MR > 1) tile_multiply<2, 5, 6>();
        if constexpr (MR > 1 && NT > 1) tile_multiply<3, 5, 7>();
    }
    tile_store<0>(out[0], 4 * span);
    if constexpr (NT > 1) tile_store<1>(out[1], 4 * span);
    if constexpr (MR > 1) tile_store<2>(out[2], 4 * span);
    if constexpr (MR > 1 && NT > 1) tile_store<3>(out[3], 4 * span);
}

// `product` for `num` tokens that `pack_span` wrote, TILE_TOKENS per span.
template <class Put>
inline void tile_product(Tiles& tiles, const bfloat16* w, size_t stride, int begin, int end, const bfloat16* x, int num, int width, Put put) {
    const int span = num == 1 ? 1 : TILE_TOKENS;
    alignas(64) float out[4][256];
    auto give = [&](int tile, int row, int first) {
        const int rows = std::min(TILE_ROWS, end - row), count = std::min(TILE_TOKENS, num - first);
        if (rows <= 0 || count <= 0) return;
        if (num == 1) return put(row, rows, 0, out[tile]);
        Vec* square = reinterpret_cast<Vec*>(out[tile]);
        transpose(square);
        for (int t = 0; t < count; t++) put(row, rows, first + t, out[tile] + t * TILE_ROWS);
    };
    tiles.shape(span);
    if (num <= TILE_TOKENS) {  // memory limits the speed: two tiles of rows at once would only scatter the reads
        for (int row = begin; row < end; row += TILE_ROWS) {
            tile_sums<1, 1>(w, stride, row, end, x, width, span, true, out);
            give(0, row, 0);
        }
        return;
    }
    for (int row = begin; row < end; row += 2 * TILE_ROWS) {
        const bool is_high = row + TILE_ROWS < end;
        for (int first = 0; first < num; first += 2 * TILE_TOKENS) {
            const bool is_wide = first + TILE_TOKENS < num;
            const bfloat16* from = x + first * packed_width(width);
            if (is_high && is_wide) tile_sums<2, 2>(w, stride, row, end, from, width, span, first == 0, out);
            else if (is_high) tile_sums<2, 1>(w, stride, row, end, from, width, span, first == 0, out);
            else if (is_wide) tile_sums<1, 2>(w, stride, row, end, from, width, span, first == 0, out);
            else tile_sums<1, 1>(w, stride, row, end, from, width, span, first == 0, out);
            give(0, row, first);
            if (is_wide) give(1, row, first + TILE_TOKENS);
            if (is_high) give(2, row + TILE_ROWS, first);
            if (is_high && is_wide) give(3, row + TILE_ROWS, first + TILE_TOKENS);
        }
    }
}

#else

inline bool has_tiles() { return false; }

class Tiles {
  public:
    explicit Tiles(bool) {}
    void shape(int) {}
};

#endif

}  // namespace stretto
