"""The flags of `kog-chat`: talk to a running service in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.errors import ConfigError, KogError
from kog_dist.rpc.field_flags import Instance, Version
from kog_dist.rpc.help_examples import examples
from kog_dist.rpc.output import check_stdout, quoted_streams
from kog_dist.system.standard_streams import fill_closed

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("KOG_API_KEY", "OPENAI_API_KEY")


@app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=examples("kog-chat"))
def chat(
    prompt: Annotated[str | None, typer.Argument(help="Ask this alone. Without it: standard input, if that is a pipe.")] = None,
    url: Annotated[str | None, typer.Option(help=f"The service. Default: that of --instance, else {DEFAULT_URL}.")] = None,
    instance: Instance = None,
    model: Annotated[str | None, typer.Option(help="Name to send. Default: what the service has.")] = None,
    system: Annotated[str, typer.Option(help="Instructions for the model.")] = "",
    completion: Annotated[
        bool, typer.Option("--completion", help="Have the model continue the text, as base models do.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Default: the service's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer. Default: 512.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    speculate: Annotated[
        str | None, typer.Option(help="Drafts of later tokens: off, lookup or auto. Default: the service's.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long the service may say nothing.")] = 120.0,
    api_key: Annotated[str | None, typer.Option(help="Better: --api-key-file, KOG_API_KEY or OPENAI_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line with the speed after an answer from a pipe.")] = False,
    version: Version = False,
) -> None:
    """Talk to a running service. Ctrl-C ends an answer, Ctrl-D ends it all. Exit codes: 0, 2 usage, 3 no service, 4 failed."""
    from kog_dist.chat.conversation import Conversation, Settings
    from kog_dist.chat.screen import Screen
    from kog_dist.chat.service import ChatService
    from kog_dist.chat.session import ChatSession, piped_prompt
    from kog_dist.chat.wire import ServiceUrl

    if url is not None and instance is not None:
        raise ConfigError("--url and --instance exclude each other")
    if not timeout > 0:
        raise ConfigError(f"--timeout must be more than 0 seconds, got {timeout:g}")
    check_stdout()
    settings = Settings()
    for name, value in (
        ("temperature", temperature),
        ("max_tokens", max_tokens),
        ("seed", seed),
        ("speculate", speculate),
    ):
        if value is not None:
            settings.change(name, str(value))
    is_alone = prompt is not None or not sys.stdin.isatty()
    asked = prompt if prompt is not None else piped_prompt() if is_alone else ""
    service = ChatService(ServiceUrl.parse(url or _found_url(instance)), _key(api_key, api_key_file), silence_s=timeout)
    facts = service.facts(model)
    conversation = Conversation(facts.model, settings, system, completion or not facts.has_chat)
    session = ChatSession(service, facts, conversation, Screen())
    raise typer.Exit(session.answer_once(asked, quiet=quiet) if is_alone else session.talk())


def _found_url(instance: str | None) -> str:
    from kog_dist.rpc.paths import url_of_instance

    found = url_of_instance("default" if instance is None else instance)
    if found is None and instance is not None:
        raise ConfigError(f"no engine of the name {instance!r} serves HTTP; see kog-doctor, or give --url")
    return found or DEFAULT_URL


def _key(given: str | None, file: Path | None) -> str:
    from kog_dist.chat.session import read_key_file
    from kog_dist.runtime.command_line import hide_own

    hide_own("--api-key", given)
    if given is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file exclude each other")
    if file is not None:
        return read_key_file(file)
    return given if given is not None else next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")


def run(arguments: list[str]) -> int:
    """Parse and execute; every KogError becomes one line on stderr and its exit code."""
    fill_closed()
    try:
        with quoted_streams():
            app(arguments, prog_name="kog-chat")
    except KogError as error:
        from kog_dist.chat.session import BrokenOutput

        if isinstance(error, BrokenOutput):
            return 0
        print(f"kog-chat: {error}", file=sys.stderr)
        return error.exit_code
    return 0
