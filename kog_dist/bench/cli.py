"""`kog-bench`: measures what docs/results.md reports. The last line of every benchmark is one JSON object,
but at a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kog_dist.bench.commands.agents import agents
from kog_dist.bench.commands.chaos import chaos
from kog_dist.bench.commands.collectives import collectives
from kog_dist.bench.commands.compare import compare
from kog_dist.bench.commands.decode import decode
from kog_dist.bench.commands.drafts import drafts
from kog_dist.bench.commands.endurance import endurance
from kog_dist.bench.commands.faults import faults
from kog_dist.bench.commands.first_token import first_token
from kog_dist.bench.commands.gateway import gateway
from kog_dist.bench.commands.inspect import inspect
from kog_dist.bench.commands.latency import latency
from kog_dist.bench.commands.load import load
from kog_dist.bench.commands.make_model import make_model
from kog_dist.bench.commands.passes import passes
from kog_dist.bench.commands.peers import peers
from kog_dist.bench.commands.prefill import prefill
from kog_dist.bench.commands.quality import quality
from kog_dist.bench.commands.replay import replay
from kog_dist.bench.commands.requests import requests
from kog_dist.bench.commands.router import router
from kog_dist.bench.commands.scaling import scaling
from kog_dist.bench.commands.serve import serve
from kog_dist.bench.commands.soak import soak
from kog_dist.bench.report import allow_dirty, check_stdout, want_json
from kog_dist.errors import KogError, naming_extra
from kog_dist.rpc.field_flags import Version
from kog_dist.rpc.help_examples import examples
from kog_dist.rpc.output import quoted_streams
from kog_dist.system.standard_streams import fill_closed

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Measure an engine on this machine. In a pipe or file the last line is one JSON object: commit, machine, "
    "configuration, figures.",
    epilog=examples("kog-bench"),
)


@app.callback()
def _destination(
    dirty: Annotated[bool, typer.Option("--dirty", help="Allow docs/results to get figures of changes in no commit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON object at a terminal, too.")] = False,
    version: Version = False,
) -> None:
    allow_dirty(dirty)
    want_json(json)
    check_stdout()


for _command in (
    decode,
    drafts,
    passes,
    faults,
    chaos,
    load,
    latency,
    prefill,
    inspect,
    router,
    requests,
    first_token,
    soak,
    replay,
    serve,
    agents,
    compare,
    peers,
    gateway,
    collectives,
    scaling,
    endurance,
    quality,
    make_model,
):
    app.command(epilog=examples(f"kog-bench {_command.__name__.replace('_', '-')}"))(_command)


def main() -> None:
    """Run `kog-bench` and exit with its code."""
    fill_closed()
    try:
        with quoted_streams(), naming_extra("cuda"):
            app(prog_name="kog-bench")
    except KogError as error:
        print(f"kog-bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
