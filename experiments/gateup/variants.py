"""The variants of gateup.cu, and how each is built. `python variants.py` builds all that are missing, for sm_90a."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HIDDEN, FFN, LANES = 3072, 1536, 8


@dataclass(frozen=True)
class Variant:
    name: str
    form: int  # 0: SwiGLU behind a tile; 1: beside the next one's steps; 2: ping-pong; 3: products only
    cluster_rows: int
    cluster_columns: int
    slots: int
    ahead: int = 0  # steps that are read into L2 ahead of the ring

    @property
    def cluster(self) -> int:
        return self.cluster_rows * self.cluster_columns

    @property
    def tile_rows(self) -> int:
        return 64 if self.form == 2 else 128

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.slots * ((self.tile_rows + 256) * 128 + 16)

    def header(self, hidden: int = HIDDEN, ffn: int = FFN) -> str:
        numbers = {
            "kHidden": hidden, "kFfn": ffn, "kForm": self.form, "kClusterRows": self.cluster_rows,
            "kClusterColumns": self.cluster_columns, "kSlots": self.slots,
            "kAhead": self.ahead,
        }  # fmt: skip
        lines = [f"constexpr int {name} = {value};" if name == "kForm" else f"constexpr u32 {name} = {value};" for name, value in numbers.items()]
        return "\n".join(["#pragma once", "namespace kog {", *lines, "}", ""])

    @property
    def cubin(self) -> Path:
        return HERE / "cubins" / f"{self.name.replace(' ', '_').replace(',', '')}.cubin"


VARIANTS = (
    Variant("c2 beside", 1, 2, 1, 4),
    Variant("c2 behind", 0, 2, 1, 4),
    Variant("c1 beside", 1, 1, 1, 4),
    Variant("c2 beside, 3 slots", 1, 2, 1, 3),
    Variant("c2 beside, ahead 6", 1, 2, 1, 4, 6),
    Variant("c1x2 beside", 1, 1, 2, 4),
    Variant("c2x2 beside", 1, 2, 2, 4),
    Variant("c4 beside", 1, 4, 1, 4),
    Variant("c2 ping-pong", 2, 2, 1, 5),
    Variant("c2 products only", 3, 2, 1, 4),
)


def product(name: str, columns: int) -> str:
    """d (64 x columns) = or += a (64 x 16) times b, both rows in shared memory, as attention_abi.py has it."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""namespace kog {{
__device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b, bool adds) {{
    asm volatile(
        "{{\\n .reg .pred adds;\\n setp.ne.b32 adds, %{count + 2}, 0;\\n"
        " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, %{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n}}"
        : {bound}
        : "l"(a), "l"(b), "r"(static_cast<u32>(adds)));
}}
}}
"""


def build(variant: Variant) -> str:
    """Build it; the compiler's report."""
    folder = HERE / "build" / variant.name.replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    for source in (HERE / "src").iterdir():
        (folder / source.name).write_text(source.read_text())
    (folder / "gateup_shape.cuh").write_text(variant.header() + product("multiply_rows", 256))
    variant.cubin.parent.mkdir(exist_ok=True)
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-std=c++17", "-lineinfo", "-ftz=false", "-prec-div=true", "-Xptxas", "-v,-warn-spills"]
    done = subprocess.run(
        [*command, "-o", str(variant.cubin), str(folder / "gateup.cu")], capture_output=True, text=True, check=False, timeout=300
    )
    log = done.stdout + done.stderr
    (folder / "log.txt").write_text(log)
    if done.returncode:
        raise SystemExit(f"{variant.name}: {log}")
    return log


if __name__ == "__main__":
    names = sys.argv[1:]
    chosen = [variant for variant in VARIANTS if (variant.name in names if names else not variant.cubin.exists())]
    with ThreadPoolExecutor(2) as pool:
        for variant, log in zip(chosen, pool.map(build, chosen), strict=True):
            print(f"== {variant.name}\n{log}")
