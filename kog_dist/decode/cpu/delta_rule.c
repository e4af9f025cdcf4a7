/* Gated delta nets of following tokens, for CPU ranks. A token's bits depend neither on how many tokens a call has, nor on other
   lanes, nor on the instruction set: it takes its step by itself, and each column of a state has sums of its own.

   The state of a head is read in blocks of 32 columns, which stay in the nearest cache for all tokens of a call. A column's sum over
   the rows of the state is one over those with even numbers and one over the others, each in order. Behind `num_kept` tokens the
   state is written; what later ones make of it is left: they are drafts, and are done again from their inputs if they count. */
#include "vectors.h"

struct delta_net {
    const float *rows;  /* (tokens, stride): inputs of the convolution, `gate_values` of a gate, then of each head a and b */
    const float *taps;  /* (width, channels) */
    const float *rates, *dt_bias; /* (heads): -exp(A_log) */
    const float *norm;  /* (value_dim) */
    float *state;       /* (heads, key_dim, value_dim) */
    float *past;        /* (width - 1, channels): the last inputs of the convolution */
    float *mixed;       /* (tokens, heads, value_dim); or none, and then there is no gate: nobody asks what comes out */
};

struct delta_shape {
    uint64_t key_heads, heads, key_dim, value_dim, width, gate_values;
    float eps, scale;
};

enum { kColumns = 32, kVectors = kColumns / kWidth };
static const float kNormEps = 1e-6f; /* under the root of the norms of queries and keys */

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t padded(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }
static inline floats some(const float *at, size_t count) {
    if (count >= kWidth) return loaded(at);
    floats values = {};
    memcpy(&values, at, count * sizeof(float));
    return values;
}
static inline void put(float *at, floats values, size_t count) {
    if (count >= kWidth) store(at, values);
    else memcpy(at, &values, count * sizeof(float));
}

static inline float root(float x) {
#ifdef __SSE2__
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
    return __builtin_sqrtf(x);
#endif
}

static inline floats sigmoid(floats x) { return 1.0f / (exponential(-x) + 1.0f); }
static inline floats silu(floats x) { return x / (exponential(-x) + 1.0f); }

/* log(1 + exp(x)): the larger of x and 0, and 2 artanh(t / (2 + t)) of t = exp(-|x|), whose series is cut at 1e-9. */
static inline floats softplus(floats x) {
    const integers is_positive = x > all(0);
    const floats t = exponential(chosen(is_positive, -x, x)), s = t / (t + 2.0f), square = s * s;
    floats series = all(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) series = fused(series, square, all(1.0f / (float)odd));
    return chosen(is_positive, x, all(0)) + 2.0f * s * series;
}

static inline float squares(const float *values, size_t count) {
    sixteen sum = {};
    for (size_t at = 0; at < count; at += kSums)
        for (unsigned int part = 0; part < kParts; ++part) {
            const size_t first = at + part * kWidth;
            const floats v = first < count ? some(values + first, count - first) : all(0);
            sum.part[part] = fused(v, v, sum.part[part]);
        }
    return total(sum);
}

/* The convolution of token `token`, an input of each channel from each of the last `width` tokens; then SiLU. */
static void convolve(const struct delta_net *net, const struct delta_shape *shape, size_t stride, size_t channels, size_t token,
                     float *activated) {
    const size_t before = shape->width - 1;
    for (size_t at = 0; at < channels; at += kWidth) {
        floats sum = all(0);
        for (size_t tap = 0; tap <= before; ++tap) {
            const size_t number = token + tap; /* of past inputs and rows together */
            const float *input = number < before ? net->past + number * channels : net->rows + (number - before) * stride;
            sum = fused(some(input + at, channels - at), some(net->taps + tap * channels + at, channels - at), sum);
        }
        put(activated + at, silu(sum), channels - at);
    }
}

/* The last inputs behind `count` tokens. */
static void remember(const struct delta_net *net, size_t before, size_t stride, size_t channels, size_t count) {
    for (size_t i = 0; i < before; ++i) {
        const size_t number = count + i;
        const float *input = number < before ? net->past + number * channels : net->rows + (number - before) * stride;
        memmove(net->past + i * channels, input, channels * sizeof(float));
    }
}

static void normalise(float *head, size_t dim, float scale) {
    const float length = root(squares(head, dim) + kNormEps);
    for (size_t at = 0; at < dim; at += kWidth) put(head + at, some(head + at, dim - at) / length * scale, dim - at);
}

/* A block of columns decays: (key_dim, kColumns) of `to` = that of `from`, whose rows are `stride` apart, times `decay`; `kept` = the
   block's sum over rows, each times the key's value. */
static inline void decay_block(const float *from, size_t stride, float *to, const float *key, size_t key_dim, float decay,
                               floats kept[kVectors]) {
    floats sum[2][kVectors];
    for (unsigned int i = 0; i < 2; ++i)
        for (unsigned int v = 0; v < kVectors; ++v) sum[i][v] = all(0);
    for (size_t row = 0; row < key_dim; row += 2)
        for (unsigned int i = 0; i < 2 && row + i < key_dim; ++i) {
            const floats k = all(key[row + i]);
            for (unsigned int v = 0; v < kVectors; ++v) {
                const floats value = loaded(from + (row + i) * stride + v * kWidth) * decay;
                store(to + (row + i) * kColumns + v * kWidth, value);
                sum[i][v] = fused(k, value, sum[i][v]);
            }
        }
    for (unsigned int v = 0; v < kVectors; ++v) kept[v] = sum[0][v] + sum[1][v];
}

/* The block gets `change` times each of the key's values; `out` = its sum over rows, each times the query's. */
static inline void change_block(float *block, const float *key, const float *query, size_t key_dim, const floats change[kVectors],
                                floats out[kVectors]) {
    floats sum[2][kVectors];
    for (unsigned int i = 0; i < 2; ++i)
        for (unsigned int v = 0; v < kVectors; ++v) sum[i][v] = all(0);
    for (size_t row = 0; row < key_dim; row += 2)
        for (unsigned int i = 0; i < 2 && row + i < key_dim; ++i) {
            const floats k = all(key[row + i]), q = all(query[row + i]);
            for (unsigned int v = 0; v < kVectors; ++v) {
                float *at = block + (row + i) * kColumns + v * kWidth;
                const floats value = fused(k, change[v], loaded(at));
                store(at, value);
                sum[i][v] = fused(q, value, sum[i][v]);
            }
        }
    for (unsigned int v = 0; v < kVectors; ++v) out[v] = sum[0][v] + sum[1][v];
}

struct room {
    float *activated; /* (tokens, width of a row of them): queries, keys and values */
    float *factors;   /* (tokens, 2 * padded heads): decays, then betas */
    float *outputs;   /* (tokens, padded value_dim): of a head */
    float *block;     /* (key_dim, kColumns) */
    float *edge;      /* the same: columns at the end, where they are fewer */
};

/* A head of all tokens. */
static void run_head(const struct delta_net *net, const struct delta_shape *shape, const struct room *room, size_t head, size_t tokens,
                     size_t num_kept, size_t channels) {
    const size_t key_dim = shape->key_dim, value_dim = shape->value_dim, key_head = head / (shape->heads / shape->key_heads);
    const size_t wide = padded(channels, kSums), heads = padded(shape->heads, kSums), out_width = padded(value_dim, kColumns);
    float *state = net->state + head * key_dim * value_dim;
    for (size_t column = 0; column < value_dim; column += kColumns) {
        const size_t count = least(kColumns, value_dim - column);
        const float *from = state + column;
        size_t stride = value_dim;
        if (count < kColumns) {
            memset(room->edge, 0, key_dim * kColumns * sizeof(float));
            for (size_t row = 0; row < key_dim; ++row)
                memcpy(room->edge + row * kColumns, from + row * value_dim, count * sizeof(float));
            from = room->edge, stride = kColumns;
        }
        for (size_t token = 0; token < tokens; ++token, from = room->block, stride = kColumns) {
            const float *activated = room->activated + token * wide, *factors = room->factors + token * 2 * heads;
            const float *query = activated + key_head * key_dim, *key = query + shape->key_heads * key_dim;
            const float *value = activated + 2 * shape->key_heads * key_dim + head * value_dim + column;
            floats kept[kVectors], change[kVectors], out[kVectors];
            decay_block(from, stride, room->block, key, key_dim, factors[head], kept);
            for (unsigned int v = 0; v < kVectors; ++v) {
                const size_t first = v * kWidth;
                change[v] = ((first < count ? some(value + first, count - first) : all(0)) - kept[v]) * factors[heads + head];
            }
            change_block(room->block, key, query, key_dim, change, out);
            for (unsigned int v = 0; v < kVectors; ++v) store(room->outputs + token * out_width + column + v * kWidth, out[v]);
            if (token + 1 == num_kept)
                for (size_t row = 0; row < key_dim; ++row)
                    memcpy(state + row * value_dim + column, room->block + row * kColumns, count * sizeof(float));
        }
    }
}

/* `mixed` of a head: norm of what came out, times SiLU of the gate. */
static void gate_head(const struct delta_net *net, const struct delta_shape *shape, const struct room *room, size_t head, size_t tokens,
                      size_t stride, size_t channels) {
    const size_t dim = shape->value_dim, out_width = padded(dim, kColumns);
    for (size_t token = 0; token < tokens; ++token) {
        const float *out = room->outputs + token * out_width, *gate = net->rows + token * stride + channels + head * dim;
        float *mixed = net->mixed + (token * shape->heads + head) * dim;
        const float width = (float)dim, inverse = root(width / (squares(out, dim) + width * shape->eps));
        for (size_t at = 0; at < dim; at += kWidth) {
            const floats normed = some(out + at, dim - at) * inverse * some(net->norm + at, dim - at);
            put(mixed + at, normed * silu(some(gate + at, dim - at)), dim - at);
        }
    }
}

/* How many values of scratch `kog_delta` wants, which begin at a multiple of 64 bytes. */
size_t kog_delta_scratch(const struct delta_shape *shape, size_t tokens) {
    const size_t channels = 2 * shape->key_heads * shape->key_dim + shape->heads * shape->value_dim;
    const size_t of_token = padded(channels, kSums) + 2 * padded(shape->heads, kSums) + padded(shape->value_dim, kColumns);
    return tokens * of_token + 2 * shape->key_dim * kColumns;
}

/* All lanes of a rank have the same shape. Of their rows, and of what comes out, those from `first` on are used. */
void kog_delta(const struct delta_net *nets, size_t count, const struct delta_shape *shape, size_t first, size_t tokens,
               size_t num_kept, float *scratch) {
    const size_t channels = 2 * shape->key_heads * shape->key_dim + shape->heads * shape->value_dim, heads = shape->heads;
    const size_t stride = channels + shape->gate_values + 2 * heads, wide = padded(channels, kSums), num_factors = padded(heads, kSums);
    struct room room;
    room.activated = scratch;
    room.factors = room.activated + tokens * wide;
    room.outputs = room.factors + tokens * 2 * num_factors;
    room.block = room.outputs + tokens * padded(shape->value_dim, kColumns);
    room.edge = room.block + shape->key_dim * kColumns;
    for (size_t lane = 0; lane < count; ++lane) {
        struct delta_net net = nets[lane];
        net.rows += first * stride;
        if (net.mixed) net.mixed += first * heads * shape->value_dim;
        for (size_t token = 0; token < tokens; ++token) {
            float *activated = room.activated + token * wide, *factors = room.factors + token * 2 * num_factors;
            const float *a = net.rows + token * stride + channels + shape->gate_values, *b = a + heads;
            convolve(&net, shape, stride, channels, token, activated);
            for (size_t head = 0; head < 2 * shape->key_heads; ++head)
                normalise(activated + head * shape->key_dim, shape->key_dim, head < shape->key_heads ? shape->scale : 1.0f);
            for (size_t at = 0; at < heads; at += kWidth) {
                const size_t left = heads - at;
                const floats steps = softplus(some(a + at, left) + some(net.dt_bias + at, left));
                store(factors + at, exponential(some(net.rates + at, left) * steps));
                store(factors + num_factors + at, sigmoid(some(b + at, left)));
            }
        }
        for (size_t head = 0; head < heads; ++head) {
            run_head(&net, shape, &room, head, tokens, num_kept, channels);
            if (net.mixed) gate_head(&net, shape, &room, head, tokens, stride, channels);
        }
        remember(&net, shape->width - 1, stride, channels, num_kept);
    }
}
