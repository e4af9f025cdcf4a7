"""Monokernels whose layers are stored one by one, on a CPU: gated attention and delta nets, against the float64 interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.layers import AttentionMixer, DeltaNet, Ffn, LayerSpec, Norm
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weights import RankReader
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.device_weights import to_values
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import PROMPT, Model, answer

pytestmark = needs_compiler
NORM = Norm(1e-6, adds_one=True)
# Two lanes share a KV head, of whose 256 values 64 rotate, as in Qwen3.5.
GATED = AttentionMixer(8, 2, 256, qk_norm=True, rotary_dim=64, gated=True)


def spec_of(*mixers: Any, **others: Any) -> ModelSpec:
    sizes = {"hidden_size": 64, "vocab_size": 76, "max_context": 32, "num_lanes": 4} | others
    return ModelSpec.of_layers([LayerSpec(mixer, Ffn(64), NORM) for mixer in mixers], **sizes)


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
}
RANKS = {"delta nets": (1, 4)}  # besides two; on four ranks a head has two slices, else one


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


def interpreted(spec: ModelSpec, tensors: dict[str, NDArray[np.float32]], ids: list[int], kv_dtype: str) -> Any:
    """Logits (positions, vocabulary) of the interpreter in float64, whose keys and values are rounded as a kernel's."""
    source: Any = Tensors(spec, tensors)
    lanes = tuple(range(spec.num_lanes))
    weights = RankReader(source, lanes, lanes, np.dtype(np.float64)).read()
    engine = Interpreter(make_plan(spec, 1), 0, weights, None, dtype=np.float64, kv_dtype=kv_dtype)
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
        others, other_logits = answer(model, num_ranks, tmp_path / str(num_ranks), num_runs=1)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes(), f"{num_ranks} ranks"
