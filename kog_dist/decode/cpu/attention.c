/* Softmax attention of following tokens, for CPU ranks. What a token gets has an order of sums that its position and its window alone
   decide: its bits depend neither on how many tokens a call has, nor on other lanes, nor on the instruction set.

   Positions come in tiles of 64, from the first of the sequence on; a token sees a part of its first and of its last one. Of each
   tile: scores are sums over 32 dimensions after 32, each in order; weights are exp(score - the largest score so far); a tile's
   weighted sum of values is one over its positions in order. Sums so far shrink as the largest score grows, then the tile's are
   added. Weights are summed as 16 sums, each of every 16th position. */
#include "vectors.h"

struct attention {
    const float *queries;        /* (tokens, kv_heads * group, dim), already scaled */
    const float *keys, *values;  /* (kv_heads, capacity, dim) */
    const float *sinks;          /* (kv_heads * group): one more logit of each head, from which nothing is mixed; or none */
    float *mixed;                /* as queries */
    uint64_t kv_heads, group, dim, capacity;
};

enum { kTile = 64, kTerms = 32, kColumns = 4 * kWidth, kRows = kWidth == 16 ? 6 : 3 };

static inline size_t padded(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }
static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t most(size_t a, size_t b) { return a > b ? a : b; }

static inline float exponential_of(float x) { return exponential(all(x))[0]; }

/* `sums` (rows, columns) = a (rows, from .. to) times b (from .. to, columns), term by term; with `decay` of each row, that is added
   to the row's sums times its decay. */
static inline __attribute__((always_inline)) void block(
    unsigned int rows, unsigned int vectors, const float *a, size_t a_stride, const float *b, size_t b_stride, size_t from, size_t to,
    const float *decay, float *sums, size_t stride) {
    floats sum[kRows][4];
    for (unsigned int row = 0; row < rows; ++row)
        for (unsigned int v = 0; v < vectors; ++v) sum[row][v] = all(0);
    for (size_t k = from; k < to; ++k) {
        floats right[4];
        for (unsigned int v = 0; v < vectors; ++v) right[v] = loaded(b + k * b_stride + v * kWidth);
        for (unsigned int row = 0; row < rows; ++row) {
            const floats left = all(a[row * a_stride + k]);
            for (unsigned int v = 0; v < vectors; ++v) sum[row][v] = fused(left, right[v], sum[row][v]);
        }
    }
    for (unsigned int row = 0; row < rows; ++row)
        for (unsigned int v = 0; v < vectors; ++v) {
            float *at = sums + row * stride + v * kWidth;
            store(at, decay ? fused(loaded(at), all(decay[row]), sum[row][v]) : sum[row][v]);
        }
}

#define BLOCK(ROWS, VECTORS) \
    case ROWS * 8 + VECTORS: \
        block(ROWS, VECTORS, a, a_stride, b + at, b_stride, from, to, decay, sums + at, stride); \
        break;
#define BLOCKS(ROWS) BLOCK(ROWS, 1) BLOCK(ROWS, 2) BLOCK(ROWS, 3) BLOCK(ROWS, 4)

/* `block` of any number of columns that vectors divide; kRows rows at most. */
static void blocks(
    size_t rows, size_t columns, const float *a, size_t a_stride, const float *b, size_t b_stride, size_t from, size_t to,
    const float *decay, float *sums, size_t stride) {
    for (size_t at = 0; at < columns; at += kColumns)
        switch (rows * 8 + least(columns - at, kColumns) / kWidth) {
            BLOCKS(1) BLOCKS(2) BLOCKS(3)
#if defined __AVX512F__
            BLOCKS(4) BLOCKS(5) BLOCKS(6)
#endif
        }
}

typedef float eight __attribute__((vector_size(32)));
static inline eight eight_at(const float *at) {
    eight values;
    memcpy(&values, at, sizeof values);
    return values;
}

/* `turned` (dim, kTile) = the transposed keys (count, dim); zeros in the columns behind, up to a whole vector. */
static void transpose(const float *keys, size_t count, size_t dim, float *turned) {
    size_t row = 0;
    for (; row + 8 <= count; row += 8) {
        size_t at = 0;
        for (; at + 8 <= dim; at += 8) {
            eight r[8], pairs[8], fours[8];
            for (unsigned int i = 0; i < 8; ++i) r[i] = eight_at(keys + (row + i) * dim + at);
            for (unsigned int i = 0; i < 8; i += 2) {
                pairs[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
                pairs[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
            }
            for (unsigned int i = 0; i < 8; i += 4)
                for (unsigned int j = 0; j < 2; ++j) {
                    fours[i + 2 * j] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                    fours[i + 2 * j + 1] = __builtin_shufflevector(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
                }
            for (unsigned int i = 0; i < 4; ++i) {
                const eight low = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
                const eight high = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
                memcpy(turned + (at + i) * kTile + row, &low, sizeof low);
                memcpy(turned + (at + i + 4) * kTile + row, &high, sizeof high);
            }
        }
        for (; at < dim; ++at)
            for (size_t i = row; i < row + 8; ++i) turned[at * kTile + i] = keys[i * dim + at];
    }
    for (; row < padded(count, kSums); ++row)
        for (size_t at = 0; at < dim; ++at) turned[at * kTile + row] = row < count ? keys[row * dim + at] : 0;
}

/* Ask for values from memory, all at once: that is a sixth faster than reading them as they are used. */
static inline void fetch(const float *values, size_t count) {
    for (size_t at = 0; at < count; at += kSums) __builtin_prefetch(values + at);
}

static inline float largest(floats values) {
    float v[kWidth];
    memcpy(v, &values, sizeof v);
    for (unsigned int half = kWidth / 2; half; half /= 2)
        for (unsigned int i = 0; i < half; ++i) v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    return v[0];
}

/* What rows know so far: a row is a query head of a token. */
struct state {
    float *queries, *sums; /* (rows, width) */
    float *peaks;          /* (rows): the largest score */
    float *weights;        /* (rows, kSums): their sum */
    float *scores;         /* (kRows, kTile): scratch */
    size_t width;
};

/* A row's scores of positions lo .. hi of a tile become weights; gives what its sums so far shrink by. */
static inline float weigh(float *scores, size_t lo, size_t hi, float *peak_so_far, float *weights) {
    const size_t from = lo / kWidth * kWidth;
    floats peaks = all(*peak_so_far);
    integers place;
    for (int i = 0; i < kWidth; ++i) place[i] = i;
    for (size_t at = from; at < hi; at += kWidth) {
        const integers column = place + (int32_t)at, is_seen = (column >= (int32_t)lo) & (column < (int32_t)hi);
        const floats seen = chosen(is_seen, loaded(scores + at), all(-__builtin_inff()));
        store(scores + at, seen);
        peaks = chosen(seen > peaks, seen, peaks);
    }
    const float before = *peak_so_far, peak = largest(peaks), decay = peak == before ? 1.0f : exponential_of(before - peak);
    *peak_so_far = peak;
    sixteen sum = {};
    for (size_t at = from; at < hi; at += kWidth) {
        const floats weight = exponential(loaded(scores + at) - peak);
        store(scores + at, weight);
        sum.part[at / kWidth % kParts] += weight;
    }
    for (unsigned int part = 0; part < kParts; ++part)
        store(weights + part * kWidth, fused(loaded(weights + part * kWidth), all(decay), sum.part[part]));
    return decay;
}

/* Rows first .. last attend to positions lo .. hi of a tile: its keys (dim, kTile) and values (kTile, stride). */
static void attend_tile(
    const struct state *state, size_t first, size_t last, size_t lo, size_t hi, const float *keys, size_t dim, const float *values,
    size_t stride) {
    static const float units[6] = {1, 1, 1, 1, 1, 1};
    const size_t from = lo / kSums * kSums, to = padded(hi, kSums), width = state->width;
    for (size_t row = first; row < last; row += kRows) {
        const size_t rows = least(last - row, kRows);
        float decay[kRows];
        for (size_t at = 0; at < dim; at += kTerms)
            blocks(
                rows, to - from, state->queries + row * width, width, keys + from, kTile, at, least(at + kTerms, dim),
                at ? units : NULL, state->scores + from, kTile);
        for (size_t i = 0; i < rows; ++i)
            decay[i] = weigh(state->scores + i * kTile, lo, hi, state->peaks + row + i, state->weights + (row + i) * kSums);
        blocks(rows, width, state->scores, kTile, values, stride, lo, hi, decay, state->sums + row * width, width);
    }
}

/* One KV head, with its `group` query heads of all tokens, the first of which is at position `first`. */
static void attend_head(
    const struct attention *one, size_t head, size_t first, size_t tokens, size_t window, const struct state *state, float *turned,
    float *copied) {
    const size_t group = one->group, dim = one->dim, width = state->width, heads = one->kv_heads * group, stop = first + tokens;
    const float *keys = one->keys + head * one->capacity * dim, *values = one->values + head * one->capacity * dim;
    for (size_t row = 0; row < tokens * group; ++row) {
        const size_t number = head * group + row % group;
        memcpy(state->queries + row * width, one->queries + (row / group * heads + number) * dim, dim * sizeof(float));
        memset(state->sums + row * width, 0, width * sizeof(float));
        memset(state->weights + row * kSums, 0, kSums * sizeof(float));
        state->peaks[row] = one->sinks && !(one->sinks[number] < -__FLT_MAX__) ? one->sinks[number] : -__FLT_MAX__;
    }
    size_t tile = first + 1 > window ? (first + 1 - window) / kTile * kTile : 0;
    for (; tile < stop; tile += kTile) {
        const size_t count = least(kTile, stop - tile);
        const float *of_tile = values + tile * dim, *after = keys + (tile + kTile) * dim;
        fetch(of_tile, count * dim);
        transpose(keys + tile * dim, count, dim, turned);
        if (tile + kTile < stop) fetch(after, least(kTile, stop - tile - kTile) * dim);
        if (width != dim) {
            for (size_t i = 0; i < count; ++i) memcpy(copied + i * width, of_tile + i * dim, dim * sizeof(float));
            of_tile = copied;
        }
        size_t token = tile > first ? tile - first : 0; /* the first that sees the tile's first position, or a later one */
        while (token < tokens) {
            size_t lo = 0, hi = 0, next = token;
            for (; next < tokens; ++next) { /* as many as see the same of the tile */
                const size_t seen = first + next + 1, begin = seen > window ? seen - window : 0;
                const size_t own_lo = begin > tile ? begin - tile : 0, own_hi = least(kTile, seen - tile);
                if (next > token && (own_lo != lo || own_hi != hi)) break;
                lo = own_lo, hi = own_hi;
            }
            if (lo >= kTile) break;
            attend_tile(state, token * group, next * group, lo, hi, turned, dim, of_tile, width);
            token = next;
        }
    }
    for (size_t row = 0; row < tokens * group; ++row) {
        const size_t number = head * group + row % group;
        float *mixed = one->mixed + (row / group * heads + number) * dim;
        sixteen weights;
        memcpy(&weights, state->weights + row * kSums, sizeof weights);
        float sum = total(weights);
        if (one->sinks) sum += exponential_of(one->sinks[number] - state->peaks[row]);
        for (size_t at = 0; at < dim; ++at) mixed[at] = state->sums[row * width + at] / sum;
    }
}

/* How many values of scratch `kog_attend` wants, which begin at a multiple of 64 bytes. */
size_t kog_attention_scratch(size_t tokens, size_t group, size_t dim) {
    const size_t width = padded(dim, kSums);
    return tokens * group * (2 * width + kSums + 1) + kRows * kTile + kTile * (dim + width) + kSums;
}

/* All lanes of a rank have the same shape. The tokens are those from number `row` of the queries on. */
void kog_attend(const struct attention *lanes, size_t count, size_t row, size_t first, size_t tokens, size_t window, float *scratch) {
    const size_t rows = tokens * lanes->group, dim = lanes->dim, width = padded(dim, kSums);
    struct state state = {.width = width};
    float *next = scratch;
    state.scores = next, next += kRows * kTile;
    state.queries = next, next += rows * width;
    state.sums = next, next += rows * width;
    state.weights = next, next += rows * kSums;
    float *turned = next, *copied = turned + kTile * dim;
    state.peaks = copied + kTile * width;
    for (size_t lane = 0; lane < count; ++lane) {
        struct attention one = lanes[lane];
        one.queries += row * one.kv_heads * one.group * dim;
        one.mixed += row * one.kv_heads * one.group * dim;
        for (size_t head = 0; head < one.kv_heads; ++head)
            attend_head(&one, head, first, tokens, window, &state, turned, copied);
    }
}
