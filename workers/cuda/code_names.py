"""What device code calls the codes and scales of quantised weights: structs of that name, for each use of its own."""

CODES = {"E4M3": "E4m3", "E2M1": "E2m1", "INT4": "Int4"}  # by `Coding.number`
SCALES = {"F32": "Float32Scale", "BF16": "Bf16Scale", "F16": "Fp16Scale", "E8M0": "E8m0Scale"}  # by `Coding.scale`
