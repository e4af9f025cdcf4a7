// E4M3 numbers for the twins of device code on a CPU.
#pragma once
#include <algorithm>
#include <cmath>

inline float e4m3_value(unsigned code) {
    if ((code & 0x7f) == 0x7f) return NAN;
    const unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    const float value = exponent ? std::ldexp(8.0f + mantissa, static_cast<int>(exponent) - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    return code & 0x80 ? -value : value;
}
// The nearest code; of two the even one; 448 for all beyond it.
inline unsigned to_e4m3(float value) {
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return 0x7f | sign;
    const float size = std::min(std::fabs(value), 448.0f);
    unsigned best = 0;
    for (unsigned code = 1; code < 127; ++code) {
        const float there = std::fabs(e4m3_value(code) - size), here = std::fabs(e4m3_value(best) - size);
        if (there < here || (there == here && code % 2 == 0)) best = code;
    }
    return best | sign;
}
