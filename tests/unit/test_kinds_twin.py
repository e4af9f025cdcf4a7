"""Monokernels whose layers are stored one by one, on a CPU: gated attention and delta nets, against the float64 interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn, LayerSpec, Norm
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weights import RankReader
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.device_weights import to_values
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import PROMPT, Model, answer
from tests.unit.test_expert_twin import IN_LAYER_1, record_of, silenced

pytestmark = needs_compiler
NORM = Norm(1e-6, adds_one=True)
# Two lanes share a KV head, of whose 256 values 64 rotate, as in Qwen3.5.
GATED = AttentionMixer(8, 2, 256, qk_norm=True, rotary_dim=64, gated=True)


DENSE = Ffn(64)


def spec_of(*mixers: Any, ffn: Any = DENSE, **others: Any) -> ModelSpec:
    sizes = {"hidden_size": 64, "vocab_size": 76, "max_context": 32, "num_lanes": 4} | others
    return ModelSpec.of_layers([LayerSpec(mixer, ffn, NORM) for mixer in mixers], **sizes)


SMALL = AttentionMixer(8, 4, 32, qk_norm=True, rotary_dim=8, gated=True)
NET = DeltaNet(4, 8, 32, 32, 4)
SPECS = {
    "gated attention": spec_of(GATED, GATED),
    "gated attention, heads without norms": spec_of(AttentionMixer(4, 4, 32, rotary_dim=8, gated=True)),
    "delta nets": spec_of(NET, NET, SMALL, NET),
    # As published models: keys and values of 128, beside heads of 256.
    "delta nets, published heads": spec_of(
        DeltaNet(4, 8, 128, 128, 4), AttentionMixer(4, 2, 256, qk_norm=True, rotary_dim=64, gated=True)
    ),
    # Three value heads to a key head, two keys of a thread, and a convolution over three tokens.
    "delta nets, odd shapes": spec_of(DeltaNet(4, 12, 64, 16, 3), AttentionMixer(12, 4, 16), DeltaNet(4, 12, 64, 16, 3)),
    # A lane has 40 columns of an expert and 72 of the shared one: five steps of 32 in all, which end within tiles.
    "experts beside a shared one": spec_of(NET, SMALL, NET, ffn=Experts(160, ExpertsSpec(16, 3), 288)),
    # As Qwen3-Next, with tiny experts: a part of theirs is two steps, and a tile has at most eight parts.
    "ten experts of 512 beside a shared one": spec_of(NET, SMALL, ffn=Experts(192, ExpertsSpec(512, 10), 256)),
}
SHARED = "experts beside a shared one"
RANKS = {"delta nets": (1, 4), SHARED: (1, 4)}  # besides two; on four a head has two slices, else one


class Tensors:
    """A checkpoint of 16-bit values in memory."""

    head_rounding, verify = None, False

    def __init__(self, spec: ModelSpec, tensors: dict[str, NDArray[np.float32]]) -> None:
        self.spec, self.layouts, self.tensors = spec, tensor_layouts(spec), tensors

    def stored_dtype(self, name: str) -> str:
        return "F32"

    def read_part(self, name: str, part_idx: int, out: Any, *, verify: bool) -> None:
        first, last = self.layouts[name].parts[part_idx]
        out.reshape(-1)[:] = self.tensors[name][first:last].reshape(-1)

    def read_parts(self, name: str, whole: Any, part_indices: Any, verified: Any) -> None:
        whole[...] = self.tensors[name]


def interpreted(
    spec: ModelSpec, tensors: dict[str, NDArray[np.float32]], ids: list[int], kv_dtype: str, dtype: type[Any] = np.float64
) -> Any:
    """Logits (positions, vocabulary) of the interpreter in `dtype`, whose keys and values are rounded as a kernel's."""
    source: Any = Tensors(spec, tensors)
    lanes = tuple(range(spec.num_lanes))
    weights = RankReader(source, lanes, lanes, np.dtype(dtype)).read()
    engine = Interpreter(make_plan(spec, 1), 0, weights, None, dtype=dtype, kv_dtype=kv_dtype)
    steps = [engine.step(token, at, SamplingParams(), gather_logits=True) for at, token in enumerate(ids)]
    return np.array([step.logits for step in steps])


class StoredModel(Model):
    """A random model of stored layers."""

    def logits(self, ids: list[int]) -> Any:
        """See `interpreted`."""
        values = {name: to_values(words, self.dtype) for name, words in self.words.items()}
        return interpreted(self.spec, values, ids, self.kv_dtype)


@pytest.mark.parametrize("name", SPECS)
def test_ranks_have_the_logits_of_the_interpreter_and_equal_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StoredModel(SPECS[name], "bfloat16", monkeypatch)
    begins_at_head = not model.spec.is_recurrent  # prefill does not know delta nets
    tokens, logits = answer(model, 2, tmp_path / "2", begins_at_head=begins_at_head)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    assert np.linalg.norm(logits - wanted[-1]) < 2e-3 * np.linalg.norm(wanted[-1])
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    for num_ranks in RANKS.get(name, (1,)):
        changed = with_silences if name == SHARED and num_ranks == 1 else dict
        others, other_logits = answer(model, num_ranks, tmp_path / str(num_ranks), num_runs=1, changed=changed)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes(), f"{num_ranks} ranks"
    if name == SHARED:
        waits_name_the_shared_expert(model.spec, tmp_path / "1")


def with_silences(sources: Mapping[str, str]) -> dict[str, str]:
    """Faults in layer 1. SILENCE 1: the gate's logit is not published, 2: activations of the shared expert of thread block 1."""
    of_shared = f"{IN_LAYER_1} && twin_silence == 2 && rows.role.cta == 1 && kColumns == kSharedFfn"
    return silenced(sources, f"{IN_LAYER_1} && twin_silence == 1 && expert == kNumExperts", of_shared)


def waits_name_the_shared_expert(spec: ModelSpec, folder: Path) -> None:
    """By the number behind those that are chosen from."""
    shape = TrialShape(spec, range(spec.num_lanes), max_ctas=5, copies=2, max_slots=6)
    gate, activations = (record_of(shape, folder, silence) for silence in (1, 2))
    assert shape.experts is not None
    assert (gate.phase, gate.layer, gate.lane, gate.expert) == (Phase.SELECT, 1, NONE, shape.experts.num_experts)
    assert (activations.phase, activations.layer, activations.expert) == (Phase.DOWN, 1, shape.experts.num_experts)
    assert 0 < activations.num_missing <= shape.experts.lane_shared // 2
