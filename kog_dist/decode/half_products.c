/* Products of 16-bit and MXFP4 matrices and float32 vectors, for CPU ranks. A row's sum has an order that its length alone decides, so
   its bits depend neither on the other rows nor on how many there are. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { kWidth = 16 }; /* values of a vector register */

typedef float floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t words __attribute__((vector_size(4 * kWidth)));

/* `product` (rows) = `matrix` (rows, columns) times `vector` (columns). */
struct half_product {
    const uint16_t *matrix;
    const float *vector;
    float *product;
    uint64_t rows, columns;
};

static inline floats loaded(const float *at) {
    floats values;
    memcpy(&values, at, sizeof values);
    return values;
}

static inline float total(floats v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

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

/* The product of a row and a vector. `even` and `odd` have the vector's values, times the scale, and zeros behind the last ones.
   One row after the other reads memory in order, which is what it does fastest. */
static inline __attribute__((always_inline)) float row_times(
    const uint16_t *row, const float *even, const float *odd, size_t columns, enum format format) {
    floats lows = {}, highs = {};
    size_t at = 0;
    for (; at + 2 * kWidth <= columns; at += 2 * kWidth) {
        words pairs;
        memcpy(&pairs, row + at, sizeof pairs);
        lows += lower(pairs, format) * loaded(even + at / 2);
        highs += upper(pairs, format) * loaded(odd + at / 2);
    }
    if (at < columns) {
        words pairs = {};
        memcpy(&pairs, row + at, (columns - at) * sizeof *row);
        lows += lower(pairs, format) * loaded(even + at / 2);
        highs += upper(pairs, format) * loaded(odd + at / 2);
    }
    return total(lows + highs) * scale_of(format);
}

/* `scratch` has room for the longest vector and 2 * (kWidth + 1) values more. */
static inline __attribute__((always_inline)) void multiply(
    const struct half_product *products, size_t count, float *scratch, enum format format) {
    for (const struct half_product *one = products; one < products + count; ++one) {
        const size_t columns = one->columns, half = columns / 2 + kWidth + 1;
        float *even = scratch, *odd = scratch + half;
        memset(even + columns / 2, 0, (kWidth + 1) * sizeof *even);
        memset(odd + columns / 2, 0, (kWidth + 1) * sizeof *odd);
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

enum { kPerWord = 8, kStep = kPerWord * kWidth };
typedef int32_t integers __attribute__((vector_size(4 * kWidth)));

/* Twice the values of codes 0 to 7 are 0, 1, 2, 3, 4, 6, 8 and 12: a hexadecimal digit each. */
static inline floats doubled_values(words codes) {
    const words digits = (words){} + 0xc8643210u;
    const floats magnitudes = __builtin_convertvector((integers)(digits >> ((codes & 7u) << 2) & 15u), floats);
    return (floats)((words)magnitudes ^ ((codes & 8u) << 28));
}

/* `halves` has, of every step, half of the vector's values of columns 0, 8, ..., 120, then of 1, 9, ..., 121, and so on. */
static inline float coded_row_times(const uint8_t *codes, const uint8_t *scales, const float *halves, size_t steps) {
    const words places = {0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24};
    floats sums = {};
    for (size_t step = 0; step < steps; ++step, halves += kStep) {
        words eights;
        uint32_t four;
        memcpy(&eights, codes + step * sizeof eights, sizeof eights);
        memcpy(&four, scales + step * sizeof four, sizeof four);
        floats lows = {}, highs = {};
        for (unsigned int column = 0; column < kPerWord; column += 2) {
            lows += doubled_values(eights >> 4 * column) * loaded(halves + column * kWidth);
            highs += doubled_values(eights >> (4 * column + 4)) * loaded(halves + (column + 1) * kWidth);
        }
        sums += (lows + highs) * (floats)((((words){} + four) >> places & 255u) << 23);
    }
    return total(sums);
}

/* `scratch` has room for the longest vector and what makes its steps whole. */
void kog_mxfp4_products(const struct mxfp4_product *products, size_t count, float *scratch) {
    for (const struct mxfp4_product *one = products; one < products + count; ++one) {
        memset(scratch, 0, one->steps * kStep * sizeof *scratch);
        for (size_t at = 0; at < one->columns; ++at) {
            const size_t column = at + one->skew, step = column / kStep, inner = column % kStep;
            scratch[step * kStep + inner % kPerWord * kWidth + inner / kPerWord] = 0.5f * one->vector[at];
        }
        for (size_t row = 0; row < one->rows; ++row)
            one->product[row] = coded_row_times(
                one->codes + row * one->steps * (kStep / 2), one->scales + row * one->steps * sizeof(uint32_t), scratch, one->steps);
    }
}
