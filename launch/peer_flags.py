"""Flags of other servers, and what is said to somebody who gives them to `kog-launch`: vLLM, SGLang, llama.cpp, Ollama, TGI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from typer.core import TyperCommand

from kog_dist.errors import ConfigError

_CONTEXT: Final = "is --context here"
_GPUS: Final = "is --gpus here, or --ranks on CPUs"
_MODEL: Final = "is not needed here: kog-launch MODEL"
_REPLICAS: Final = "is not there: --replicas starts several engines"
_TOGETHER: Final = "is --parallel here, on one GPU or on CPU ranks; on several GPUs requests at once take --replicas"
_MEMORY: Final = "is not needed: the weights are loaded, and the KV cache has what --context takes"
_TYPE: Final = "is not there: weights stay as the files have them, but for --quantize"
_QUANTIZE: Final = "is --quantize here, for what is to be rounded while loading; what files hold is read from them"
_KV: Final = "is --kv-dtype here"
_NOTHING: Final = "is not needed here; omit it"
_READER: Final = "is --tool-parser here"
_MEANINGS: Final[Mapping[str, str]] = {
    "--max-model-len --max-seq-len --max-total-tokens --context-length --ctx-size --ctx -c --n-ctx": _CONTEXT,
    "--tensor-parallel-size --tensor-parallel --tp-size --tp -tp --num-shard --n-gpu-layers --gpu-layers -ngl --num-gpus": _GPUS,
    "--model --model-path --model-id -m -hf --hf-repo": _MODEL,
    "--alias -a": "is --served-model-name here",
    "--data-parallel-size --dp --dp-size -dp": _REPLICAS,
    "-np --max-num-seqs --max-running-requests --max-batch-size": _TOGETHER,
    "--gpu-memory-utilization --mem-fraction-static --cuda-memory-fraction --swap-space": _MEMORY,
    "--dtype": _TYPE,
    "--quantization -q --quant": _QUANTIZE,
    "--kv-cache-dtype --cache-type-k -ctk --cache-type-v -ctv": _KV,
    "--threads -t": "is --ranks here",
    "--tool-call-parser": _READER,
    "--api-keys": "is --api-key-file here",
    "--enable-prefix-caching --trust-remote-code --enable-auto-tool-choice --jinja --flash-attn -fa --enable-reasoning": _NOTHING,
    "--allowed-origins": "is --cors-origin here",
    "--uds --unix-socket-path": "is --http-socket here",
    "--temp": "is --temperature here",
    "--n-predict -n --num-predict": "is --max-tokens here",
    "-p": "is --prompt here",
}
PEER_FLAGS: Final[Mapping[str, str]] = {flag: meaning for flags, meaning in _MEANINGS.items() for flag in flags.split()}
_VERBS: Final = frozenset({"serve", "run", "start"})


def hint_of(arguments: Sequence[str]) -> str | None:
    """What to say of a command line that could not be read; None if it has nothing of theirs."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = [f"`{arguments[0]}` is not needed here: kog-launch MODEL"] if arguments and arguments[0] in _VERBS else []
    flags = dict.fromkeys(argument.partition("=")[0] for argument in own)
    return "; ".join([*found, *(f"{flag} {PEER_FLAGS[flag]}" for flag in flags if flag in PEER_FLAGS)]) or None


class LaunchCommand(TyperCommand):
    """The command, which knows the flags of others where it does not know a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. Raises ConfigError for what another server takes."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "format_message") and (hint := hint_of(given)) is not None:  # click's, wherever typer has it from
                raise ConfigError(hint) from None
            raise
