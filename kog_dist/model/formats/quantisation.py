"""What a model says of its quantised weights: `quantization_config` of a `config.json`, or ModelOpt's `hf_quant_config.json`.

It says how matrices are quantised; which ones are, the files say. How activations are quantised elsewhere is not applied here:
products take them as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

from kog_dist.errors import ConfigError
from kog_dist.model.formats.fp8 import Fp8Storage
from kog_dist.model.formats.int4 import AwqStorage, GptqStorage, PackedStorage
from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.mxfp4 import MxStorage
from kog_dist.model.formats.source import Storage
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.quoting import short
from kog_dist.records import dataclass

KEY: Final = "quantization_config"
MODELOPT_NAME: Final = "hf_quant_config.json"
# Ends of names of tensors that belong to quantised activations and KV caches.
IGNORED: Final = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".prob_scale", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
# Ends of names of tensors that only quantised weights have.
OF_CODES: Final = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks", "_proj_scales")
_MAX_BLOCK: Final = 2**20
_MAX_IGNORED: Final = 2**14
Raw: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`method` as published. `ignored`: modules that are not quantised, where there are no files to tell: names, parts of names,
    and regular expressions behind "re:".

    `others`: as `form`, but with groups of other sizes, which some matrices have; their scales tell.
    `is_of_experts`: experts alone are quantised, as `stacked_experts` says.
    Files may have another type of scales than `form.scale`, and columns in order although `form.is_ordered`.
    """

    method: str
    form: WeightFormat
    storage: Storage
    ignored: tuple[str, ...] = ()
    is_of_experts: bool = False
    others: tuple[WeightFormat, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.form.without_scales} ({self.method})"

    def leaves_out(self, module: str) -> bool:
        """Whether `ignored` names a module, or what it is in."""
        return any(_names_module(rule, module) for rule in self.ignored)

    @property
    def lane_columns(self) -> int:
        """The columns of each lane's matrices must be whole groups of so many, so that a lane's codes come with their scales.

        Of gpt-oss's experts half a group: 2,880 columns are 90 groups, and 4 lanes of 22 and a half.
        """
        if self.is_of_experts:
            return self.form.block_columns // 2
        return math.lcm(*(form.block_columns or 1 for form in (self.form, *self.others)))


def read_quantisation(config: Raw) -> Quantisation | None:
    """The `quantization_config` of a parsed `config.json`; None without. Raises ConfigError naming what is not supported."""
    raw = config.get(KEY)
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{KEY} must be an object, got {short(raw)}")
    given, method = _given(raw), _method(raw)
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(f"{KEY}: quant_method {short(method)} is not supported; supported: {', '.join(_READERS)}")
    for key in _CHANGING:
        value = given.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise ConfigError(f"{KEY}: {key} {short(value)} is not supported")
    return _READERS[method](given)


def unread_of_quantisation(config: Raw) -> list[str]:
    """Names in a `quantization_config` that was read which nothing here knows: they say how a writer worked."""
    raw = config.get(KEY)
    if not isinstance(raw, Mapping):
        return []
    names = [f"{KEY}.{name}" for name in sorted(set(raw) - set(_KEYS.get(str(_method(raw)), ())) - _ALWAYS)]
    schemes = [group["weights"] for group in (raw.get("config_groups") or {}).values()]  # they were read
    unread = {name for weights in schemes for name in weights} - set(_CT_WEIGHT_KEYS)
    return names + [f"{KEY}.config_groups.{name}" for name in sorted(unread)]


def _method(raw: Raw) -> object:
    return raw.get("quant_method") or ("modelopt" if "quant_algo" in raw else None)


def from_modelopt_file(parsed: Raw) -> dict[str, object]:
    """The `quantization_config` that a `hf_quant_config.json` stands for. Raises ConfigError."""
    raw = parsed.get("quantization")
    if not isinstance(raw, Mapping):
        raise ConfigError(f"quantization must be an object, got {short(raw)}")
    ignored = raw.get("exclude_modules") or []
    rest = {key: value for key, value in raw.items() if key not in ("exclude_modules", "kv_cache_quant_algo")}
    return {"quant_method": "modelopt", "ignore": ignored, **rest}


# ---- methods ----
_CHANGING: Final = ("rotation", "adapter", "is_marlin_format", "transform_config", "sparsity_config", "moe_sparsity_config")
_ALWAYS: Final = frozenset(("quant_method", *_CHANGING))
_PACKED_KEYS: Final = """bits w_bit group_size q_group_size version format checkpoint_format zero_point desc_act static_groups sym
    lm_head true_sequential damp_percent damp_auto_increment meta pack_dtype dynamic modules_to_not_convert""".split()
_FP8_KEYS: Final = """activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers dequantize scale_fmt
    kv_cache_scheme modules_to_convert expert_dtype""".split()
_FBGEMM_KEYS: Final = ("activation_scale_ub", "modules_to_not_convert")
_CT_KEYS: Final = """config_groups format ignore kv_cache_scheme quantization_status global_compression_ratio
    version""".split()
_CT_WEIGHT_KEYS: Final = """num_bits type symmetric strategy group_size block_structure dynamic actorder observer observer_kwargs
    scale_dtype zp_dtype""".split()
_CT_STATUSES: Final = ("compressed", "frozen")  # its first versions said "frozen" of compressed files; where none is, files tell
_MODELOPT_KEYS: Final = "quant_algo config_groups ignore kv_cache_scheme producer group_size".split()


def _fp8(raw: Raw) -> Quantisation:
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{KEY}: fmt {short(raw['fmt'])} is not supported; supported: e4m3")
    if raw.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise ConfigError(f"{KEY}: activation_scheme {short(raw['activation_scheme'])} is neither dynamic nor static")
    if raw.get("modules_to_convert") is not None:
        raise ConfigError(f"{KEY}: modules_to_convert {short(raw['modules_to_convert'])} is not supported")
    if raw.get("expert_dtype", "fp8") != "fp8":
        raise ConfigError(f"{KEY}: expert_dtype {short(raw['expert_dtype'])} is not supported; supported: fp8")
    block = raw.get("weight_block_size")
    ignored = _names(raw, "modules_to_not_convert", "ignored_layers")
    if block is None:
        return Quantisation("fp8", WeightFormat("E4M3", 0, 0, "F32"), Fp8Storage(), ignored)
    rows, columns = _block(block, "weight_block_size")
    form = WeightFormat("E4M3", rows, columns, "E8M0" if raw.get("scale_fmt") == "ue8m0" else "BF16")
    return Quantisation("fp8", form, Fp8Storage(), ignored)


def _fbgemm(raw: Raw) -> Quantisation:
    form = WeightFormat("E4M3", 1, 0, "F32")
    return Quantisation("fbgemm_fp8", form, Fp8Storage(), _names(raw, "modules_to_not_convert"))


def _modelopt(raw: Raw) -> Quantisation:
    forms = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128)}
    kind = raw.get("quant_algo")
    if not isinstance(kind, str) or kind.upper() not in forms:
        raise ConfigError(f"{KEY}: quant_algo {short(kind)} of ModelOpt is not supported; supported: {', '.join(forms)}")
    form = WeightFormat("E4M3", *forms[kind.upper()], "F32")
    return Quantisation(f"modelopt {kind}", form, Fp8Storage(), _names(raw, "ignore"))


def _awq(raw: Raw) -> Quantisation:
    _check_bits(raw, "bits" if "bits" in raw else "w_bit", "AWQ")
    _check_packing(raw, "AWQ")
    for key in ("version", "format", "checkpoint_format"):
        if not isinstance(kind := raw.get(key, "gemm"), str) or kind.lower() != "gemm":
            raise ConfigError(f"{KEY}: {key} {short(kind)} of AWQ is not supported; supported: gemm")
    if raw.get("zero_point", True) is not True:
        raise ConfigError(f"{KEY}: AWQ without zero_point is not supported")
    form = WeightFormat("INT4", 1, _group(raw, "group_size" if "group_size" in raw else "q_group_size"), "F16", has_zeros=True)
    return Quantisation("awq", form, AwqStorage(), _names(raw, "modules_to_not_convert"))


def _gptq(raw: Raw) -> Quantisation:
    _check_bits(raw, "bits", "GPTQ")
    _check_packing(raw, "GPTQ")
    version = raw.get("checkpoint_format", raw.get("format", "gptq"))
    less = {"gptq": 1, "gptq_v2": 0}.get(version) if isinstance(version, str) else None
    if less is None:
        raise ConfigError(f"{KEY}: checkpoint_format {short(version)} is not supported; supported: gptq, gptq_v2")
    is_ordered = raw.get("desc_act") is True and not raw.get("static_groups")
    form = WeightFormat("INT4", 1, _group(raw, "group_size"), "F16", has_zeros=True, is_ordered=is_ordered)
    rules: Any = raw.get("dynamic") or {}
    ignored = [f"re:{rule.removeprefix(_NOT)}" for rule in rules if rule.startswith(_NOT)]
    return Quantisation("gptq", form, GptqStorage(less), tuple(ignored))


def _mxfp4(raw: Raw) -> Quantisation:
    return Quantisation("mxfp4", MXFP4, MxStorage(), _names(raw, "modules_to_not_convert"), is_of_experts=True)


def _compressed_tensors(raw: Raw) -> Quantisation:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError(f"{KEY}: config_groups {short(groups)} must have a scheme")
    if raw.get("quantization_status", "compressed") not in _CT_STATUSES:
        raise ConfigError(f"{KEY}: quantization_status {short(raw['quantization_status'])} is not supported; save it compressed")
    ignored = _names(raw, "ignore")
    found = [_scheme(group, group.get("format") or raw.get("format"), ignored) for group in groups.values()]
    first, others = found[0], tuple(dict.fromkeys(other.form for other in found if other != found[0]))
    for other in found:
        if other != replace(first, form=other.form) or other.form != replace(first.form, block_columns=other.form.block_columns):
            raise ConfigError(
                f"{KEY}: config_groups have {len(found)} schemes, {first} and others; supported: one for all, or groups of other "
                "sizes"
            )
    return replace(first, others=others)


def _scheme(group: Raw, kind: object, ignored: tuple[str, ...]) -> Quantisation:
    """One of compressed-tensors' groups."""
    of_weights = group.get("weights")
    if not isinstance(of_weights, Mapping):
        raise ConfigError(f"{KEY}: a group of config_groups has no weights")
    weights = _given(of_weights)
    if weights.get("dynamic"):
        raise ConfigError(f"{KEY}: dynamic weights are not supported")
    if weights.get("actorder") in ("group", "dynamic"):
        raise ConfigError(f"{KEY}: actorder {short(weights['actorder'])} is not supported; supported: weight, static")
    what = (kind, weights.get("type"), weights.get("num_bits"))
    method = f"compressed-tensors {kind}"
    if what in (("float-quantized", "float", 8), ("naive-quantized", "float", 8)):
        form = WeightFormat("E4M3", *_strategy(weights), "BF16")
        return Quantisation(method, form, Fp8Storage(), ignored)
    if what == ("pack-quantized", "int", 4):
        if weights.get("strategy") not in ("group", "channel"):
            raise ConfigError(f"{KEY}: strategy {short(weights.get('strategy'))} of pack-quantized is not supported")
        form = WeightFormat("INT4", *_strategy(weights), "BF16", has_zeros=weights.get("symmetric", True) is False)
        return Quantisation(method, form, PackedStorage(), ignored)
    if what == ("mxfp4-pack-quantized", "float", 4) and weights.get("group_size") == MXFP4.block_columns:
        return Quantisation(method, MXFP4, MxStorage(), ignored)
    raise ConfigError(
        f"{KEY}: format {short(kind)} of {short(weights.get('num_bits'))}-bit {short(weights.get('type'))} is not supported; "
        "supported: float-quantized of 8 bit, pack-quantized of 4 bit, mxfp4-pack-quantized"
    )


def _strategy(weights: Raw) -> tuple[int, int]:
    """Rows and columns of a block."""
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, _group(weights, "group_size")
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure")
    raise ConfigError(f"{KEY}: strategy {short(strategy)} is not supported; supported: tensor, channel, group, block")


_READERS: Final[Mapping[str, Callable[[Raw], Quantisation]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "fp8": _FP8_KEYS,
    "fbgemm_fp8": _FBGEMM_KEYS,
    "modelopt": _MODELOPT_KEYS,
    "awq": _PACKED_KEYS,
    "gptq": _PACKED_KEYS,
    "compressed-tensors": _CT_KEYS,
    "mxfp4": ("modules_to_not_convert", "dequantize"),
}


# ---- values ----
def _given(raw: Raw) -> Raw:
    """Without what is null: as by default."""
    return {key: value for key, value in raw.items() if value is not None}


def _check_bits(raw: Raw, key: str, method: str) -> None:
    if type(raw.get(key)) is not int or raw[key] != 4:
        raise ConfigError(f"{KEY}: {key} {short(raw.get(key))} of {method} is not supported; supported: 4")


def _check_packing(raw: Raw, method: str) -> None:
    """Writers of AWQ and GPTQ have ever more keys that say how they worked; those that change what tensors mean are looked at."""
    rules = raw.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise ConfigError(f"{KEY}: dynamic {short(rules)} must be an object")
    for pattern, changes in rules.items():
        if pattern.startswith(_NOT):
            continue  # modules that are not quantised: the files say so as well
        other = [key for key in _OF_A_MODULE if isinstance(changes, Mapping) and changes.get(key, raw.get(key)) != raw.get(key)]
        if other or not isinstance(changes, Mapping):
            raise ConfigError(
                f"{KEY}: dynamic {short(pattern)} of {method} has {short(changes)}; supported: the same for all quantised modules"
            )
    if raw.get("pack_dtype", "int32") != "int32":
        raise ConfigError(f"{KEY}: pack_dtype {short(raw['pack_dtype'])} is not supported; supported: int32")


_NOT: Final = "-:"  # in front of a rule for modules that are not quantised
_REGEX: Final = "re:"
_OF_A_MODULE: Final = ("bits", "group_size", "desc_act", "static_groups", "pack_dtype", "format", "checkpoint_format")


def _group(raw: Raw, key: str) -> int:
    """Columns of a group; -1 in files is all of a row."""
    size = raw.get(key)
    if type(size) is not int or not (size == -1 or 1 <= size <= _MAX_BLOCK):
        raise ConfigError(f"{KEY}: {key} must be a number of columns, or -1, got {short(size)}")
    return max(size, 0)


def _block(value: object, key: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int and 1 <= v <= _MAX_BLOCK for v in value):
        raise ConfigError(f"{KEY}: {key} must be rows and columns of a block, got {short(value)}")
    return value[0], value[1]


# What is read of a regular expression: names, dots, and at most four of what stands for any text.
_READ_REGEX: Final = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.|\.[*+]|\\d\+|\[0-9\]\+){1,256}\$?")
_MOST_WILD: Final = 4


@lru_cache(4096)
def _names_module(rule: str, module: str) -> bool:
    """Of an expression that is not read: no. Where there are files, they tell."""
    if not rule.startswith(_REGEX):
        return f".{rule}." in f".{module}."
    pattern = rule.removeprefix(_REGEX)
    if _READ_REGEX.fullmatch(pattern) is None or pattern.count("*") + pattern.count("+") > _MOST_WILD:
        return False
    return re.match(pattern, module) is not None


def _names(raw: Raw, *keys: str) -> tuple[str, ...]:
    """Of modules, under the first of the keys that is there."""
    value: object = next((raw[key] for key in keys if raw.get(key) is not None), [])
    if not isinstance(value, list) or len(value) > _MAX_IGNORED or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{KEY}: {keys[0]} must be a list of names of modules, got {short(value)}")
    return tuple(value)
