"""The model as it is trained against the definitions: the Laneformer for every lane form, and a plain one of Ladder residuals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kog_dist.model.laneformer import KvCache, Laneformer, LaneLayer
from kog_dist.model.spec import ModelSpec
from kog_dist.train.model import Residual, TrainingModel

BASE = ModelSpec(
    hidden_size=32, num_layers=6, num_heads=8, num_kv_heads=8, intermediate_size=48, vocab_size=40, max_context=24,
    num_lanes=4, delay=2, sliding_window=5, window_layers=(0, 1, 3),
)  # fmt: skip
LANE_FORMS = {
    **{f"delay {delay}": replace(BASE, delay=delay) for delay in (0, 1, 2, 4, 9)},
    **{f"delay {delay}, not early": replace(BASE, delay=delay, early_comm=False) for delay in (1, 2, 4)},
    **{f"{lanes} lanes": replace(BASE, num_lanes=lanes) for lanes in (1, 2, 8)},
    "no communication": replace(BASE, attention_comm=False, mlp_comm=False),
    "attention local": replace(BASE, attention_comm=False),
    "mlp local, delay 1": replace(BASE, mlp_comm=False, delay=1),
    "norms per lane": replace(BASE, shared_norm_scale=False),
}
IDS = torch.randint(0, 40, (2, 21), generator=torch.Generator().manual_seed(5))


def gradients(module: Laneformer, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def cross_entropy(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), IDS[:, 1:].flatten())


@pytest.mark.parametrize("name", LANE_FORMS)
def test_lane_forms_equal_the_definition(name: str) -> None:
    spec = LANE_FORMS[name]
    definition, trained = Laneformer(spec, seed=3).double(), TrainingModel(spec, seed=3).double()
    torch.testing.assert_close(trained(IDS), definition(IDS), rtol=1e-12, atol=1e-12)
    loss = trained.loss(IDS[:, :-1], IDS[:, 1:])
    expected = cross_entropy(definition(IDS[:, :-1]))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(trained, loss), gradients(definition, expected), rtol=1e-5, atol=1e-9)


def ladder_definition(model: Laneformer, ids: Tensor) -> Tensor:
    """x_k = x_{k-1} + f_k(x_{k-2}) with x_{-1} = x_0, written down as it stands in arXiv 2501.06589; f_k sums over all lanes."""
    angles = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    x = [model.model.tok_embeddings(ids)[None]] * 2  # x_{-1}, x_0
    for layer in model.model.layers:
        assert isinstance(layer, LaneLayer)
        for attends in (True, False):
            norm = layer.attention_norm if attends else layer.ffn_norm
            read = norm(x[-2])
            out = layer.attention(read, *angles, None, None) if attends else layer.feed_forward(read)
            x.append(x[-1] + out.sum(0, keepdim=True))
    return model.logits(x[-1])


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_ladder_form_equals_its_definition(lanes: int) -> None:
    spec = replace(BASE, num_lanes=lanes, delay=0)
    plain, ladder = Laneformer(spec, seed=3).double(), TrainingModel(spec, seed=3, residual=Residual.LADDER).double()
    expected = ladder_definition(plain, IDS[:, :-1])
    torch.testing.assert_close(ladder(IDS[:, :-1]), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain(IDS[:, :-1]), expected, atol=1e-3)
    loss = ladder.loss(IDS[:, :-1], IDS[:, 1:])
    found, wanted = gradients(ladder, loss), gradients(plain, cross_entropy(expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


def test_all_forms_have_the_same_parameters_and_first_values() -> None:
    first = TrainingModel(BASE, seed=1).state_dict()
    for delay in (0, 1, 4):
        assert all(
            torch.equal(first[name], value)
            for name, value in TrainingModel(replace(BASE, delay=delay), seed=1).state_dict().items()
        )
    for spec in LANE_FORMS.values():
        if spec.shared_norm_scale:
            assert spec.num_parameters == BASE.num_parameters


def test_pieces_with_a_cache_are_those_of_the_definition() -> None:
    model = TrainingModel(BASE, seed=3).double()
    cache = KvCache()
    pieces = torch.cat([model(IDS[:, :9], cache), model(IDS[:, 9:], cache)], dim=1)
    torch.testing.assert_close(pieces, model(IDS))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's tracer looks at it
def test_compiled_layers_share_their_graphs_among_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own tracer but without code generation: as many graphs as kinds of layers, whatever the delay or seed."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(
        "kog_dist.train.model.compiled", lambda function: torch.compile(function, backend=counter, dynamic=False, fullgraph=True)
    )
    full = replace(BASE, sliding_window=None, window_layers=())
    ids, targets = IDS[:, :-1], IDS[:, 1:]
    counts: list[int] = []
    for spec in (full, replace(full, delay=1), replace(full, delay=4), replace(full, delay=0), full):
        model = TrainingModel(spec, seed=len(counts))
        plain = model.loss(ids, targets).detach()
        model.compile_layers()
        torch.testing.assert_close(model.loss(ids, targets).detach(), plain)
        counts.append(counter.frame_count)
    assert counts == [3, 3, 3, 4, 4]  # blocking layer, delayed layer, loss of several streams; with delay 0 the loss of one
