"""ModelSpec: both revisions of config.json, what is refused and by which name, and the behaviour derived from the fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.published_config import read_config, spec_of_folder
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer, laneformer_2b
from kog_dist.model_limits import MAX_LAYERS

FIRST_REVISION: dict[str, Any] = {
    "architectures": ["LaneformerForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_laneformer.LaneformerConfig"},
    "model_type": "laneformer_tp",
    "hidden_size": 3072,
    "num_hidden_layers": 15,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "intermediate_size": 12288,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "num_lanes": 8,
    "broadcast_delay": 2,
    "use_comm": True,
    "use_early_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "tie_word_embeddings": False,
    "sliding_window": 512,
    "sliding_window_n_layers": 10,
    "unclamped_layers": [],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
}
SECOND_REVISION = {key: value for key, value in FIRST_REVISION.items() if key not in ("use_comm", "sliding_window_n_layers")} | {
    "model_type": "laneformer",
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "swa_layers": list(range(10)),
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMALL = ModelSpec(
    hidden_size=32, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=101, num_lanes=4, delay=2
)  # fmt: skip


def small(**changes: Any) -> ModelSpec:
    return read_config(SMALL.to_config() | changes)


def config(**changes: object) -> dict[str, Any]:
    return FIRST_REVISION | changes


@pytest.mark.parametrize("published", [FIRST_REVISION, SECOND_REVISION])
def test_both_revisions_describe_the_2b_model(published: dict[str, Any]) -> None:
    assert read_config(published) == laneformer_2b()


def test_2b_counts() -> None:
    spec = laneformer_2b()
    assert spec.num_parameters == 2_320_069_632
    assert spec.bytes_per_token() == 4_443_531_264
    assert spec.bytes_per_token(weight_bytes=1) == 2_221_765_632
    assert (spec.head_dim, spec.lane_heads, spec.lane_kv_heads, spec.lane_ffn) == (96, 4, 2, 1536)
    assert spec.window(9) == 512
    assert spec.window(10) is None


@pytest.mark.parametrize("head", list(HeadType))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("key", ["", "pre_norm_lane_agg", "tie_word_embeddings"])
def test_num_parameters_is_what_the_tensors_hold(head: HeadType, shared: bool, key: str) -> None:
    replicate_only = {key: True} if key and head is HeadType.REPLICATE else {}
    spec = small(lm_head_type=head.value, replicated_rmsn_scale=shared, vocab_size=104, **replicate_only)
    assert spec.num_parameters == sum(layout.num_values for layout in tensor_layouts(spec).values())


def test_defaults_of_missing_fields() -> None:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings")  # fmt: skip
    spec = read_config({key: FIRST_REVISION[key] for key in keys})
    assert (spec.num_kv_heads, spec.rope_theta, spec.norm_eps, spec.num_lanes, spec.delay) == (32, 1e4, 1e-5, 1, 1)
    assert (spec.attention_comm, spec.mlp_comm, spec.early_comm, spec.shared_norm_scale) == (True, True, True, True)
    assert (spec.head_type, spec.pre_norm_lane_agg, spec.tied_embeddings) == (HeadType.REPLICATE, False, False)
    assert (spec.rope_scaling, spec.sliding_window, spec.window_layers) == (None, None, ())


@pytest.mark.parametrize("key", ["num_key_value_heads", "norm_eps", "broadcast_delay", "head_dim", "use_early_comm"])
def test_null_means_the_default(key: str) -> None:
    without = {name: value for name, value in FIRST_REVISION.items() if name != key}
    assert read_config(config(**{key: None})) == read_config(without)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings"],
)
@pytest.mark.parametrize("value", [None, "12", 1.5, True, [], 0, -1, 2**60])
def test_sizes_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^(config key )?{key}|is not a multiple of {key}"):
        read_config(config(**{key: value}, sliding_window_n_layers=0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type None"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"head_dim": 95}, "head_dim 95 must be even"),
        ({"head_dim": 2**20}, "head_dim must be at most"),
        ({"head_dim": -2}, "head_dim must be at least 1"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"norm_eps": 0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"use_attention_comm": False}, "use_attention_comm False contradicts use_comm True"),
        ({"use_mlp_comm": False}, "use_mlp_comm"),
        ({"use_comm": "yes"}, "use_comm"),
        ({"swa_layers": [0, 1]}, "swa_layers"),
        ({"swa_layers": []}, "swa_layers"),
        ({"unclamped_layers": [15]}, "unclamped_layers names layer 15"),
        ({"unclamped_layers": [-1]}, "unclamped_layers"),
        ({"unclamped_layers": [True]}, "unclamped_layers"),
        ({"unclamped_layers": 3}, "unclamped_layers"),
        ({"sliding_window_n_layers": 16}, "sliding_window_n_layers 16"),
        ({"sliding_window_n_layers": -16}, "sliding_window_n_layers -16"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"lm_head_type": "column"}, "lm_head_type 'column'"),
        ({"lm_head_type": []}, "lm_head_type"),
        ({"lm_head_type": "lane", "pre_norm_lane_agg": True}, "pre_norm_lane_agg"),
        ({"lm_head_type": "lane", "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"lm_head_type": "vocab_parallel", "vocab_size": 32001}, "vocab_size 32001"),
        ({"num_lanes": 3}, "num_lanes"),
        ({"num_lanes": 64}, "64 lanes"),
        ({"num_key_value_heads": 12}, "num_key_value_heads 12"),
        ({"num_attention_heads": 7}, "num_attention_heads 7"),
        ({"broadcast_delay": -1}, "broadcast_delay"),
        ({"num_hidden_layers": MAX_LAYERS + 1, "sliding_window_n_layers": 1}, "num_hidden_layers must be at most"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3_SCALING, "mscale": 2.0}}, "mscale"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor of a rope scaling must be between 1 and 16384"),
        ({"norm_eps": 4e9}, "norm_eps must be between 1e-12 and 0.1, got 4e+09"),
        ({"rope_theta": 1e-45}, "rope_theta must be between 10 and 1e+12"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e9}}, "attention_factor must be between"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e9}}, "beta_fast must be between"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}}, "beta_slow <= beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {**LLAMA3_SCALING, "factor": "8"}}, "factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "factor": 0.0}}, "factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "type": "linear"}}, "contradicts"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "contradicts rope_parameters.rope_theta 500000.0"),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters"),
        ({"rope_scaling": LLAMA3_SCALING, "rope_parameters": {**LLAMA3_SCALING, "factor": 4.0}}, "contradicts rope_parameters"),
    ],
)
def test_unsupported_and_contradictory_fields_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(config(**changes))
    assert named in str(caught.value)


def test_rope_settings_of_both_names() -> None:
    expected = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    without_theta = {key: value for key, value in FIRST_REVISION.items() if key != "rope_theta"}
    assert read_config(config(rope_scaling=LLAMA3_SCALING)).rope_scaling == expected
    old_key = {("type" if key == "rope_type" else key): value for key, value in LLAMA3_SCALING.items()}
    assert read_config(config(rope_scaling=old_key)).rope_scaling == expected
    both = read_config(without_theta | {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}})
    assert (both.rope_theta, both.rope_scaling) == (5e5, expected)
    plain = read_config(without_theta | {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}})
    assert (plain.rope_theta, plain.rope_scaling) == (2e4, None)


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"sliding_window_n_layers": 4}, [0, 1, 2, 3]),
        ({"sliding_window_n_layers": -4}, [11, 12, 13, 14]),
        ({"sliding_window_n_layers": 0}, []),
        ({"sliding_window_n_layers": 15}, list(range(15))),
        ({"sliding_window_n_layers": -15}, list(range(15))),
        ({"sliding_window_n_layers": 4, "unclamped_layers": [1, 9]}, [0, 2, 3]),
        ({"sliding_window_n_layers": -4, "unclamped_layers": [14]}, [11, 12, 13]),
        ({"swa_layers": [7, 2]}, [2, 7]),
        ({"swa_layers": []}, []),
        ({"swa_layers": [0, 1], "sliding_window_n_layers": 2}, [0, 1]),
    ],
)
def test_windowed_layers(fields: dict[str, Any], windowed: list[int]) -> None:
    base = {key: value for key, value in FIRST_REVISION.items() if key not in ("sliding_window_n_layers", "unclamped_layers")}
    spec = read_config(base | fields)
    assert [i for i in range(15) if spec.window(i) is not None] == windowed
    assert {spec.window(i) for i in windowed} <= {512}


def test_a_layer_cannot_be_windowed_and_unclamped() -> None:
    base = {key: value for key, value in FIRST_REVISION.items() if key != "sliding_window_n_layers"}
    with pytest.raises(ConfigError, match=r"layers \[2\] stand in both swa_layers and unclamped_layers"):
        read_config(base | {"swa_layers": [1, 2], "unclamped_layers": [2]})


def modes(spec: ModelSpec, sublayer: Sublayer) -> str:
    return "".join(spec.reduce_mode(i, sublayer).value[0] for i in range(spec.num_layers))  # d(elayed), b(locking), l(ocal)


def test_reduce_modes() -> None:
    assert modes(SMALL, Sublayer.ATTENTION) == "bbdddd"
    assert modes(small(use_early_comm=False), Sublayer.MLP) == "lldddd"
    assert modes(small(broadcast_delay=0), Sublayer.MLP) == "bbbbbb"
    assert modes(small(broadcast_delay=0, use_early_comm=False), Sublayer.MLP) == "bbbbbb"
    assert modes(small(broadcast_delay=9), Sublayer.MLP) == "bbbbbb"
    no_attention = small(use_attention_comm=False)
    assert (modes(no_attention, Sublayer.ATTENTION), modes(no_attention, Sublayer.MLP)) == ("llllll", "bbdddd")
    assert modes(small(use_mlp_comm=False), Sublayer.MLP) == "llllll"


def test_feeds_layer() -> None:
    assert [SMALL.feeds_layer(i, Sublayer.MLP) for i in range(6)] == [2, 3, 4, 5, None, None]
    assert [small(use_early_comm=False).feeds_layer(i, Sublayer.MLP) for i in range(3)] == [2, 3, 4]
    assert [small(broadcast_delay=0).feeds_layer(i, Sublayer.MLP) for i in range(6)] == [None] * 6
    assert [small(use_mlp_comm=False).feeds_layer(i, Sublayer.MLP) for i in range(6)] == [None] * 6
    for layer_idx in range(6):  # every delayed layer has exactly one producer
        producers = [i for i in range(6) if SMALL.feeds_layer(i, Sublayer.MLP) == layer_idx]
        assert len(producers) == (SMALL.reduce_mode(layer_idx, Sublayer.MLP) is ReduceMode.DELAYED)


@settings(deadline=None, derandomize=True)
@given(vocab_size=st.integers(1, 400), log_lanes=st.integers(0, 3))
def test_vocab_slices_cover_the_vocabulary_once(vocab_size: int, log_lanes: int) -> None:
    lanes = 2**log_lanes
    spec = ModelSpec(
        hidden_size=16, num_layers=1, num_heads=8, num_kv_heads=8, intermediate_size=8, vocab_size=vocab_size, num_lanes=lanes
    )  # fmt: skip
    rows = [row for lane in range(lanes) for row in range(*spec.vocab_slice(lane))]
    assert rows == list(range(vocab_size))


def test_lanes_of_rank() -> None:
    spec = laneformer_2b()
    assert [list(spec.lanes_of_rank(rank, 4)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for world_size in (0, 3, 16):
        with pytest.raises(ConfigError, match=f"8 lanes cannot be spread over {world_size} ranks; use one of 1, 2, 4, 8"):
            spec.lanes_of_rank(0, world_size)


@settings(deadline=None, derandomize=True)
@given(
    lanes=st.sampled_from([1, 2, 4]),
    delay=st.integers(0, 4),
    flags=st.tuples(*[st.booleans()] * 6),
    head=st.sampled_from(HeadType),
    window_layers=st.none() | st.sets(st.integers(0, 5)),
    scaled=st.booleans(),
)
def test_config_round_trip(
    lanes: int, delay: int, flags: tuple[bool, ...], head: HeadType, window_layers: set[int] | None, scaled: bool
) -> None:
    replicate = head is HeadType.REPLICATE
    spec = ModelSpec(
        hidden_size=32, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=104, num_lanes=lanes,
        delay=delay,
        attention_comm=flags[0], mlp_comm=flags[1], early_comm=flags[2], shared_norm_scale=flags[3], head_type=head,
        pre_norm_lane_agg=flags[4] and replicate, tied_embeddings=flags[5] and replicate,
        sliding_window=None if window_layers is None else 7, window_layers=tuple(sorted(window_layers or ())),
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 512) if scaled else None,
    )  # fmt: skip
    again = read_config(json.loads(json.dumps(spec.to_config())))
    assert again == spec
    assert again.digest() == spec.digest()


def test_digest_tells_specs_apart() -> None:
    digests = {spec.digest() for spec in (SMALL, small(norm_eps=1e-6), small(use_early_comm=False), small(broadcast_delay=1))}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, expected an object"),
        ('{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' stands twice"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported"),
    ],
)
def test_bad_config_files_are_checkpoint_errors_that_name_the_file(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        spec_of_folder(tmp_path)
    assert "config.json" in str(caught.value)
    assert cause in str(caught.value)


def test_a_folder_without_config_says_what_a_model_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json; MODEL must be a folder"):
        spec_of_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        spec_of_folder(tmp_path)


def test_a_folder_reads_as_its_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIRST_REVISION))
    assert spec_of_folder(tmp_path) == laneformer_2b()
