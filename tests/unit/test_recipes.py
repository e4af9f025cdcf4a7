"""Layers as data, and the recipes that all which is planned is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.recipes import Recipe, Stage, all_recipes, recipe_of, recipes
from kog_dist.decode.plan.steps import NONE, Kind, Phase, Site, Value
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.layers import AttentionMixer, Experts, Ffn, LayerSpec, Norm
from kog_dist.model.layout import layer_prefix, tensor_layouts
from kog_dist.model.spec import ModelSpec, laneformer_2b

LANEFORMER = ModelSpec(32, 3, 8, 4, 64, 50, num_lanes=4, delay=1, sliding_window=8, window_layers=(0, 2), norm_eps=1e-6)
WITH_EXPERTS = replace(LANEFORMER, delay=0, experts=ExpertsSpec(6, 2, router_bias=True, bias=True), out_bias=True, qkv_bias=True)
MODELS = [LANEFORMER, replace(LANEFORMER, delay=0, attention_sinks=True, qk_norm=True), WITH_EXPERTS]


def test_layers_say_what_a_model_is_made_of() -> None:
    windowed, full = AttentionMixer(8, 4, 4, 8), AttentionMixer(8, 4, 4)
    norm = Norm(1e-6)
    assert LANEFORMER.layers == tuple(LayerSpec(mixer, Ffn(64), norm) for mixer in (windowed, full, windowed))
    assert LANEFORMER.layers[0] is LANEFORMER.layers[2], "equal layers are made once"
    assert WITH_EXPERTS.layers[1] == LayerSpec(
        replace(full, qkv_bias=True, out_bias=True), Experts(64, ExpertsSpec(6, 2, router_bias=True, bias=True)), norm
    )
    assert replace(LANEFORMER, shared_norm_scale=False).layers[0].norm == Norm(1e-6, by_lane=True)


def test_parameters_are_those_of_the_layers() -> None:
    assert laneformer_2b().num_parameters == 2_320_069_632
    attention, ffn = 32 * (32 + 2 * 16) + 32 * 32, 3 * 32 * 64
    assert (LANEFORMER.layers[0].mixer.num_values(32), LANEFORMER.layers[0].ffn.num_values(32)) == (attention, ffn)
    assert WITH_EXPERTS.layers[0].mixer.num_values(32) == attention + 64 + 32
    experts = WITH_EXPERTS.layers[0].ffn
    assert experts.num_values(32) == 6 * 33 + 6 * (ffn + 2 * 64 + 32)
    assert experts.num_read(32) == 6 * 33 + 2 * (ffn + 2 * 64 + 32)


@pytest.mark.parametrize("spec", MODELS, ids=["Laneformer", "dense", "experts"])
def test_a_recipe_leads_from_the_stream_to_the_partial_outputs(spec: ModelSpec) -> None:
    for layer, (mixer, ffn) in enumerate(recipes(spec)):
        assert (mixer.site, ffn.site) == (Site.ATTENTION, Site.MLP)
        for recipe in (mixer, ffn):
            known = {Kind.STREAM}
            for stage in recipe.stages:
                assert set(stage.reads) <= known, "a stage reads what came before it"
                assert not known & set(stage.writes)
                known |= set(stage.writes)
            assert recipe.stages[-1].writes == (Kind.PARTIAL,)
            assert set(recipe.shapes) == known - {Kind.STREAM, Kind.PARTIAL, Kind.CACHE}
            assert recipe.stages[-1].num_rows == spec.hidden_size
            assert all(recipe_of(spec, layer, stage.phase) is recipe for stage in recipe.stages)
        assert mixer.state is not None
        assert ffn.state is None


@pytest.mark.parametrize("spec", MODELS, ids=["Laneformer", "dense", "experts"])
def test_matrices_of_stages_are_those_of_the_layout(spec: ModelSpec) -> None:
    layouts = tensor_layouts(spec)
    for layer, of_layer in enumerate(recipes(spec)):
        for stage in (stage for recipe in of_layer for stage in recipe.stages if stage.tensors):
            shapes = [layouts[f"{layer_prefix(layer)}{name}.weight"].shape for name in stage.tensors]
            front = (spec.num_lanes,) if stage.is_by_lane else ()
            assert {(*shape[:-2], shape[-1]) for shape in shapes} == {(*front, stage.num_columns)}
            assert sum(shape[-2] for shape in shapes) == stage.num_rows


@pytest.mark.parametrize("spec", MODELS, ids=["Laneformer", "dense", "experts"])
def test_what_a_layer_has_besides_matrices_and_norms_of_streams_is_the_layout_s(spec: ModelSpec) -> None:
    """In its order, all of it, with its sizes: what GPUs load and prefill makes room for."""
    is_shared = spec is not LANEFORMER  # the stream
    spec = replace(spec, qkv_bias=True, qk_norm=True, out_bias=is_shared, attention_sinks=is_shared)
    prefix, (mixer, ffn) = layer_prefix(1), recipes(spec)[1]
    matrices = {f"{name}.weight" for recipe in (mixer, ffn) for stage in recipe.stages for name in stage.tensors}
    within = {name.removeprefix(prefix): one for name, one in tensor_layouts(spec).items() if name.startswith(prefix)}
    others = [name for name in within if name not in matrices and not name.startswith(("attention_norm.", "ffn_norm."))]
    found = [name for recipe in (mixer, ffn) for one in recipe.vectors.values() for name in one.tensors]
    assert found == [name for name in others if ".experts." not in name]
    for one in (*mixer.vectors.values(), *ffn.vectors.values()):
        lanes = spec.num_lanes if one.is_by_lane else 1
        assert sum(within[name].num_values for name in one.tensors) == lanes * one.num_values
        assert {within[name].has_lanes for name in one.tensors} == {one.is_by_lane}


def test_layers_of_one_kind_share_a_recipe() -> None:
    of_layers = recipes(LANEFORMER)
    assert of_layers[0][0] is of_layers[2][0]
    assert of_layers[0][1] is of_layers[1][1]
    assert len(all_recipes(LANEFORMER)) == 3, "windowed and full attention, and one FFN"


def test_what_is_of_the_rank_has_no_lane() -> None:
    (_, ffn), *_ = recipes(WITH_EXPERTS)
    assert ffn.value(Kind.CHOICE, 2, 3) == Value(Kind.CHOICE, 2)
    assert ffn.value(Kind.STREAM, 2, 3) == Value(Kind.STREAM, 5), "the one that all lanes share"
    assert recipes(LANEFORMER)[0][1].value(Kind.STREAM, 2, 3) == Value(Kind.STREAM, 5, 3)
    assert ffn.value(Kind.PARTIAL, 2, 3) == Value(Kind.PARTIAL, 2, 3, Site.MLP)
    assert [stage.phase for stage in ffn.in_front(Phase.GATE_UP)] == [Phase.ROUTE]
    assert ffn.in_front(Phase.DOWN) == ()


def test_stages_without_a_matrix_run_with_the_next_one_that_has_one() -> None:
    (mixer, ffn), *_ = recipes(WITH_EXPERTS)
    runs = {
        Phase.QKV: [Phase.QKV], Phase.OUT: [Phase.ATTEND, Phase.OUT], Phase.ROUTE: [Phase.ROUTE],
        Phase.GATE_UP: [Phase.SELECT, Phase.GATE_UP], Phase.DOWN: [Phase.DOWN],
    }  # fmt: skip
    for recipe in (mixer, ffn):
        for stage in recipe.stages:
            if stage.num_rows:
                assert [one.phase for one in recipe.up_to(stage.phase)] == runs[stage.phase]
    assert [stage.phase for stage in mixer.behind(Phase.QKV)] == [Phase.ATTEND]
    assert [stage.phase for stage in ffn.behind(Phase.ROUTE)] == [Phase.SELECT]
    assert ffn.behind(Phase.GATE_UP) == ffn.behind(Phase.DOWN) == ()


def test_phases_that_a_layer_has_not() -> None:
    assert recipe_of(LANEFORMER, 1, Phase.ROUTE) is None
    assert recipe_of(LANEFORMER, 3, Phase.QKV) is None
    assert recipe_of(LANEFORMER, NONE, Phase.QKV) is None
    assert recipe_of(LANEFORMER, 0, Phase.HEAD) is None


def test_every_step_of_a_layer_is_a_stage() -> None:
    for spec in MODELS:
        for step in make_plan(spec, 2).ranks[1].steps:
            recipe = recipe_of(spec, step.layer, step.phase)
            if recipe is None:
                assert step.phase in (Phase.EMBED, Phase.SUM, Phase.TOTAL, Phase.RESIDUAL) or step.layer == NONE
                continue
            stage = recipe.stage(step.phase)
            assert isinstance(stage, Stage)
            assert isinstance(recipe, Recipe)
            assert tuple(value.kind for value in step.reads) == stage.reads
            assert (step.lane == NONE) is not stage.is_by_lane
