"""Families of models: what their `config.json` means, and how their files hold tensors. Nothing else knows names of tensors.

A new one is a module with a `FAMILY`, a row below, and a test against transformers (tests/unit/test_families.py).
"""

from __future__ import annotations

from kog_dist.model.families import delta_nets, gpt_oss, laneformer, llama, mistral, qwen2, qwen3, qwen3_moe
from kog_dist.model.families.stored import Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        laneformer.FAMILY,
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        delta_nets.NEXT,
        delta_nets.DENSE,
        delta_nets.WITH_EXPERTS,
    )
    for model_type in family.model_types
}
