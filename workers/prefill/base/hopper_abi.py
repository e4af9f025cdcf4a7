"""What kernels for Hopper's matrix units (hopper.cuh) have in common, and the products that they are made of."""

from __future__ import annotations

HOPPER = (9, 0)  # compute capability of the GPUs that they run on: sm_90a is no other's
GROUPS, GROUP_ROWS, GROUP_THREADS = 2, 64, 128  # a group are four warps, which multiply so many rows at once
NUM_THREADS = (GROUPS + 1) * GROUP_THREADS  # of a thread block: one more group queues copies
SHARED_BYTES = 227 << 10  # all that a thread block can have


def product(name: str, columns: int, *, of_rows: bool, in_registers: bool = False) -> str:
    """A function that queues d (64 x `columns`) = or += a (64 x 16) times b, which is in shared memory.

    `of_rows`: d has a column for each row of b, and is added to if the call says so; a's rows are in shared memory, too, unless
    `in_registers`. Else a is in registers, b's 16 rows are multiplied by it, and d is added to. A thread has, for every 8
    columns, two neighbours of row laneid / 4 of its warp's 16 rows, and two of the row 8 below, from column 2 * (laneid % 4) on.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if of_rows and not in_registers:
        arguments, a, inputs = "u64 a, u64 b, bool adds", f"%{count}", '"l"(a), "l"(b), "r"(static_cast<u32>(adds))'
        b, adds, transposed = f"%{count + 1}", f"%{count + 2}", "0, 0"
    else:
        arguments, a = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b", "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        b, adds, transposed, inputs = f"%{count + 4}", "1", "1", '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)'
        if of_rows:
            arguments, inputs = arguments + ", bool adds", inputs + ', "r"(static_cast<u32>(adds))'
            adds, transposed = f"%{count + 5}", "0"
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {arguments}) {{
    asm volatile(
        "{{\\n .reg .pred adds;\\n setp.ne.b32 adds, {adds}, 0;\\n"
        " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, {a}, {b}, adds, 1, 1, {transposed};\\n}}"
        : {bound}
        : {inputs});
}}"""
