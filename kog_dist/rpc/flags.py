"""The flags of `kog-client`. What the commands do is in rpc/commands.py, imported when one runs: `--help` answers at once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kog_dist.errors import ConfigError, KogError
from kog_dist.rpc.field_flags import JSON_SCHEMA, REGEX, FlagsOf, Instance, KeyFile, Version, with_flags
from kog_dist.rpc.help_examples import examples
from kog_dist.rpc.output import quoted_streams, write_error
from kog_dist.rpc.prompt_request import PromptRequest, parse_ids, read_schema, sampling_of
from kog_dist.sampling_params import SamplingParams
from kog_dist.system.standard_streams import fill_closed

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Talk to a running engine. "
    "Exit codes: 0 fine, 2 usage or refused, 3 no engine or no output, 4 the request failed, 5 timeout.",
    epilog=examples("kog-client"),
)

Endpoint = Annotated[str | None, typer.Option(help="Address instead of a name: ipc://PATH, or tcp://HOST:PORT with --key-file.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds after which to give up.")]
Ray = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Look for it on a Ray cluster: HOST:PORT, or auto.")]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.callback()
def _of_all_commands(version: Version = False) -> None:
    pass


@app.command(epilog=examples("kog-client generate"))
@with_flags(sampling=FlagsOf(SamplingParams))
def generate(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="The same as token ids: 1,2,3.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate. Default: what fits, at most 256.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    logit_digests: Annotated[bool, typer.Option("--logit-digests", help="SHA-256 of each step's float32 logits.")] = False,
    stamps: Annotated[bool, typer.Option("--stamps", help="With --json: when each token was there.")] = False,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the engine ends the request.")] = None,
    reuse_kv: Annotated[bool, typer.Option("--reuse-kv/--no-reuse-kv", help="Skip what earlier requests prefilled.")] = True,
    conversation: Annotated[str | None, typer.Option(help="Id that the requests of a conversation share, for a router.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Use only what requests with the same one have left.")] = None,
    speculate: Annotated[
        str | None, typer.Option(help="Drafts of later tokens: off, lookup or auto. Default: the engine's.")
    ] = None,
    sampling: Any = None,
    json_schema: Annotated[str | None, JSON_SCHEMA] = None,
    regex: Annotated[str | None, REGEX] = None,
    json: Json = False,
    instance: Instance = None,
    endpoint: Endpoint = None,
    key_file: KeyFile = None,
    timeout: Timeout = None,
    wait_ready: Annotated[bool, typer.Option("--wait-ready", help="Wait for an engine that is still starting.")] = False,
    request_fd: Annotated[int | None, typer.Option(hidden=True, help="What PromptRequest.write gave; for kog-launch.")] = None,
) -> None:
    """Decode one prompt. Text to stdout as it comes, statistics to stderr."""
    from kog_dist.rpc import commands

    if request_fd is not None:
        request = PromptRequest.read(request_fd)
    elif (prompt is None) == (prompt_ids is None):
        raise ConfigError("give either --prompt or --prompt-ids")
    else:
        request = PromptRequest(
            prompt=prompt, prompt_ids=parse_ids(prompt_ids), max_tokens=max_tokens, sampling=sampling_of(sampling),
            stop=tuple(stop or ()), ignore_eos=ignore_eos, logit_digests=logit_digests, stamps=stamps, deadline_s=deadline,
            reuse_kv=reuse_kv, conversation=conversation, json_schema=read_schema(json_schema), regex=regex,
            cache_salt=cache_salt, speculate=speculate, as_json=json,
        )  # fmt: skip
    target = commands.EngineChoice(instance, endpoint, key_file)
    for_launcher = request_fd is not None
    raise typer.Exit(commands.generate(target, request, timeout_s=timeout, wait_ready=wait_ready, for_launcher=for_launcher))


@app.command(epilog=examples("kog-client status"))
def status(
    json: Json = False, instance: Instance = None, endpoint: Endpoint = None, key_file: KeyFile = None, timeout: Timeout = None
) -> None:
    """Show the engine's state, its requests and counters."""
    from kog_dist.rpc import commands

    target = commands.EngineChoice(instance, endpoint, key_file)
    raise typer.Exit(commands.ask(target, "status", as_json=json, timeout_s=timeout))


@app.command(epilog=examples("kog-client cancel"))
def cancel(
    request_id: Annotated[str | None, typer.Argument(help="As `status` shows it; none: the one that runs.")] = None,
    json: Json = False,
    instance: Instance = None,
    endpoint: Endpoint = None,
    key_file: KeyFile = None,
    timeout: Timeout = None,
) -> None:
    """End a request."""
    from kog_dist.rpc import commands

    target = commands.EngineChoice(instance, endpoint, key_file)
    raise typer.Exit(commands.ask(target, "cancel", request_id, as_json=json, timeout_s=timeout))


@app.command(epilog=examples("kog-client drain"))
def drain(
    json: Json = False, instance: Instance = None, endpoint: Endpoint = None, key_file: KeyFile = None, timeout: Timeout = None
) -> None:
    """Let the engine finish the running request and stop."""
    from kog_dist.rpc import commands

    target = commands.EngineChoice(instance, endpoint, key_file)
    raise typer.Exit(commands.ask(target, "drain", as_json=json, timeout_s=timeout))


@app.command("list", epilog=examples("kog-client list"))
def list_engines(json: Json = False) -> None:
    """List the engines of this user on this machine."""
    from kog_dist.rpc import list_command

    raise typer.Exit(list_command.list_engines(as_json=json))


@app.command(epilog=examples("kog-client stop"))
def stop(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the running request.")] = False,
    instance: Instance = None,
    ray: Ray = None,
) -> None:
    """End an engine, and wait until it is gone. The running request may finish before."""
    from kog_dist.rpc import instance_commands, ray_commands

    if ray is not None:
        raise typer.Exit(ray_commands.stop(ray, instance, at_once=now))
    raise typer.Exit(instance_commands.stop(instance, at_once=now))


@app.command(epilog=examples("kog-client logs"))
def logs(
    process: Annotated[str | None, typer.Argument(help="Whose log: gateway, rank-0, ... Default: launcher.")] = None,
    lines: Annotated[int, typer.Option(min=0, help="How many of the last lines.")] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until the engine ends.")] = False,
    instance: Instance = None,
    ray: Ray = None,
) -> None:
    """Show what an engine has logged. On this machine also when it has ended."""
    from kog_dist.rpc import instance_commands, ray_commands

    if ray is not None:
        raise typer.Exit(ray_commands.logs(ray, instance, process, num_lines=lines, follow=follow))
    raise typer.Exit(instance_commands.logs(instance, process, num_lines=lines, follow=follow))


def run(arguments: list[str]) -> int:
    """Parse and execute; every KogError becomes one line on stderr and its exit code."""
    fill_closed()
    try:
        with quoted_streams():
            app(arguments, prog_name="kog-client", standalone_mode=True)
    except KogError as error:
        write_error(f"kog-client: {error}")
        return error.exit_code
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    return 0
