"""GGUF files of made models: `python -m tests.gpu.peer_gguf --llama-cpp DIR made/model made/model.gguf`.

DIR is llama.cpp's source (that of the package llama-cpp-python has it in vendor/), whose own converter does it, with two things
that it refuses allowed: a pre-tokenizer that it has never seen is GPT-2's, and a vocabulary without merges has one.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CONVERTER = "convert_hf_to_gguf.py"
_MERGE = "\u0100 \u0101"  # of two characters that byte-level BPE writes for bytes 0 and 1


def pre_tokenizer(known: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """llama.cpp's name of a tokenizer's pre-tokenizer, by `known`, which raises NotImplementedError for others."""

    def name(model: Any, tokenizer: Any) -> str:
        try:
            return known(model, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    return name


def with_a_merge(add: Callable[..., Any]) -> Callable[..., Any]:
    """How a vocabulary is written, by `add`, with one merge at least."""

    def write(vocabulary: Any, *arguments: Any, **more: Any) -> Any:
        vocabulary.merges = vocabulary.merges or [_MERGE]
        return add(vocabulary, *arguments, **more)

    return write


def convert(source: Path, model: Path, file: Path, dtype: str) -> None:
    """Run the converter in this process. Raises ImportError where DIR has none."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base, gguf = importlib.import_module("conversion.base"), importlib.import_module("gguf")
    base.TextModel.get_vocab_base_pre = pre_tokenizer(base.TextModel.get_vocab_base_pre)
    gguf.SpecialVocab.add_to_gguf = with_a_merge(gguf.SpecialVocab.add_to_gguf)
    sys.argv = [_CONVERTER, str(model), "--outtype", dtype, "--outfile", str(file)]
    runpy.run_path(str(source / _CONVERTER), run_name="__main__")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.peer_gguf", description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of its source")
    parser.add_argument("--outtype", default="bf16", help="of the weights, as the converter calls it")
    parser.add_argument("model", type=Path, help="folder")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    return parser.parse_args(words)


def main() -> int:
    given = parsed(sys.argv[1:])
    if not (given.llama_cpp / _CONVERTER).is_file():
        print(f"Error: {given.llama_cpp} has no {_CONVERTER}; give the folder of llama.cpp's source", flush=True)
        return 1
    convert(given.llama_cpp, given.model, given.file, given.outtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
