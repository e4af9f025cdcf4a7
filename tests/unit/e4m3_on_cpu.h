// E4M3 numbers for the twins of device code on a CPU.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>

// The values of the codes 0 to 126, which ascend. 127 is no number.
inline const std::array<float, 127>& e4m3_values() {
    static const auto values = [] {
        std::array<float, 127> all;
        for (int code = 0; code < 127; ++code)
            all[code] = code < 8 ? std::ldexp(static_cast<float>(code), -9) : std::ldexp(8.0f + code % 8, code / 8 - 10);
        return all;
    }();
    return values;
}
inline float e4m3_value(unsigned code) {
    const float value = (code & 0x7f) == 0x7f ? NAN : e4m3_values()[code & 0x7f];
    return code & 0x80 ? -value : value;
}
// The nearest code; of two the even one; 448 for all beyond it.
inline unsigned to_e4m3(float value) {
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return 0x7f | sign;
    const auto& values = e4m3_values();
    const float size = std::min(std::fabs(value), 448.0f);
    const unsigned above = static_cast<unsigned>(std::lower_bound(values.begin(), values.end(), size) - values.begin());
    if (above == 0) return sign;
    const float down = size - values[above - 1], up = values[above] - size;
    return (down < up || (down == up && above % 2 == 1) ? above - 1 : above) | sign;
}
