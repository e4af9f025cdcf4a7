"""`kog-gateway`: the HTTP service by itself, for an engine that runs already, here or on another machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.errors import ConfigError, KogError, LaunchError
from kog_dist.python_child import harden
from kog_dist.rpc.output import checked_stdout

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
KEY_VARIABLE = "KOG_API_KEY"


@app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def gateway(
    instance: Annotated[str | None, typer.Option(help="Name of an engine of this user. Default: default.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Instead: rpc-access.json of an engine with a TCP port.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of its model, for tokenizer and chat template.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Others than this machine's need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    http_socket: Annotated[str | None, typer.Option(help="Instead: a socket file that you alone can reach.")] = None,
    api_key: Annotated[str | None, typer.Option(help="What clients must send. Better: --api-key-file or KOG_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key, readable by you alone.")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web pages that may use it; may be given several times.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for running answers after a stop.")] = 10.0,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what users write and are answered, too.")] = False,
) -> None:
    """Serve HTTP for a running engine. Exit codes: 0 fine, 2 usage, 3 cannot start."""
    from kog_dist.gateway import bind
    from kog_dist.gateway.args import GatewayArgs, write_key
    from kog_dist.gateway.process import run_gateway
    from kog_dist.instance import instances_root

    if instance is not None and key_file is not None:
        raise ConfigError("--instance and --key-file exclude each other")
    key = choose_key(api_key, api_key_file, os.environ.get(KEY_VARIABLE))
    if http_socket is not None:
        http = bind.listen_on_socket(http_socket)
    else:
        bind.check_exposure(host, key)
        http = bind.listen(host, port)
    args = GatewayArgs(
        listen_fd=http.listener.detach(), host=http.host, key_fd=-1 if key is None else write_key(key),
        instance_folder=str(instances_root() / _name(instance)) if key_file is None else None,
        key_file=None if key_file is None else str(key_file), model=None if model is None else str(_folder(model)),
        cors_origins=check_origins(cors_origin or ()), drain_s=shutdown_timeout, log_format=log_format, log_prompts=log_prompts,
    )  # fmt: skip
    try:
        args.access()  # a key file that is none is said now
        raise typer.Exit(run_gateway(args))
    finally:
        if http.file is not None:
            http.file.remove()


def choose_key(given: str | None, file: Path | None, variable: str | None) -> str | None:
    """The API key: flag, then file, then environment. Raises ConfigError."""
    from kog_dist.gateway.args import check_key, read_key_file

    if given is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file exclude each other")
    if file is not None:
        return read_key_file(file)
    if given is not None:
        return check_key(given, "--api-key")
    return check_key(variable, KEY_VARIABLE) if variable else None


def check_origins(origins: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Origins as browsers send them. Raises ConfigError for what can never match."""
    from urllib.parse import urlsplit

    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (
            parts.scheme not in ("http", "https") or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"
        ):
            raise ConfigError(f"--cors-origin {origin!r} must be like https://example.org, without a path, or *")
    return tuple(origins)


def _name(instance: str | None) -> str:
    name = instance if instance is not None else "default"
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"instance name {name!r} must be a name, not a path")
    return name


def _folder(model: Path) -> Path:
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {model} is not the folder of a model: it has no config.json")
    return model.absolute()


def main() -> None:
    """Run `kog-gateway` and exit with its code; every KogError becomes one line on stderr."""
    harden()
    try:
        with checked_stdout():
            app(prog_name="kog-gateway")
    except KogError as error:
        print(f"kog-gateway: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"kog-gateway: the system refused what is needed: {error}", file=sys.stderr, flush=True)
        sys.exit(LaunchError.exit_code)


if __name__ == "__main__":
    main()
