"""Settings: precedence, sources, and refusal of everything unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist import env
from kog_dist.config import SETTINGS, LaunchConfig, resolve
from kog_dist.errors import ConfigError

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = written(tmp_path, "ranks = 2\nstep_timeout = 7\nrpc_port = 1\n")
    resolved = resolve({"ranks": 8, "model": None}, {"KOG_RANKS": "4", "KOG_STEP_TIMEOUT": "5.5"}, file)
    assert (resolved.config.ranks, resolved.config.step_timeout, resolved.config.rpc_port) == (8, 5.5, 1)
    assert resolved.config.startup_timeout == LaunchConfig().startup_timeout
    assert resolved.sources["ranks"] == "--ranks"
    assert resolved.sources["step_timeout"] == "KOG_STEP_TIMEOUT"
    assert resolved.sources["rpc_port"] == str(file)
    assert resolved.sources["startup_timeout"] == "default"


def test_description_names_every_setting_with_its_source(tmp_path: Path) -> None:
    text = resolve({"log_dir": "logs"}, {"KOG_VERIFY": "no"}, written(tmp_path, "device = 'cpu'")).describe()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert tuple(rows) == SETTINGS
    assert rows["log_dir"] == ["logs", "--log-dir"]
    assert rows["verify"] == ["false", "KOG_VERIFY"]
    assert rows["device"][0] == "cpu"
    assert rows["device"][1].endswith("run.toml")
    assert rows["stall_timeout"] == ["1", "default"]


def test_a_key_is_never_shown() -> None:
    resolved = resolve({}, {"KOG_API_KEY": "s3cret-s3cret"}, None)
    assert resolved.config.api_key == "s3cret-s3cret"
    assert "s3cret" not in resolved.describe() + repr(resolved)
    with pytest.raises(ConfigError) as caught:
        resolve({"api_key": "s3cret with blanks"}, {}, None)
    assert "s3cret" not in str(caught.value)


def test_names_of_the_model_are_taken_and_others_refused() -> None:
    resolved = resolve({"served_model_name": "org/Model-1.5, gpt-*"}, {}, None)
    assert resolved.config.served_names == ("org/Model-1.5", "gpt-*")
    with pytest.raises(ConfigError, match="served_model_name 'two words' must have letters"):
        resolve({"served_model_name": "m,two words"}, {}, None)


@pytest.mark.parametrize(
    ("flags", "environ", "text", "expected"),
    [
        ({}, {"KOG_RNKS": "1"}, "", "KOG_RNKS: there is no setting 'rnks'; did you mean ranks?"),
        ({}, {}, "steptimeout = 3", "there is no setting 'steptimeout'; did you mean step_timeout?"),
        ({}, {}, "zzz = 3", "settings are model, ranks"),
        ({}, {"KOG_RANKS": "two"}, "", "KOG_RANKS: ranks must be an integer, got 'two'"),
        ({}, {"KOG_VERIFY": "maybe"}, "", "KOG_VERIFY: verify must be true or false, got 'maybe'"),
        ({}, {}, "ranks = '2'", "ranks must be an integer, got '2'"),
        ({}, {}, "ranks = true", "ranks must be an integer, got True"),
        ({}, {}, "[ranks]\na = 1", "ranks must be an integer"),
        ({}, {}, "verify = 1", "verify must be true or false, got 1"),
        ({}, {}, "ranks = ", "is not valid TOML"),
        ({"ranks": -1}, {}, "", "--ranks: ranks must be between 1 and 1024"),
        ({"port": 65536}, {}, "", "--port: port must be between 0 and 65535"),
        ({"api_key": "short"}, {}, "", "--api-key: api_key must be 8 to 1024 visible ASCII characters without blanks, it has 5"),
        ({"api_key": "long enough to be one"}, {}, "", "without blanks, it has 21"),
        ({"api_key": "abcdefgh", "api_key_file": "k"}, {}, "", "api_key and api_key_file exclude each other"),
        ({"cors_origin": "https://a.example/page"}, {}, "", "cors_origin 'https://a.example/page' must be like https://"),
        ({"log_format": "xml"}, {}, "", "log_format 'xml' is not available; use text or json"),
        ({"device": "tpu"}, {}, "", "--device: device 'tpu' is not available; use auto or cpu or cuda"),
        ({"launcher": "slurm"}, {}, "", "--launcher: launcher 'slurm' is not available; use auto or local or mpi or ray"),
        ({"replicas": 0}, {}, "", "--replicas: replicas must be between 1 and 256, got 0"),
        ({"kv_dtype": "int3"}, {}, "", "--kv-dtype: kv_dtype 'int3' is not available"),
        ({"prefill": "sometimes"}, {}, "", "--prefill: prefill 'sometimes' is not available"),
        ({"stall_timeout": 0.4}, {}, "", "--stall-timeout: stall_timeout must be at least 0.5 seconds, got 0.4"),
        ({"step_timeout": float("nan")}, {}, "", "--step-timeout: step_timeout must be more than 0"),
        ({"rpc_port": 70000}, {}, "", "--rpc-port: rpc_port must be between 0 and 65535, got 70000"),
        ({"instance": "../x"}, {}, "", "--instance: instance name '../x' must be"),
        ({"gpus": "all", "device": "cpu"}, {}, "", "--gpus: gpus all contradicts device cpu"),
    ],
)
def test_bad_settings_are_refused_by_name(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags, environ, written(tmp_path, text))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["12345678", "[12345678]", "12345678.5", "{a = 12345678}", "1979-05-27"])
def test_a_key_of_another_type_is_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key must be text, got a \w+$"):
        resolve({}, {}, written(tmp_path, f"api_key = {text}"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read: No such file"):
        resolve({}, {}, tmp_path / "no.toml")


def test_other_variables_are_left_alone() -> None:
    assert resolve({}, {"HOME": "/", "RANK": "3", "KOG_RANKS": ""}, None).config == LaunchConfig()


KUBERNETES = {  # for a service called kog, and one called kog-model
    "KOG_PORT": "tcp://10.96.0.12:8000", "KOG_SERVICE_HOST": "10.96.0.12", "KOG_SERVICE_PORT": "8000",
    "KOG_SERVICE_PORT_HTTP": "8000",
    "KOG_PORT_8000_TCP": "tcp://10.96.0.12:8000", "KOG_PORT_8000_TCP_PROTO": "tcp", "KOG_PORT_8000_TCP_PORT": "8000",
    "KOG_PORT_8000_TCP_ADDR": "10.96.0.12", "KOG_MODEL_PORT": "udp://10.96.0.13:53", "KOG_MODEL_SERVICE_HOST": "10.96.0.13",
    "KOG_RPC_PORT": "tcp://10.96.0.14:1",
}  # fmt: skip


def test_what_kubernetes_sets_for_a_service_is_no_setting() -> None:
    found = resolve({}, KUBERNETES | {"KOG_HTTP": "no", "KOG_HOST": "127.0.0.1"}, None)
    assert found.config == LaunchConfig(http=False)
    assert found.left_out == ("KOG_PORT and 10 more are what Kubernetes sets for a service of that name, not settings: left out",)
    (one,) = resolve({}, {"KOG_PORT": "tcp://10.96.0.12:8000"}, None).left_out
    assert one.startswith("KOG_PORT is what Kubernetes sets")
    assert resolve({}, {"KOG_PORT": "8001"}, None).config.port == 8001
    with pytest.raises(ConfigError, match="KOG_PORT: port must be an integer"):
        resolve({}, {"KOG_PORT": "http://10.96.0.12:8000"}, None)


def test_variables_that_are_no_settings_are_left_out_and_named() -> None:
    found = resolve({}, {"KOG_IMAGE": "kog:1.2", "KOG_VERSION": "7"}, None)
    assert found.config == LaunchConfig()
    assert found.left_out == ("KOG_IMAGE is no setting, and is left out", "KOG_VERSION is no setting, and is left out")


def test_children_get_one_blas_thread_and_no_settings() -> None:
    child = env.child_environment({"PATH": "/bin", "KOG_RANKS": "3", "OPENBLAS_NUM_THREADS": "7"})
    assert child["OPENBLAS_NUM_THREADS"] == "1"
    assert child["PATH"] == "/bin"
    assert "KOG_RANKS" not in child


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert resolve({}, {}, path).config.device in ("auto", "cpu", "cuda")
