"""`kog-gateway`: the HTTP service by itself, for an engine that runs already, here or on another machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kog_dist.config import LaunchConfig, resolve
from kog_dist.env import variable
from kog_dist.errors import ConfigError, KogError, LaunchError
from kog_dist.rpc.field_flags import FlagsOf, Instance, KeyFile, Version, with_flags
from kog_dist.rpc.help_examples import examples
from kog_dist.rpc.output import quoted_streams, write_error
from kog_dist.system.python_child import harden
from kog_dist.system.standard_streams import fill_closed

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
# Flags that mean the same for `kog-launch`; there they are settings of a file and of the environment, too.
SHARED = (
    "host", "port", "http_socket", "api_key", "api_key_file", "share_prefixes", "shutdown_timeout", "log_format", "log_prompts",
    "unknown_fields", "special_tokens_in_content", "reasoning_parser", "tool_parser", "served_model_name",
)  # fmt: skip


@app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=examples("kog-gateway"))
@with_flags(http=FlagsOf(LaunchConfig, only=SHARED, shows_defaults=True))
def gateway(
    instance: Instance = None,
    key_file: KeyFile = None,
    model: Annotated[Path | None, typer.Option(help="Folder of its model, for tokenizer and chat template.")] = None,
    http: Any = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web pages that may use it; may be given several times.")] = None,
    version: Version = False,
) -> None:
    """Serve HTTP for a running engine. Exit codes: 0 fine, 2 usage, 3 cannot start."""
    from kog_dist.gateway import bind
    from kog_dist.gateway.args import GatewayArgs
    from kog_dist.gateway.keys import write_keys
    from kog_dist.gateway.process import run_gateway
    from kog_dist.runtime.command_line import hide_own
    from kog_dist.runtime.instance import instances_root

    if instance is not None and key_file is not None:
        raise ConfigError("--instance and --key-file exclude each other")
    settings = resolve({**http, "cors_origin": ",".join(cors_origin) if cors_origin else None}, {}, None).config
    hide_own("--api-key", settings.api_key)
    keys = _choose_keys(settings, os.environ.get(variable("api_key")))
    if settings.http_socket is not None:
        listening = bind.listen_on_socket(settings.http_socket)
    else:
        bind.check_exposure(settings.host, keys)
        listening = bind.listen(settings.host, settings.port)
    args = GatewayArgs(
        listen_fd=listening.listener.detach(), host=listening.host, key_fd=write_keys(keys),
        instance_folder=str(instances_root() / _name(instance)) if key_file is None else None,
        key_file=None if key_file is None else str(key_file), model=None if model is None else str(_folder(model)),
        served_names=settings.served_names,
        cors_origins=settings.cors_origins, drain_s=settings.shutdown_timeout, log_format=settings.log_format,
        log_prompts=settings.log_prompts, unknown_fields=settings.unknown_fields, share_prefixes=settings.share_prefixes,
        special_tokens_in_content=settings.special_tokens_in_content,
        reasoning_parser=settings.reasoning_parser, tool_parser=settings.tool_parser,
    )  # fmt: skip
    try:
        args.access()  # a key file that is none is said now
        raise typer.Exit(run_gateway(args))
    finally:
        if listening.file is not None:
            listening.file.remove()


def _choose_keys(settings: LaunchConfig, from_environment: str | None) -> tuple[str, ...]:
    """The API keys: flag or file, then environment. Raises ConfigError."""
    from kog_dist.gateway.keys import check_key, keys_of

    given = keys_of(settings)
    return (check_key(from_environment, variable("api_key")),) if from_environment and not given else given


def _name(instance: str | None) -> str:
    name = instance if instance is not None else "default"
    if not name or "/" in name or name.startswith("."):
        raise ConfigError(f"instance name {name!r} must be a name, not a path")
    return name


def _folder(model: Path) -> Path:
    from kog_dist.model.gguf.folder import gguf_of

    if not (model / "config.json").is_file() and gguf_of(model) is None:
        raise ConfigError(f"--model {model} is not the folder of a model: it has no config.json")
    return model.absolute()


def main() -> None:
    """Run `kog-gateway` and exit with its code; every KogError becomes one line on stderr."""
    harden()
    fill_closed()
    try:
        with quoted_streams():
            app(prog_name="kog-gateway")
    except KogError as error:
        write_error(f"kog-gateway: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        write_error(f"kog-gateway: the system refused what is needed: {error}")
        sys.exit(LaunchError.exit_code)


if __name__ == "__main__":
    main()
