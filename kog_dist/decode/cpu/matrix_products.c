/* Products of matrices (16 bit, float32, MXFP4) and float32 vectors, for CPU ranks: one vector or many. A row's sum has an order that
   its length alone decides, so its bits depend neither on the other rows nor on how many vectors there are, nor on the instruction
   set. */
#include "vectors.h"

enum format { kBfloat16, kFloat16, kFloat32, kMxfp4 };

/* products[targets[i]] (rows) = matrix (rows, columns) times vectors[sources[i]] (columns), for `count` of them; without `targets` and
   `sources` the first ones. Strides are of the next vector and product. `scales` and `skew` are MXFP4's. */
struct matrix_product {
    const void *matrix;
    const uint8_t *scales;
    const float *vectors;
    float *products;
    const uint32_t *sources, *targets;
    uint64_t rows, columns, skew, vector_stride, product_stride, count;
};

static inline const float *vector_of(const struct matrix_product *one, size_t i) {
    return one->vectors + (one->sources ? one->sources[i] : i) * one->vector_stride;
}
static inline size_t padded(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }
static inline float *product_of(const struct matrix_product *one, size_t i) {
    return one->products + (one->targets ? one->targets[i] : i) * one->product_stride;
}

/* ---- matrices of values: steps of 32 columns, of which 16 add to the lower sums and 16 to the upper ones ---- */
enum { kPair = 2 * kSums };

/* 16 bit: two neighbouring values are one word, the even one for the lower sum. As float32; binary16 divided by 2^112: its exponent is
   taken as it stands. Powers of two that make up for that change no bit of a sum. */
static inline __attribute__((always_inline)) floats lower(words pairs, enum format format) {
    return (floats)(format == kBfloat16 ? pairs << 16 : (pairs & 0x8000u) << 16 | (pairs & 0x7fffu) << 13);
}
static inline __attribute__((always_inline)) floats upper(words pairs, enum format format) {
    return (floats)(format == kBfloat16 ? pairs & 0xffff0000u : (pairs & 0x80000000u) | (pairs >> 3 & 0x0fffe000u));
}
static inline float scale_of(enum format format) { return format == kFloat16 ? 0x1p56f : 1.0f; } /* of vectors, and of sums */
static inline size_t width_of(enum format format) { return format == kFloat32 ? sizeof(float) : sizeof(uint16_t); }

struct pair {
    sixteen low, high;
};

/* The values of one step of a row. */
static inline __attribute__((always_inline)) struct pair widened(const char *row, enum format format) {
    struct pair values;
    for (unsigned int part = 0; part < kParts; ++part)
        if (format == kFloat32) {
            values.low.part[part] = loaded((const float *)row + part * kWidth);
            values.high.part[part] = loaded((const float *)row + kSums + part * kWidth);
        } else {
            words pairs;
            memcpy(&pairs, row + part * sizeof pairs, sizeof pairs);
            values.low.part[part] = lower(pairs, format), values.high.part[part] = upper(pairs, format);
        }
    return values;
}

/* The last step of a row may have less than 32 columns: zeros stand in for the others. */
static inline __attribute__((always_inline)) struct pair widened_end(const char *row, size_t columns, enum format format) {
    char last[kPair * sizeof(float)] = {};
    memcpy(last, row, columns * width_of(format));
    return widened(last, format);
}

/* `packed`: of each step the 16 values that meet the lower ones of a matrix, then those that meet the upper ones. */
static void pack(const float *vector, size_t columns, enum format format, float *packed) {
    size_t at = 0;
    for (; at + kPair <= columns; at += kPair, packed += kPair)
        for (size_t i = 0; i < kSums; ++i) {
            packed[i] = vector[at + (format == kFloat32 ? i : 2 * i)] * scale_of(format);
            packed[kSums + i] = vector[at + (format == kFloat32 ? kSums + i : 2 * i + 1)] * scale_of(format);
        }
    if (at == columns) return;
    memset(packed, 0, kPair * sizeof *packed);
    for (size_t i = 0; at + i < columns; ++i)
        packed[format == kFloat32 ? i : i / 2 + i % 2 * kSums] = vector[at + i] * scale_of(format);
}

static inline __attribute__((always_inline)) void add_step(struct pair values, const float *packed, struct pair *sums) {
    for (unsigned int part = 0; part < kParts; ++part) {
        sums->low.part[part] = fused(values.low.part[part], loaded(packed + part * kWidth), sums->low.part[part]);
        sums->high.part[part] = fused(values.high.part[part], loaded(packed + kSums + part * kWidth), sums->high.part[part]);
    }
}

/* One row after the other reads memory in order, which is what it does fastest. */
static inline __attribute__((always_inline)) void multiply_one(const struct matrix_product *one, enum format format, float *packed) {
    const size_t columns = one->columns, row_bytes = columns * width_of(format);
    float *product = product_of(one, 0);
    pack(vector_of(one, 0), columns, format, packed);
    for (size_t row = 0; row < one->rows; ++row) {
        const char *values = (const char *)one->matrix + row * row_bytes;
        struct pair sums = {};
        size_t at = 0;
        for (; at + kPair <= columns; at += kPair) add_step(widened(values + at * width_of(format), format), packed + at, &sums);
        if (at < columns) add_step(widened_end(values + at * width_of(format), columns - at, format), packed + at, &sums);
        for (unsigned int part = 0; part < kParts; ++part) sums.low.part[part] += sums.high.part[part];
        product[row] = total(sums.low) * scale_of(format);
    }
}

/* ---- many vectors: a few rows are widened once, then meet all vectors, a few of them at a time ---- */
#if defined __AVX512F__
enum { kRows = 3, kVectors = 4, kGroup = 6 };
#else
enum { kRows = 3, kVectors = 2, kGroup = 6 };
#endif
enum { kBlock = 24 }; /* steps of a row that are widened at a time */

/* Lower and upper sums of `vectors` vectors are added. Of four vectors, AVX-512 adds up 16 values to 4 each at once: then they fill one
   register, which is to be written and read but once. */
static inline __attribute__((always_inline)) void end(unsigned int vectors, floats *low, floats *high, float *sums) {
    floats v[4];
    for (unsigned int i = 0; i < 4; ++i) v[i] = i < vectors ? low[i] + high[i] : all(0);
#if defined __AVX512F__
    for (unsigned int i = 0; i < 2; ++i)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    store(sums, __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                    __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#else
    for (unsigned int i = 0; i < vectors; ++i) store(sums + i * kPair, v[i]);
#endif
}

/* kRows rows (stride `row_stride`) and `vectors` packed vectors meet in `steps` steps. Sums so far are those of `sums` (rows, vectors,
   kPair) unless `is_first`, and go there; if `is_last`, lower and upper ones are added. */
static inline __attribute__((always_inline)) void meet(
    unsigned int vectors, const float *rows, size_t row_stride, const float *packed, size_t packed_stride, size_t steps,
    int is_first, int is_last, float *sums, size_t sums_stride) {
    for (unsigned int part = 0; part < kParts; ++part) {
        floats low[kRows][kVectors], high[kRows][kVectors];
        for (unsigned int row = 0; row < kRows; ++row)
            for (unsigned int v = 0; v < vectors; ++v) {
                const float *at = sums + row * sums_stride + v * kPair + part * kWidth;
                low[row][v] = is_first ? all(0) : loaded(at);
                high[row][v] = is_first ? all(0) : loaded(at + kSums);
            }
        const float *left = rows + part * kWidth, *right = packed + part * kWidth;
        for (size_t step = 0; step < steps; ++step, left += kPair, right += kPair) {
            floats values[kRows];
            for (unsigned int row = 0; row < kRows; ++row) values[row] = in_register(loaded(left + row * row_stride));
            for (unsigned int v = 0; v < vectors; ++v) {
                const floats other = in_register(loaded(right + v * packed_stride));
                for (unsigned int row = 0; row < kRows; ++row) low[row][v] = fused(values[row], other, low[row][v]);
            }
            for (unsigned int row = 0; row < kRows; ++row) values[row] = in_register(loaded(left + row * row_stride + kSums));
            for (unsigned int v = 0; v < vectors; ++v) {
                const floats other = in_register(loaded(right + v * packed_stride + kSums));
                for (unsigned int row = 0; row < kRows; ++row) high[row][v] = fused(values[row], other, high[row][v]);
            }
        }
        for (unsigned int row = 0; row < kRows; ++row) {
            float *at = sums + row * sums_stride + part * kWidth;
            if (is_last)
                end(vectors, low[row], high[row], at);
            else
                for (unsigned int v = 0; v < vectors; ++v, at += kPair) store(at, low[row][v]), store(at + kSums, high[row][v]);
        }
    }
}

#define MEET(VECTORS) \
    case VECTORS: \
        meet(VECTORS, rows, row_stride, packed, packed_stride, steps, is_first, is_last, sums, sums_stride); \
        break;
static void meet_all(
    const float *rows, size_t row_stride, const float *packed, size_t packed_stride, size_t count, size_t steps, int is_first,
    int is_last, float *sums, size_t sums_stride) {
    for (size_t v = 0; v < count; v += kVectors, packed += kVectors * packed_stride, sums += kVectors * kPair)
        switch (count - v < kVectors ? count - v : kVectors) {
            MEET(1) MEET(2)
#if defined __AVX512F__
            MEET(3) MEET(4)
#endif
        }
}

/* `totals[i]` = the total of 16 sums at sums + i * kPair, for 16 of them. */
static inline void totals_of_sums(const float *sums, float *totals) {
#if defined __AVX512F__
    floats v[16];
    for (unsigned int i = 0; i < 16; ++i) v[i] = loaded(sums + i * kPair);
    for (unsigned int i = 0; i < 8; ++i)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (unsigned int i = 0; i < 4; ++i)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (unsigned int i = 0; i < 2; ++i)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    store(totals, __builtin_shufflevector(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                      __builtin_shufflevector(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#elif defined __FMA__
    for (unsigned int half = 0; half < 16; half += 8) {
        floats v[8];
        for (unsigned int i = 0; i < 8; ++i) v[i] = loaded(sums + (half + i) * kPair) + loaded(sums + (half + i) * kPair + kWidth);
        for (unsigned int i = 0; i < 4; ++i)
            v[i] = __builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
                   __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        for (unsigned int i = 0; i < 2; ++i)
            v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
        store(totals + half, __builtin_shufflevector(v[0], v[1], 0, 2, 8, 10, 4, 6, 12, 14) +
                                 __builtin_shufflevector(v[0], v[1], 1, 3, 9, 11, 5, 7, 13, 15));
    }
#else
    for (unsigned int i = 0; i < 16; ++i) {
        sixteen sum;
        memcpy(&sum, sums + i * kPair, sizeof sum);
        totals[i] = total(sum);
    }
#endif
}

/* `totals[i]` = the total of the sums that `end` left of vector i, of 16 from the first on. */
static inline void totals_of_ends(const float *sums, float *totals) {
#if defined __AVX512F__
    floats v[4];
    for (unsigned int i = 0; i < 4; ++i) v[i] = loaded(sums + i * kVectors * kPair);
    for (unsigned int i = 0; i < 2; ++i)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const floats mixed = __builtin_shufflevector(v[0], v[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
                         __builtin_shufflevector(v[0], v[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    store(totals, __builtin_shufflevector(mixed, mixed, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
#else
    totals_of_sums(sums, totals);
#endif
}

/* ---- few vectors: a row meets some of them at a time, whose sums are in registers; it is widened anew for the next ones ---- */
#if defined __AVX512F__
enum { kAtOnce = 6 };
#elif defined __FMA__
enum { kAtOnce = 3 };
#else
enum { kAtOnce = 1 };
#endif
enum { kFew = 12, kFewSums = 48 /* sums of some rows and vectors, added up side by side; a multiple of 16 */ };

static inline __attribute__((always_inline)) void meet_few(
    unsigned int vectors, const char *row, size_t columns, const float *packed, size_t stride, enum format format, float *sums) {
    struct pair of[kAtOnce] = {};
    size_t at = 0;
    for (; at + kPair <= columns; at += kPair) {
        const struct pair values = widened(row + at * width_of(format), format);
        for (unsigned int v = 0; v < vectors; ++v) add_step(values, packed + v * stride + at, &of[v]);
    }
    if (at < columns) {
        const struct pair values = widened_end(row + at * width_of(format), columns - at, format);
        for (unsigned int v = 0; v < vectors; ++v) add_step(values, packed + v * stride + at, &of[v]);
    }
    for (unsigned int v = 0; v < vectors; ++v)
        for (unsigned int part = 0; part < kParts; ++part)
            store(sums + v * kPair + part * kWidth, of[v].low.part[part] + of[v].high.part[part]);
}

static inline __attribute__((always_inline)) void multiply_few(const struct matrix_product *one, enum format format, float *scratch) {
    const size_t columns = one->columns, count = one->count, row_bytes = columns * width_of(format);
    const size_t stride = padded(columns, kPair), most = kFewSums / count;
    float *sums = scratch, *totals = sums + kFewSums * kPair, *packed = totals + kFewSums;
    for (size_t i = 0; i < count; ++i) pack(vector_of(one, i), columns, format, packed + i * stride);
    for (size_t first = 0; first < one->rows; first += most) {
        const size_t rows = one->rows - first < most ? one->rows - first : most;
        for (size_t row = 0; row < rows; ++row) {
            const char *values = (const char *)one->matrix + (first + row) * row_bytes;
            float *at = sums + row * count * kPair;
            for (size_t v = 0; v < count; v += kAtOnce)
                switch (count - v < kAtOnce ? count - v : kAtOnce) {
#define FEW(VECTORS) \
    case VECTORS: meet_few(VECTORS, values, columns, packed + v * stride, stride, format, at + v * kPair); break;
                    FEW(1)
#if defined __FMA__
                    FEW(2) FEW(3)
#endif
#if defined __AVX512F__
                    FEW(4) FEW(5) FEW(6)
#endif
                }
        }
        for (size_t i = 0; i < rows * count; i += 16) totals_of_sums(sums + i * kPair, totals + i);
        for (size_t v = 0; v < count; ++v) {
            float *product = product_of(one, v) + first;
            for (size_t row = 0; row < rows; ++row) product[row] = totals[row * count + v] * scale_of(format);
        }
    }
}

/* A row's products are kept for kKept rows: vector by vector they are then written to memory side by side. */
enum { kKept = 48 };
static inline __attribute__((always_inline)) void collect(
    const struct matrix_product *one, size_t row, const float *sums, void (*totals)(const float *, float *), float scale,
    float *results) {
    const size_t count = one->count, stride = padded(count, 16), kept = row % kKept, first = row - kept;
    for (size_t i = 0; i < count; i += 16) totals(sums + i * kPair, results + kept * stride + i);
    if (kept + 1 < kKept && row + 1 < one->rows) return;
    for (size_t i = 0; i < count; ++i) {
        float *product = product_of(one, i) + first;
        for (size_t at = 0; at <= kept; ++at) product[at] = results[at * stride + i] * scale;
    }
}

static inline __attribute__((always_inline)) void multiply_many(
    const struct matrix_product *one, enum format format, float *scratch) {
    const size_t columns = one->columns, count = one->count, row_bytes = columns * width_of(format);
    const size_t stride = padded(columns, kPair), steps = stride / kPair, sums_stride = padded(count, 16) * kPair;
    float *wide = scratch, *sums = wide + kGroup * kBlock * kPair, *results = sums + kGroup * sums_stride;
    float *packed = results + kKept * padded(count, 16);
    for (size_t i = 0; i < count; ++i) pack(vector_of(one, i), columns, format, packed + i * stride);
    for (size_t first = 0; first < one->rows; first += kGroup) {
        const size_t rows = one->rows - first < kGroup ? one->rows - first : kGroup;
        const char *matrix = (const char *)one->matrix + first * row_bytes;
        for (size_t from = 0; from < steps; from += kBlock) {
            const size_t to = steps - from < kBlock ? steps : from + kBlock, row_stride = kBlock * kPair;
            for (size_t row = 0; row < rows; ++row)
                for (size_t step = from; step < to; ++step) {
                    const char *values = matrix + row * row_bytes + step * kPair * width_of(format);
                    const size_t rest = columns - step * kPair;
                    const struct pair pair = rest < kPair ? widened_end(values, rest, format) : widened(values, format);
                    memcpy(wide + row * row_stride + (step - from) * kPair, &pair, sizeof pair);
                }
            for (size_t row = rows; row % kRows; ++row) memset(wide + row * row_stride, 0, row_stride * sizeof *wide);
            for (size_t row = 0; row < rows; row += kRows)
                meet_all(
                    wide + row * row_stride, row_stride, packed + from * kPair, stride, count, to - from, from == 0, to == steps,
                    sums + row * sums_stride, sums_stride);
        }
        for (size_t row = 0; row < rows; ++row) collect(one, first + row, sums + row * sums_stride, totals_of_ends, scale_of(format), results);
    }
}

/* ---- MXFP4: two columns in a byte, the even one in the lower half. Groups of 32 columns of a row share a scale, 2 to the power of its
   byte less 127; 0 counts as 0. A row begins with `skew` columns that are none, and ends with such: their codes are 0, and its steps
   of 128 columns are whole. `columns` and `skew` are multiples of 8. ---- */
enum { kPerWord = 8, kStep = kPerWord * kSums, kCoded = kStep + kSums /* a step's values, and scales of its words */ };

static inline size_t coded_steps(const struct matrix_product *one) { return padded(one->columns + one->skew, kStep) / kStep; }

/* Twice the values of codes 0 to 7 are 0, 1, 2, 3, 4, 6, 8 and 12: a hexadecimal digit each. */
static inline floats doubled_values(words codes) {
    const words digits = (words){} + 0xc8643210u;
    const floats magnitudes = __builtin_convertvector((integers)(digits >> ((codes & 7u) << 2) & 15u), floats);
    return (floats)((words)magnitudes ^ ((codes & 8u) << 28));
}

static inline floats powers_of(const uint8_t *scales, unsigned int part) {
    words places;
    uint32_t four;
    memcpy(&four, scales, sizeof four);
    for (unsigned int i = 0; i < kWidth; ++i) places[i] = (part * kWidth + i) / 4 * 8;
    return (floats)((((words){} + four) >> places & 255u) << 23);
}

/* `halves` has, of every step, half of the vector's values of columns 0, 8, ..., 120, then of 1, 9, ..., 121, and so on. */
static void pack_coded(const struct matrix_product *one, size_t i, float *halves) {
    const float *vector = vector_of(one, i);
    memset(halves, 0, coded_steps(one) * kStep * sizeof *halves);
    for (size_t at = 0; at < one->columns; ++at) {
        const size_t column = at + one->skew, step = column / kStep, inner = column % kStep;
        halves[step * kStep + inner % kPerWord * kSums + inner / kPerWord] = 0.5f * vector[at];
    }
}

static inline float coded_row_times(const uint8_t *codes, const uint8_t *scales, const float *halves, size_t steps) {
    sixteen sums = {};
    for (size_t step = 0; step < steps; ++step, halves += kStep)
        for (unsigned int part = 0; part < kParts; ++part) {
            words eights;
            memcpy(&eights, codes + (step * kParts + part) * sizeof eights, sizeof eights);
            floats lows = {}, highs = {};
            for (unsigned int column = 0; column < kPerWord; column += 2) {
                const float *at = halves + column * kSums + part * kWidth;
                lows = fused(doubled_values(eights >> 4 * column), loaded(at), lows);
                highs = fused(doubled_values(eights >> (4 * column + 4)), loaded(at + kSums), highs);
            }
            sums.part[part] = fused(lows + highs, powers_of(scales + step * 4, part), sums.part[part]);
        }
    return total(sums);
}

/* The values and scales of a row (steps, kCoded), as `meet_coded` wants them. */
static void widen_coded(const uint8_t *codes, const uint8_t *scales, size_t steps, float *values) {
    for (size_t step = 0; step < steps; ++step, values += kCoded)
        for (unsigned int part = 0; part < kParts; ++part) {
            words eights;
            memcpy(&eights, codes + (step * kParts + part) * sizeof eights, sizeof eights);
            for (unsigned int column = 0; column < kPerWord; ++column)
                store(values + column * kSums + part * kWidth, doubled_values(eights >> 4 * column));
            store(values + kStep + part * kWidth, powers_of(scales + step * 4, part));
        }
}

#if defined __AVX512F__
enum { kCodedRows = 3 };
#else
enum { kCodedRows = 2 };
#endif

/* kCodedRows rows and two vectors, or one. */
static inline __attribute__((always_inline)) void meet_coded(
    unsigned int vectors, const float *rows, size_t row_stride, const float *halves, size_t stride, size_t steps, float *sums,
    size_t sums_stride) {
    for (unsigned int part = 0; part < kParts; ++part) {
        floats sum[kCodedRows][2];
        for (unsigned int row = 0; row < kCodedRows; ++row) sum[row][0] = sum[row][1] = all(0);
        const float *left = rows + part * kWidth, *right = halves + part * kWidth;
        for (size_t step = 0; step < steps; ++step, left += kCoded, right += kStep) {
            floats low[kCodedRows][2], high[kCodedRows][2];
            for (unsigned int row = 0; row < kCodedRows; ++row)
                for (unsigned int v = 0; v < vectors; ++v) low[row][v] = high[row][v] = all(0);
            for (unsigned int column = 0; column < kPerWord; column += 2) {
                floats even[2], odd[2];
                for (unsigned int v = 0; v < vectors; ++v) {
                    even[v] = in_register(loaded(right + v * stride + column * kSums));
                    odd[v] = in_register(loaded(right + v * stride + (column + 1) * kSums));
                }
                for (unsigned int row = 0; row < kCodedRows; ++row) {
                    const floats first = in_register(loaded(left + row * row_stride + column * kSums));
                    const floats second = in_register(loaded(left + row * row_stride + (column + 1) * kSums));
                    for (unsigned int v = 0; v < vectors; ++v) {
                        low[row][v] = fused(first, even[v], low[row][v]);
                        high[row][v] = fused(second, odd[v], high[row][v]);
                    }
                }
            }
            for (unsigned int row = 0; row < kCodedRows; ++row) {
                const floats powers = loaded(left + row * row_stride + kStep);
                for (unsigned int v = 0; v < vectors; ++v) sum[row][v] = fused(low[row][v] + high[row][v], powers, sum[row][v]);
            }
        }
        for (unsigned int row = 0; row < kCodedRows; ++row)
            for (unsigned int v = 0; v < vectors; ++v) store(sums + row * sums_stride + v * kPair + part * kWidth, sum[row][v]);
    }
}

static void multiply_coded(const struct matrix_product *one, float *scratch) {
    const size_t steps = coded_steps(one), stride = steps * kStep, row_stride = steps * kCoded, count = one->count;
    const size_t sums_stride = padded(count, 16) * kPair, row_bytes = steps * (kStep / 2);
    const uint8_t *codes = one->matrix, *scales = one->scales;
    float *values = scratch, *sums = values + kCodedRows * row_stride, *results = sums + kCodedRows * sums_stride;
    float *packed = results + kKept * padded(count, 16);
    for (size_t i = 0; i < count; ++i) pack_coded(one, i, packed + i * stride);
    if (count == 1)
        for (size_t row = 0; row < one->rows; ++row)
            product_of(one, 0)[row] = coded_row_times(codes + row * row_bytes, scales + row * steps * 4, packed, steps);
    else
        for (size_t first = 0; first < one->rows; first += kCodedRows) {
            const size_t rows = one->rows - first < kCodedRows ? one->rows - first : kCodedRows;
            for (size_t row = first; row < first + rows; ++row)
                widen_coded(codes + row * row_bytes, scales + row * steps * 4, steps, values + (row - first) * row_stride);
            for (size_t v = 0; v < count; v += 2)
                if (v + 1 < count)
                    meet_coded(2, values, row_stride, packed + v * stride, stride, steps, sums + v * kPair, sums_stride);
                else
                    meet_coded(1, values, row_stride, packed + v * stride, stride, steps, sums + v * kPair, sums_stride);
            for (size_t row = 0; row < rows; ++row) collect(one, first + row, sums + row * sums_stride, totals_of_sums, 1.0f, results);
        }
}

/* How many values of scratch `kog_products` wants for so many columns, `skew` among them, and vectors; they begin at a multiple of 64
   bytes. */
size_t kog_products_scratch(size_t columns, size_t count) {
    const size_t values = kGroup * kBlock * kPair, coded = kCodedRows * (padded(columns, kStep) / kStep * kCoded);
    return (values > coded ? values : coded) + padded(count, 16) * (kGroup * kPair + kKept) + count * padded(columns, kStep);
}

static inline __attribute__((always_inline)) void multiply(const struct matrix_product *one, enum format format, float *scratch) {
    if (one->count == 1)
        multiply_one(one, format, scratch);
    else if (one->count <= kFew)
        multiply_few(one, format, scratch);
    else
        multiply_many(one, format, scratch);
}

void kog_products(const struct matrix_product *products, size_t num, enum format format, float *scratch) {
    for (const struct matrix_product *one = products; one < products + num; ++one) switch (format) {
            case kBfloat16: multiply(one, kBfloat16, scratch); break;
            case kFloat16: multiply(one, kFloat16, scratch); break;
            case kFloat32: multiply(one, kFloat32, scratch); break;
            case kMxfp4: multiply_coded(one, scratch); break;
        }
}
