// How operands of Hopper's products stand in shared memory, as descriptors say it.
#pragma once

#include "hopper.cuh"

namespace kog {

// Operands in shared memory stand in panels: all rows of `kPanel` 16-bit values (16, 32 or 64, which a tensor map swizzles over as many
// bytes as they have), then all rows of the next ones. Eight rows repeat themselves.
template <int kPanel>
constexpr u64 kEightRows = static_cast<u64>(8 * kPanel * 2 >> 4) << 32 | static_cast<u64>(kPanel == 64 ? 1 : kPanel == 32 ? 2 : 3) << 62;

// Rows of an operand whose products are summed over the values of a row.
template <int kPanel>
__device__ __forceinline__ u64 rows_at(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | kEightRows<kPanel>;
}
// Rows of an operand whose products are summed over the rows; `panel_bytes` from one panel to the next.
template <int kPanel>
__device__ __forceinline__ u64 columns_at(u32 address, u32 panel_bytes) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(panel_bytes >> 4) << 16 | kEightRows<kPanel>;
}

}  // namespace kog
