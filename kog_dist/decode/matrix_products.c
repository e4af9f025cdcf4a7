/* Products of 16-bit and MXFP4 matrices and float32 vectors, for CPU ranks. A row's sum has an order that its length alone decides, so
   its bits depend neither on the other rows nor on how many there are, nor on the instruction set. */
#include "vectors.h"

/* `product` (rows) = `matrix` (rows, columns) times `vector` (columns). */
struct half_product {
    const uint16_t *matrix;
    const float *vector;
    float *product;
    uint64_t rows, columns;
};

enum format { kBfloat16, kFloat16 };

/* Two neighbouring values are one word. The lower and the upper one of each as float32; of binary16 divided by 2^112: its exponent
   is taken as it stands. Powers of two that make up for that change no bit of a sum. */
static inline __attribute__((always_inline)) floats lower(words pairs, enum format format) {
    return (floats)(format == kBfloat16 ? pairs << 16 : (pairs & 0x8000u) << 16 | (pairs & 0x7fffu) << 13);
}
static inline __attribute__((always_inline)) floats upper(words pairs, enum format format) {
    return (floats)(format == kBfloat16 ? pairs & 0xffff0000u : (pairs & 0x80000000u) | (pairs >> 3 & 0x0fffe000u));
}
static inline float scale_of(enum format format) { return format == kBfloat16 ? 1.0f : 0x1p56f; } /* of vectors, and of sums */

static inline __attribute__((always_inline)) void add_pairs(
    const uint16_t *pairs, const float *even, const float *odd, sixteen *lows, sixteen *highs, enum format format) {
    for (unsigned int part = 0; part < kParts; ++part) {
        words these;
        memcpy(&these, pairs + part * 2 * kWidth, sizeof these);
        lows->part[part] = fused(lower(these, format), loaded(even + part * kWidth), lows->part[part]);
        highs->part[part] = fused(upper(these, format), loaded(odd + part * kWidth), highs->part[part]);
    }
}

/* The product of a row and a vector. `even` and `odd` have the vector's values, times the scale, and zeros behind the last ones.
   One row after the other reads memory in order, which is what it does fastest. */
static inline __attribute__((always_inline)) float row_times(
    const uint16_t *row, const float *even, const float *odd, size_t columns, enum format format) {
    sixteen lows = {}, highs = {};
    size_t at = 0;
    for (; at + 2 * kSums <= columns; at += 2 * kSums) add_pairs(row + at, even + at / 2, odd + at / 2, &lows, &highs, format);
    if (at < columns) {
        uint16_t last[2 * kSums] = {};
        memcpy(last, row + at, (columns - at) * sizeof *row);
        add_pairs(last, even + at / 2, odd + at / 2, &lows, &highs, format);
    }
    for (unsigned int part = 0; part < kParts; ++part) lows.part[part] += highs.part[part];
    return total(lows) * scale_of(format);
}

/* `scratch` has room for the longest vector and 2 * (kSums + 1) values more. */
static inline __attribute__((always_inline)) void multiply(
    const struct half_product *products, size_t count, float *scratch, enum format format) {
    for (const struct half_product *one = products; one < products + count; ++one) {
        const size_t columns = one->columns, half = columns / 2 + kSums + 1;
        float *even = scratch, *odd = scratch + half;
        memset(even + columns / 2, 0, (kSums + 1) * sizeof *even);
        memset(odd + columns / 2, 0, (kSums + 1) * sizeof *odd);
        for (size_t at = 0; at < columns; ++at) (at & 1 ? odd : even)[at / 2] = one->vector[at] * scale_of(format);
        for (size_t row = 0; row < one->rows; ++row)
            one->product[row] = row_times(one->matrix + row * columns, even, odd, columns, format);
    }
}

void kog_bfloat16_products(const struct half_product *products, size_t count, float *scratch) {
    multiply(products, count, scratch, kBfloat16);
}
void kog_float16_products(const struct half_product *products, size_t count, float *scratch) {
    multiply(products, count, scratch, kFloat16);
}

/* A matrix of MXFP4 codes, two columns in a byte, the even one in the lower half. Groups of 32 columns of a row share a scale, 2 to
   the power of its byte less 127; 0 counts as 0. A row begins with `skew` columns that are none, and ends with such: their codes
   are 0, and `steps` of 128 columns are whole. `columns` and `skew` are multiples of 8. */
struct mxfp4_product {
    const uint8_t *codes, *scales;
    const float *vector;
    float *product;
    uint64_t rows, columns, skew, steps;
};

enum { kPerWord = 8, kStep = kPerWord * kSums };

/* Twice the values of codes 0 to 7 are 0, 1, 2, 3, 4, 6, 8 and 12: a hexadecimal digit each. */
static inline floats doubled_values(words codes) {
    const words digits = (words){} + 0xc8643210u;
    const floats magnitudes = __builtin_convertvector((integers)(digits >> ((codes & 7u) << 2) & 15u), floats);
    return (floats)((words)magnitudes ^ ((codes & 8u) << 28));
}

/* `halves` has, of every step, half of the vector's values of columns 0, 8, ..., 120, then of 1, 9, ..., 121, and so on. */
static inline float coded_row_times(const uint8_t *codes, const uint8_t *scales, const float *halves, size_t steps) {
    sixteen sums = {};
    for (size_t step = 0; step < steps; ++step, halves += kStep)
        for (unsigned int part = 0; part < kParts; ++part) {
            words eights, places;
            uint32_t four;
            memcpy(&eights, codes + (step * kParts + part) * sizeof eights, sizeof eights);
            memcpy(&four, scales + step * sizeof four, sizeof four);
            for (unsigned int i = 0; i < kWidth; ++i) places[i] = (part * kWidth + i) / 4 * 8;
            floats lows = {}, highs = {};
            for (unsigned int column = 0; column < kPerWord; column += 2) {
                const float *at = halves + column * kSums + part * kWidth;
                lows = fused(doubled_values(eights >> 4 * column), loaded(at), lows);
                highs = fused(doubled_values(eights >> (4 * column + 4)), loaded(at + kSums), highs);
            }
            sums.part[part] = fused(lows + highs, (floats)((((words){} + four) >> places & 255u) << 23), sums.part[part]);
        }
    return total(sums);
}

/* `scratch` has room for the longest vector and what makes its steps whole. */
void kog_mxfp4_products(const struct mxfp4_product *products, size_t count, float *scratch) {
    for (const struct mxfp4_product *one = products; one < products + count; ++one) {
        memset(scratch, 0, one->steps * kStep * sizeof *scratch);
        for (size_t at = 0; at < one->columns; ++at) {
            const size_t column = at + one->skew, step = column / kStep, inner = column % kStep;
            scratch[step * kStep + inner % kPerWord * kSums + inner / kPerWord] = 0.5f * one->vector[at];
        }
        for (size_t row = 0; row < one->rows; ++row)
            one->product[row] = coded_row_times(
                one->codes + row * one->steps * (kStep / 2), one->scales + row * one->steps * sizeof(uint32_t), scratch, one->steps);
    }
}
