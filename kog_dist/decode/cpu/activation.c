/* The activations of FFNs, for CPU ranks: value by value, so bits depend on nothing else. */
#include "vectors.h"

static inline floats least(floats a, floats b) { return chosen(a > b, b, a); } /* a NaN stays one */
static inline floats most(floats a, floats b) { return chosen(a < b, b, a); }

/* `activations` (rows, width) of gate_up (rows, 2 * width), gates first: g / (1 + exp(-alpha g)) * u; of clamped ones g is at most
   `limit`, u within -limit .. limit, and then u + 1. */
void kog_activate(const float *gate_up, float *activations, size_t rows, size_t width, int is_clamped, float alpha, float limit) {
    for (size_t row = 0; row < rows; ++row, gate_up += 2 * width, activations += width)
        for (size_t at = 0; at < width; at += kWidth) {
            const size_t count = width - at < kWidth ? width - at : kWidth;
            floats gate = {}, up = {};
            memcpy(&gate, gate_up + at, count * sizeof(float));
            memcpy(&up, gate_up + width + at, count * sizeof(float));
            if (is_clamped) {
                gate = least(gate, all(limit));
                up = most(least(up, all(limit)), all(-limit)) + 1.0f;
            }
            const floats result = gate / (exponential(gate * -alpha) + 1.0f) * up;
            memcpy(activations + at, &result, count * sizeof(float));
        }
}
