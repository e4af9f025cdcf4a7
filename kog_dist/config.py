"""The settings of a run: flags > environment (`KOG_*`) > file > default, each with the source it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from kog_dist import env, foreign_file
from kog_dist.errors import ConfigError
from kog_dist.misspelt import is_misspelt
from kog_dist.model_limits import MAX_CONTEXT
from kog_dist.quoting import short
from kog_dist.records import dataclass
from kog_dist.speculation import Speculation

MIN_KEY_LENGTH, MAX_KEY_LENGTH = 8, 1024
API_KEY_FORM = f"{MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} visible ASCII characters without blanks"
MAX_REPLICAS = 256
MAX_PARALLEL = 8  # as in runtime/abi.py
MIN_STALL_S = 0.5
MAX_TIMEOUT_S = 86400.0
MAX_GIB = 4096
_QUANTIZE_CACHE_BYTES = 64 << 30  # of all models, unless told otherwise
MAX_FILE_BYTES, MAX_NESTED, MAX_DOTS = 2**16, 64, 256  # of a file of settings; dots in a line
_ORIGIN = re.compile(r"https?://[^/?#\s]+")
_SERVED_NAME = re.compile(r"[A-Za-z0-9._:/*-]{1,200}")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_PORT = (0, 65535)
_SECONDS = (0.0, MAX_TIMEOUT_S)  # settings that are numbers with a fraction are all seconds, and more than 0


def _setting(
    default: Any,
    help_text: str,
    limits: tuple[float, float] | None = None,
    *,
    zero: str | None = None,
    choices: tuple[str, ...] = (),
    is_positional: bool = False,
    is_secret: bool = False,
) -> Any:
    """A field. `{choices}` in its help stands for them; `zero` is what 0 means, which is then allowed besides the limits."""
    listed = " or ".join(filter(None, (", ".join(choices[:-1]), *choices[-1:])))
    metadata = {
        "help": help_text.format(choices=listed) + (f" 0: {zero}." if zero else ""),
        "limits": limits,
        "zero": zero,
        "choices": choices,
        "is_positional": is_positional,
        "is_secret": is_secret,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What `kog-launch` starts. Every field is a flag, a `KOG_` variable and a key of a config file under the same name.

    This is the one definition of a setting: `--help`, `--print-config`, docs/settings.md and the checks follow from it.
    """

    model: str | None = _setting(
        None, "Folder, GGUF file or name in the Hugging Face cache; none: the demo model.", is_positional=True
    )
    ranks: int = _setting(0, "Rank processes; must divide the lanes.", (1, 1024), zero="chosen for this machine")
    gpus: str | None = _setting(None, "GPUs to use: N, all, or a list of indices or UUIDs such as 0,2,3.")
    pin: bool = _setting(True, "Keep a GPU's rank on the CPUs near it.")
    device: str = _setting("auto", "{choices}.", choices=("auto", "cpu", "cuda"))
    launcher: str = _setting("auto", "{choices}.", choices=("auto", "local", "mpi", "ray"))
    ray_address: str | None = _setting(None, "HOST:PORT of a Ray cluster. Default: RAY_ADDRESS, or its own.")
    replicas: int = _setting(1, "Engines behind one endpoint.", (1, MAX_REPLICAS), zero="only those of --remote-replicas")
    min_replicas: int | None = _setting(None, "With --max-replicas: as many as waiting requests need.")
    max_replicas: int | None = _setting(None, "Most engines of this launcher.")
    scale_down_after: float = _setting(60.0, "Seconds with one replica too many until it stops.", _SECONDS)
    remote_replicas: str | None = _setting(None, "Access files of engines on other hosts: a.json,b.json.")
    kv_dtype: str = _setting(
        "auto", "Type of the KV cache: {choices}.", choices=("auto", "float32", "float16", "bfloat16", "fp8", "int4")
    )  # auto: float32 on CPU ranks, the 16-bit type of the weights on GPUs
    kv_windows: str = _setting(
        "auto", "What windowed layers keep of the KV on GPUs: {choices}.", choices=("auto", "whole", "ring")
    )  # auto: all positions where they fit, else the newest ones
    kv_caches: int = _setting(0, "Requests whose KV is kept.", (1, 1024), zero="as many as --parallel, on CPU ranks 4 at least")
    parallel: int = _setting(
        0, "Requests that decode together; more wait.", (1, MAX_PARALLEL), zero="4, as memory allows; 1 on more than two GPUs"
    )
    prefix_cache: str = _setting("auto", "GiB of each rank for the beginnings of earlier requests; off, or auto.")
    prefix_host: str = _setting("auto", "GiB of the host's memory behind that of GPUs, for all ranks; off, or auto.")
    context: int = _setting(
        0, "Tokens of prompt and answer together.", (1, MAX_CONTEXT), zero="the model's, or what memory holds of it"
    )
    prefill: str = _setting(
        "auto", "Prompts in chunks of tokens: auto (on 1, 2 or 4 GPUs), on or off.", choices=("auto", "on", "off")
    )
    speculate: str = _setting(
        "auto",
        "Drafts of later tokens where a request does not say: {choices}.",
        choices=tuple(choice.value for choice in Speculation),
    )
    queue_limit: int = _setting(64, "Requests that may wait.", (1, 4096))
    client_queue_limit: int = _setting(16, "Of them those of one connection.", (1, 4096))
    verify: bool = _setting(True, "Check values and hashes while loading.")
    quantize: str = _setting("none", "Quantise 16-bit weights while loading: {choices}.", choices=("none", "fp8", "int4"))
    quantize_head: str = _setting("none", "Quantise the LM head while loading: {choices}.", choices=("none", "int8"))
    quantize_cache: str = _setting(
        "auto", "GiB on disk for what --quantize rounds, so that the next start need not; off, or auto: 64."
    )
    check_experts: bool = _setting(False, "Compare on all ranks which experts each layer chooses, to find faults.")
    instance: str | None = _setting(None, "Name under which clients find the engine. Default: default.")  # its own for --prompt
    rpc_port: int | None = _setting(None, "TCP port besides the socket file; 0: a free one.", _PORT)
    rpc_host: str = _setting("127.0.0.1", "Address of the TCP port.")  # always encrypted, and only for the one client key
    http: bool = _setting(True, "Serve HTTP besides RPC.")
    host: str = _setting("127.0.0.1", "Address of HTTP; those that other machines reach need a key.")
    port: int = _setting(8000, "Port of HTTP; 0: a free one.", _PORT)
    http_socket: str | None = _setting(None, "Instead: a socket file that you alone can reach.")
    api_key: str | None = _setting(None, "What HTTP clients must send; KOG_API_KEY hides it better.", is_secret=True)
    api_key_file: str | None = _setting(None, "A file of keys, one per line, readable by you alone.")
    share_prefixes: bool = _setting(False, "With several keys: what is kept of one key's requests serves all.")
    cors_origin: str | None = _setting(None, "Web pages that may use HTTP: https://a.example,... or *.")
    startup_timeout: float = _setting(300.0, "Seconds until every rank must be ready.", _SECONDS)
    step_timeout: float = _setting(30.0, "Seconds a rank may wait for its peers.", _SECONDS)
    shutdown_timeout: float = _setting(10.0, "Seconds for the running request after a stop.", _SECONDS)
    stall_timeout: float = _setting(1.0, "Seconds without a heartbeat until a rank counts as hung.", (MIN_STALL_S, MAX_TIMEOUT_S))
    log_dir: str | None = _setting(None, "Folder for one log per process and exit.json. Default: one of this user.")
    log_format: str = _setting("text", "Of the HTTP gateway's log: {choices}.", choices=("text", "json"))
    log_prompts: bool = _setting(False, "Log prompts and answers, too.")
    served_model_name: str | None = _setting(None, "Its names for requests: A,B,..., the first shown; claude-*: a pattern.")
    reasoning_parser: str = _setting(
        "auto",
        "How thoughts are told from answers: {choices}.",
        choices=("auto", "think", "deepseek_r1", "mistral", "channels", "none"),
    )
    tool_parser: str = _setting(
        "auto",
        "How calls are found in answers: {choices}.",
        choices=("auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "channels", "none"),
    )
    unknown_fields: str = _setting("warn", "Of HTTP requests: {choices}.", choices=("refuse", "warn", "ignore"))
    special_tokens_in_content: str = _setting("text", "In messages: as text, or allow them.", choices=("text", "allow"))
    quiet: bool = _setting(False, "On a terminal, neither a banner nor a line for each request.")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_field(item, getattr(self, item.name))
        self._check_replicas()
        self._check_http()
        if self.instance is not None and not _INSTANCE_NAME.fullmatch(self.instance):
            raise ConfigError(
                f"instance name {self.instance!r} must be 1 to 40 letters, digits, dots, dashes or underscores and "
                "start with a letter or digit"
            )
        if self.model is not None and not self.model.strip():
            raise ConfigError(f"model must be the folder of a checkpoint, got {self.model!r}; leave it out for the demo model")
        if self.log_dir is not None and not self.log_dir.strip():
            raise ConfigError(f"log_dir must be a folder, got {self.log_dir!r}")
        for name in ("prefix_cache", "prefix_host", "quantize_cache"):
            try:
                parse_gib(getattr(self, name))
            except ValueError as error:
                raise ConfigError(f"{name} {error}") from None
        if self.gpus is not None and self.device == "cpu":
            raise ConfigError(f"gpus {self.gpus} contradicts device cpu; give one of them")

    def _check_http(self) -> None:
        """What is wrong whatever machine it is; addresses and files are looked at when the port is bound."""
        if not self.host.strip():
            raise ConfigError(f"host must be an address of this machine, got {self.host!r}")
        is_elsewhere = (self.host, self.port) != (DEFAULTS["host"], DEFAULTS["port"])
        if self.http_socket is not None and (not self.http_socket.strip() or is_elsewhere):
            raise ConfigError(f"http_socket must be a path and takes the place of host and port, got {self.http_socket!r}")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file exclude each other")
        if self.api_key is not None and not is_api_key(self.api_key):
            raise ConfigError(f"api_key must be {API_KEY_FORM}, it has {len(self.api_key)}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin {origin!r} must be like https://example.org, without a path, or *")
        for name in self.served_names:
            if not _SERVED_NAME.fullmatch(name):
                raise ConfigError(
                    f"served_model_name {name!r} must have letters, digits and ._:/- alone, at most 200, and * in a pattern"
                )

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The web pages that may use the service."""
        return tuple(filter(None, map(str.strip, (self.cors_origin or "").split(","))))

    @property
    def served_names(self) -> tuple[str, ...]:
        """What HTTP requests may call the model, besides its own name."""
        return tuple(filter(None, map(str.strip, (self.served_model_name or "").split(","))))

    @property
    def quantize_cache_bytes(self) -> int:
        """What `quantize_cache` says."""
        asked = parse_gib(self.quantize_cache)
        return _QUANTIZE_CACHE_BYTES if asked is None else asked

    def _check_replicas(self) -> None:
        if self.replicas == 0 and self.remote_replicas is None:
            raise ConfigError(f"replicas must be between 1 and {MAX_REPLICAS}, got 0")
        if self.remote_replicas is not None and not self.remote_replicas.strip(", "):
            raise ConfigError(f"remote_replicas must be access files of engines (a.json,b.json), got {self.remote_replicas!r}")
        if (self.min_replicas is None) != (self.max_replicas is None):
            given = "min_replicas" if self.max_replicas is None else "max_replicas"
            raise ConfigError(f"{given} needs the other bound too: give min_replicas and max_replicas")
        low, high = self.min_replicas, self.max_replicas
        if low is not None and high is not None and not 1 <= low <= high <= MAX_REPLICAS:
            raise ConfigError(f"min_replicas must be at least 1 and at most max_replicas {high} (<= {MAX_REPLICAS}), got {low}")

    @property
    def has_router(self) -> bool:
        """Whether a router stands in front of the engines: for one engine alone there is none."""
        return self.replicas != 1 or self.max_replicas is not None or self.remote_replicas is not None


SETTINGS = tuple(item.name for item in fields(LaunchConfig))
DEFAULTS: Mapping[str, object] = {item.name: item.default for item in fields(LaunchConfig)}
CHOICES: Mapping[str, tuple[str, ...]] = {item.name: item.metadata["choices"] for item in fields(LaunchConfig)}
SECRETS = tuple(item.name for item in fields(LaunchConfig) if item.metadata["is_secret"])
_POSITIONAL = tuple(item.name for item in fields(LaunchConfig) if item.metadata["is_positional"])


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and where each value came from ("--ranks", "KOG_RANKS", "laptop.toml" or "default").

    `left_out`: sentences on variables that begin with KOG_ and are no settings.
    """

    config: LaunchConfig
    sources: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line per setting: name, value, source."""
        rows = [(name, _shown(_public(name, getattr(self.config, name))), self.sources[name]) for name in SETTINGS]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Resolved:
    """Combine the given flags (None = not given), the environment and a file. Raises ConfigError naming key and source."""
    hints = get_type_hints(LaunchConfig)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(SETTINGS, "default")
    layers: list[tuple[Mapping[str, Any], Callable[[str], str], bool]] = []
    if file is not None:
        layers.append((read_file(file), lambda name: f"{file}", False))
    layers.append((env.kog_variables(environ), env.variable, True))
    layers.append(({n: v for n, v in flags.items() if v is not None}, flag_name, False))
    strangers = _of_services(env.service_variables(environ))
    for layer, source_of, is_text in layers:
        for name, value in layer.items():
            source = source_of(name)
            if is_text and name not in SETTINGS and not any(is_misspelt(name, known) for known in SETTINGS):
                strangers.append(f"{source} is no setting, and is left out")
                continue
            if name not in SETTINGS:
                raise ConfigError(f"{source}: there is no setting {name!r}{did_you_mean(name, SETTINGS)}")
            values[name] = _convert(value, hints[name], f"{source}: {name}", is_text, shows=name not in SECRETS)
            sources[name] = source
    return Resolved(_build(values, sources), sources, tuple(strangers))


def _of_services(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    others = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return [f"{names[0]}{others} what Kubernetes sets for a service of that name, not settings: left out"]


def read_file(path: Path) -> dict[str, object]:
    """Parse a TOML file of settings. Raises ConfigError when it cannot be read or parsed."""
    import tomllib  # only who has such a file needs it

    try:
        raw = foreign_file.read_file(path, MAX_FILE_BYTES)
        _check_extent(raw)
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8, and of numbers without end
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    except MemoryError:
        raise ConfigError(f"config file {path} cannot be read: there is not enough memory") from None


def _check_extent(raw: bytes) -> None:
    """Settings are a flat table of short values: refuse what would take the parser long. Raises ValueError."""
    lines = [line for line in raw.splitlines() if not line.lstrip().startswith(b"#")]
    for mark, what in ((b"[", "brackets"), (b"{", "braces")):
        if sum(line.count(mark) for line in lines) > MAX_NESTED:
            raise ValueError(f"it has more than {MAX_NESTED} opening {what}; settings are not nested")
    if any(line.count(b".") > MAX_DOTS for line in lines):
        raise ValueError(f"a line has more than {MAX_DOTS} dots; settings are not nested")


def parse_gib(text: str) -> int | None:
    """Bytes of a number of GiB; 0 for `off`, None for `auto`. Raises ValueError, a sentence without its subject."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    wrong = f"must be a number of GiB up to {MAX_GIB}, off or auto, got {short(text)}"
    try:
        gib = float(text)
    except ValueError:
        raise ValueError(wrong) from None
    if not 0 <= gib <= MAX_GIB:  # true for NaN
        raise ValueError(wrong)
    return int(gib * 2**30)


def is_api_key(text: str) -> bool:
    """Whether a client can send it as `Authorization: Bearer TEXT`, and it is not too short to keep anybody out."""
    return MIN_KEY_LENGTH <= len(text) <= MAX_KEY_LENGTH and all("!" <= letter <= "~" for letter in text)


def flag_name(setting: str) -> str:
    """The command line's word for a setting."""
    return setting.upper() if setting in _POSITIONAL else "--" + setting.replace("_", "-")


def did_you_mean(word: str, known: tuple[str, ...]) -> str:
    """`; did you mean X?` when one of `known` is close to `word`, else nothing."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; settings are {', '.join(known)}"


def _build(values: Mapping[str, Any], sources: Mapping[str, str]) -> LaunchConfig:
    try:
        return LaunchConfig(**values)
    except ConfigError as error:
        named = next((name for name in sorted(values, key=len, reverse=True) if str(error).startswith(name)), None)
        raise ConfigError(f"{sources[named]}: {error}" if named else str(error)) from None


def _convert(value: Any, hint: object, where: str, is_text: bool, *, shows: bool) -> Any:
    """`value` as the field's type. Text (environment) is parsed; typed values (flags, TOML) must already fit.

    Raises ConfigError, which `shows` the value, unless it is a secret.
    """
    kind = next(k for k in (bool, int, float, str) if k is hint or k in getattr(hint, "__args__", ()))
    if is_text and kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if value.lower() not in words:
            raise ConfigError(f"{where} must be true or false, got {value!r}")
        return words[value.lower()]
    if is_text:
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{where} must be {_article(kind)}, got {value!r}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        got = short(value) if shows else f"a {type(value).__name__}"
        raise ConfigError(f"{where} must be {_article(kind)}, got {got}")
    return value


def _article(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]


def _check_field(item: Field[Any], value: Any) -> None:
    """Raises ConfigError, a sentence that begins with the setting's name, for what its choices and limits do not allow."""
    choices, limits, zero = (item.metadata[name] for name in ("choices", "limits", "zero"))
    if choices and value not in choices:
        raise ConfigError(f"{item.name} {value!r} is not available; use {' or '.join(choices)}")
    if limits is None or value is None or (zero is not None and value == 0):
        return
    low, high = limits
    if isinstance(item.default, float):
        if not 0 < value <= high:  # true for NaN
            raise ConfigError(f"{item.name} must be more than 0 and at most {high:g} seconds, got {value}")
        if value < low:
            raise ConfigError(f"{item.name} must be at least {low:g} seconds, got {value}")
    elif not low <= value <= high:
        raise ConfigError(f"{item.name} must be between {low} and {high}{f' (0: {zero})' if zero else ''}, got {value}")


def _public(name: str, value: object) -> object:
    return "(secret)" if name in SECRETS and value is not None else value


def _shown(value: object) -> str:
    return (
        "-"
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
