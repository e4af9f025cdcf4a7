"""The flags of `kog-launch`: those of `LaunchConfig` and of one prompt.

Heavy imports stand inside the functions that need them: `--help` answers in under 0.3 s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kog_dist import config
from kog_dist.errors import ConfigError, KogError, LaunchError, remedy_of, sentence_of
from kog_dist.launch.choice import choose_launcher
from kog_dist.launch.events import say, silence
from kog_dist.launch.peer_flags import LaunchCommand
from kog_dist.quoting import escaped
from kog_dist.rpc.field_flags import JSON_SCHEMA, REGEX, FlagsOf, Version, with_flags
from kog_dist.rpc.help_examples import examples
from kog_dist.rpc.output import write_out
from kog_dist.rpc.prompt_request import PromptRequest, flags_of_one_request, parse_ids, read_schema, sampling_of
from kog_dist.runtime.command_line import hide_own
from kog_dist.runtime.rank_env import read_rank_variables
from kog_dist.sampling_params import SamplingParams
from kog_dist.system.standard_streams import fill_closed

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

Supervise = Callable[[config.LaunchConfig, PromptRequest | None], int]  # returns the exit code
_MODULES = {
    "local": "supervisor",
    "mpi": "mpi.launch",
    "ray": "ray.launch",
    "replicas": "replicas.launch",
}  # each has a `supervise`

_muted = ExitStack()  # what keeps a process silent that mpirun started and that is not rank 0


@app.command(
    cls=LaunchCommand,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples("kog-launch"),
)
@with_flags(settings=FlagsOf(config.LaunchConfig, shows_defaults=True), sampling=FlagsOf(SamplingParams))
def launch(
    settings: Any = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="TOML file of settings (keys = these flags).")] = None,
    prompt: Annotated[str | None, typer.Option(help="Generate once to stdout, then exit.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The same with token ids: 1,2,3.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    logit_digests: Annotated[bool, typer.Option("--logit-digests", help="SHA-256 of each step's float32 logits.")] = False,
    sampling: Any = None,
    json_schema: Annotated[str | None, JSON_SCHEMA] = None,
    regex: Annotated[str | None, REGEX] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show bytes per rank, plan and ceiling; start nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Look at all that a start needs: files, address, folders; exit 0, 2 or 3.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="With --check: also read all weights.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is ready; it goes on in the background.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show every setting and its source.")] = False,
    version: Version = False,
) -> None:
    """Start a model on this machine and serve it, or answer one prompt.

    Settings come from flags, then KOG_<SETTING> variables, then the --config file. Exit codes: 0 fine, 2 usage, 3 cannot start,
    4 a rank died, 5 timeout.
    """
    resolved = config.resolve(settings, os.environ, config_file)
    hide_own("--api-key", resolved.config.api_key)
    for line in resolved.left_out:
        say(f"kog-launch: {line}", error=True)
    request = None
    if prompt is not None or prompt_ids is not None:
        request = PromptRequest(
            prompt=prompt,
            prompt_ids=parse_ids(prompt_ids),
            max_tokens=max_tokens,
            sampling=sampling_of(sampling),
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logit_digests=logit_digests,
            json_schema=read_schema(json_schema),
            regex=regex,
            as_json=json,
        )
    elif given := flags_of_one_request(
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        json=json,
        logit_digests=logit_digests,
        json_schema=json_schema,
        regex=regex,
        **sampling,
    ):
        raise ConfigError(f"{given[0]} describes one request and goes only with --prompt or --prompt-ids")
    if sum((dry_run, check, print_config)) > 1:
        raise ConfigError("--dry-run, --check and --print-config exclude each other")
    if deep and not check:
        raise ConfigError("--deep goes with --check; a start reads all weights anyway")
    if detach and (request is not None or dry_run or check or print_config):
        raise ConfigError("--detach goes with an engine that serves: it has no answer and nothing to show")
    if print_config:
        _print(resolved.describe())
        choice = choose_launcher(resolved.config, os.environ)
        _print(f"\nlauncher {choice.launcher}: {choice.reason}")
        raise typer.Exit(0)
    if check or dry_run:
        from kog_dist.launch import inspection

        _print(
            inspection.check(resolved.config, deep=deep, serves=request is None) if check else inspection.dry_run(resolved.config)
        )
        raise typer.Exit(0)
    raise typer.Exit(_start(resolved.config, request, detach=detach))


def _start(settings: config.LaunchConfig, request: PromptRequest | None, *, detach: bool) -> int:
    launcher = choose_launcher(settings, os.environ).launcher
    if launcher != "mpi":
        _muted.close()  # whoever runs an engine of its own speaks for itself
    if detach:
        from kog_dist.launch import detach as background

        if launcher == "mpi":
            raise ConfigError("--detach is not for mpirun, which ends its processes with itself; put mpirun in the background")
        if (code := background.begin(settings.startup_timeout)) is not None:
            return code
    module = _MODULES["replicas" if settings.has_router else launcher]
    supervise: Supervise = import_module(f"kog_dist.launch.{module}").supervise
    return supervise(settings, request)


def _print(text: str) -> None:
    """Print what was asked for. Raises OutputError when it cannot be written."""
    with suppress(BrokenPipeError):  # whoever read it has enough
        write_out(escaped(text) + "\n")


def run(arguments: list[str]) -> int:
    """Parse and execute; returns the exit code. Of several processes that mpirun started, only rank 0 speaks."""
    try:
        found = read_rank_variables(os.environ)
    except ConfigError:
        found = None  # said when it matters
    if found is None or found.rank == 0:
        return _run(arguments)
    with _muted, open(os.devnull, "w", encoding="utf-8") as nowhere:
        _muted.enter_context(redirect_stdout(nowhere))
        _muted.enter_context(redirect_stderr(nowhere))
        code = _run(arguments)
    return 0 if code == ConfigError.exit_code else code  # rank 0 ends with it; a second one might end rank 0 before it has spoken


def _run(arguments: list[str]) -> int:
    """Every KogError, and what the system refuses, becomes one line on stderr and its exit code."""
    try:
        if 1 in fill_closed():
            raise LaunchError("standard output is closed; send it to /dev/null if it is not wanted")
        code = app(arguments, prog_name="kog-launch", standalone_mode=True)
    except KogError as error:
        say(f"kog-launch: {error}", error=True)
        return error.exit_code
    except OSError as error:
        silence("stdout")
        remedy = remedy_of(error)
        say(f"kog-launch: the system refused what is needed: {error}{'; ' if remedy else ''}{remedy}", error=True)
        return LaunchError.exit_code
    except MemoryError as error:
        say(f"kog-launch: {sentence_of(error)}", error=True)
        return LaunchError.exit_code
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    return code if isinstance(code, int) else 0
