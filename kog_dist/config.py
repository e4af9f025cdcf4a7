"""The settings of a run: flags > environment (`KOG_*`) > file > default, each with the source it came from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from kog_dist import env
from kog_dist.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
LAUNCHERS = ("auto", "local", "mpi", "ray")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16")
PREFILL = ("auto", "on", "off")
LOG_FORMATS = ("text", "json")
MIN_KEY_LENGTH = 8
MAX_REPLICAS = 256
MIN_STALL_S = 0.5
MAX_TIMEOUT_S = 86400.0
MAX_FILE_BYTES, MAX_NESTED, MAX_DOTS = 2**16, 64, 256  # of a file of settings; dots in a line
_ORIGIN = re.compile(r"https?://[^/?#\s]+")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What `kog-launch` starts. Every field is a flag, a `KOG_` variable and a key of a config file under the same name."""

    model: str | None = None  # folder of a checkpoint; None = the bundled demo model
    ranks: int = 0  # 0 = chosen from the machine and the model's lanes
    gpus: str | None = None  # N, all, or a list of indices and UUIDs such as 0,2,3; asks for the CUDA device
    pin: bool = True  # keep the process of a GPU's rank on the CPUs near that GPU
    device: str = "auto"
    launcher: str = "auto"
    ray_address: str | None = None  # host:port of a Ray cluster; None = RAY_ADDRESS, without that a private one on this machine
    replicas: int = 1  # engines of this kind, behind one endpoint; 0 = only those of remote_replicas
    min_replicas: int | None = None  # with max_replicas: as many as the waiting requests need
    max_replicas: int | None = None
    scale_down_after: float = 60.0  # s in which one replica fewer would have been enough
    remote_replicas: str | None = None  # access files of engines that others started: a.json,b.json
    kv_dtype: str = "auto"  # float32 on CPU ranks, the 16-bit type of the weights on GPUs
    kv_caches: int = 0  # requests whose keys and values are kept for those that extend them; 0 = 4 on CPU ranks, 1 on GPUs
    prefill: str = "auto"  # whether GPUs take prompts in blocks of many tokens; auto: up to four GPUs do if they can
    queue_limit: int = 64  # requests that may wait while another runs
    client_queue_limit: int = 16  # of them those of one connection
    verify: bool = True  # compare the checkpoint with its hash manifest, if it has one
    instance: str | None = None  # None = "default" when serving, a name of its own for one prompt
    rpc_port: int | None = None  # TCP besides the socket file in the instance folder; None = no TCP, 0 = any free port
    rpc_host: str = "127.0.0.1"  # address that the TCP port is opened on; always encrypted, and only for the one client key
    http: bool = True  # serve HTTP besides RPC
    host: str = "127.0.0.1"  # address that HTTP listens on; one that other machines reach needs a key
    port: int = 8000  # 0 = any free one
    http_socket: str | None = None  # instead of both: a socket file in a folder that this user alone can enter
    api_key: str | None = field(default=None, repr=False)  # what HTTP clients must send; better in a file or KOG_API_KEY
    api_key_file: str | None = None
    cors_origin: str | None = None  # web pages that may use the service: https://a.example,https://b.example, or *
    startup_timeout: float = 300.0  # s, until every rank is ready
    step_timeout: float = 30.0  # s, longest wait of a rank for its peers
    shutdown_timeout: float = 10.0  # s, for the running request after a stop was asked for
    stall_timeout: float = 1.0  # s without a heartbeat after which a ready rank counts as hung
    log_dir: str | None = None
    log_format: str = "text"  # of the gateway's log
    log_prompts: bool = False  # write prompts and answers into it, too

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("launcher", self.launcher, LAUNCHERS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("prefill", self.prefill, PREFILL)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        if self.ranks < 0 or self.ranks > 1024:
            raise ConfigError(f"ranks must be between 1 and 1024 (0 = automatic), got {self.ranks}")
        self._check_replicas()
        for name, least, most in (("kv_caches", 0, 1024), ("queue_limit", 1, 4096), ("client_queue_limit", 1, 4096)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be between {least} and {most}, got {getattr(self, name)}")
        for name in ("rpc_port", "port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name} must be between 0 and 65535, got {value}")
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
        for name in ("startup_timeout", "step_timeout", "shutdown_timeout", "stall_timeout", "scale_down_after"):
            value = getattr(self, name)
            if not 0 < value <= MAX_TIMEOUT_S:
                raise ConfigError(f"{name} must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds, got {value}")
        if self.stall_timeout < MIN_STALL_S:
            raise ConfigError(f"stall_timeout must be at least {MIN_STALL_S} seconds, got {self.stall_timeout}")
        if self.gpus is not None and self.device == "cpu":
            raise ConfigError(f"gpus {self.gpus} contradicts device cpu; give one of them")

    def _check_http(self) -> None:
        """What is wrong whatever machine it is; addresses and files are looked at when the port is bound."""
        if not self.host.strip():
            raise ConfigError(f"host must be an address of this machine, got {self.host!r}")
        if self.http_socket is not None and (not self.http_socket.strip() or (self.host, self.port) != ("127.0.0.1", 8000)):
            raise ConfigError(f"http_socket must be a path and takes the place of host and port, got {self.http_socket!r}")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file exclude each other")
        if self.api_key is not None and not (
            MIN_KEY_LENGTH <= len(self.api_key) <= 1024 and all("!" <= letter <= "~" for letter in self.api_key)
        ):
            length = f"{MIN_KEY_LENGTH} to 1024"
            raise ConfigError(f"api_key must be {length} visible ASCII characters without blanks, it has {len(self.api_key)}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin {origin!r} must be like https://example.org, without a path, or *")

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The web pages that may use the service."""
        return tuple(filter(None, map(str.strip, (self.cors_origin or "").split(","))))

    def _check_replicas(self) -> None:
        least = 0 if self.remote_replicas is not None else 1
        if not least <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be between {least} and {MAX_REPLICAS}, got {self.replicas}")
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
_SECRETS = ("api_key",)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and where each value came from ("--ranks", "KOG_RANKS", "laptop.toml" or "default")."""

    config: LaunchConfig
    sources: Mapping[str, str]

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
    for layer, source_of, is_text in layers:
        for name, value in layer.items():
            source = source_of(name)
            if name not in SETTINGS:
                raise ConfigError(f"{source}: there is no setting {name!r}{did_you_mean(name, SETTINGS)}")
            values[name] = _convert(value, hints[name], f"{source}: {name}", is_text)
            sources[name] = source
    return Resolved(_build(values, sources), sources)


def read_file(path: Path) -> dict[str, Any]:
    """Parse a TOML file of settings. Raises ConfigError when it cannot be read or parsed."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
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
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    lines = [line for line in raw.splitlines() if not line.lstrip().startswith(b"#")]
    for mark, what in ((b"[", "brackets"), (b"{", "braces")):
        if sum(line.count(mark) for line in lines) > MAX_NESTED:
            raise ValueError(f"it has more than {MAX_NESTED} opening {what}; settings are not nested")
    if any(line.count(b".") > MAX_DOTS for line in lines):
        raise ValueError(f"a line has more than {MAX_DOTS} dots; settings are not nested")


def flag_name(setting: str) -> str:
    """The command line's word for a setting."""
    return "MODEL" if setting == "model" else "--" + setting.replace("_", "-")


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


def _convert(value: Any, hint: Any, where: str, is_text: bool) -> Any:
    """`value` as the field's type. Text (environment) is parsed; typed values (flags, TOML) must already fit."""
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
        raise ConfigError(f"{where} must be {_article(kind)}, got {value!r}")
    return value


def _article(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not available; use {' or '.join(allowed)}")


def _public(name: str, value: Any) -> Any:
    return "(secret)" if name in _SECRETS and value is not None else value


def _shown(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
