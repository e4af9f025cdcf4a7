"""`prepare`: from projects to token shards, a tokenizer, held-out functions and the list of sources."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as LibraryTokenizer

from kog_dist.errors import ConfigError
from kog_dist.train.bpe import train_tokenizer
from kog_dist.train.corpus import END_OF_TEXT, Document, Project, documents

SHARD_TOKENS = 2**24
_TOKENIZER_SAMPLE_CHARS = 80_000_000
_HELD_OUT_SHARE = 16  # one project in 16 is held out unless named


@dataclass(frozen=True)
class HeldOutFunction:
    """A function that no training file contains. `prompt` is its start: signature and docstring, or else the first line."""

    project: str
    prompt: str
    source: str


def prepare(
    projects: Sequence[Project],
    refused: Sequence[str],
    out: Path,
    *,
    held_out: Sequence[str] = (),
    vocab_size: int = 4096,
    seed: int = 0,
    max_project_bytes: int = 24_000_000,
    num_processes: int = 2,
    tokenizer_file: Path | None = None,
) -> dict[str, Any]:
    """Write `train-*.npy`, `held_out.npy` (uint16), `tokenizer.json`, `held_out_functions.json`, `sources.json`; returns counts.

    held_out: names of projects that are kept from training; by default one in 16 by the hash of the name. Equal input gives
    equal files. Raises ConfigError if either side of the split is empty.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = set(held_out) or {
        p.name for p in projects if int(hashlib.sha256(p.name.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0
    }
    train: list[str] = []
    kept: list[Document] = []
    num_bytes: dict[str, int] = defaultdict(int)
    num_files: Counter[str] = Counter()
    for document in documents(projects, max_project_bytes=max_project_bytes, num_processes=num_processes):
        num_bytes[document.project] += len(document.text.encode())
        num_files[document.project] += 1
        if document.project in names:
            kept.append(document)
        else:
            train.append(document.text)
    if not train or not kept:
        raise ConfigError(
            f"{len(train)} files to train on and {len(kept)} held out; both must be some: name projects to hold out"
        )
    random.Random(seed).shuffle(train)
    tokenizer = LibraryTokenizer.from_file(str(tokenizer_file)) if tokenizer_file else _tokenizer(train, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = _encode(tokenizer, train)
    for shard_idx, start in enumerate(range(0, len(tokens), SHARD_TOKENS)):
        np.save(out / f"train-{shard_idx:03d}.npy", tokens[start : start + SHARD_TOKENS], allow_pickle=False)
    held_tokens = _encode(tokenizer, [document.text for document in kept])
    np.save(out / "held_out.npy", held_tokens, allow_pickle=False)
    functions = [function for document in kept for function in held_out_functions(document)]
    random.Random(seed).shuffle(functions)
    _write(out / "held_out_functions.json", [vars(function) for function in functions[:2000]])
    sources = [
        {"name": p.name, "version": p.version, "licence": p.licence, "files": num_files[p.name], "bytes": num_bytes[p.name],
         "held_out": p.name in names}
        for p in projects if num_files[p.name]
    ]  # fmt: skip
    counts = {
        "num_train_tokens": len(tokens),
        "num_train_bytes": sum(len(text.encode()) for text in train),
        "num_held_out_tokens": len(held_tokens),
        "num_held_out_bytes": sum(len(document.text.encode()) for document in kept),
        "num_held_out_functions": len(functions),
        "vocab_size": tokenizer.get_vocab_size(),
    }
    _write(out / "sources.json", {**counts, "refused": list(refused), "sources": sources})
    return counts


def held_out_functions(document: Document) -> Iterator[HeldOutFunction]:
    """Functions and methods of 4 to 40 lines, moved to the left margin, with a body behind the prompt."""
    lines = document.text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = list(ast.walk(ast.parse(document.text)))
        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            first = node.body[0]
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            prompt_lines = (first.end_lineno if has_docstring and first.end_lineno else first.lineno) - node.lineno + 1
            own = source.split("\n")
            prompt = "\n".join(own[:prompt_lines]) + "\n"
            if not 4 <= len(own) <= 40 or len(own) - prompt_lines < 2 or not source.startswith("def ") or len(prompt) > 800:
                continue
            try:
                ast.parse(source)
            except SyntaxError:  # a string that is not indented lost its place
                continue
            yield HeldOutFunction(document.project, prompt, source + "\n")


def _tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    sample, num_chars = [], 0
    for text in texts:
        sample.append(text)
        num_chars += len(text)
        if num_chars > _TOKENIZER_SAMPLE_CHARS:
            break
    return train_tokenizer(sample, vocab_size)


def _encode(tokenizer: Any, texts: Sequence[str]) -> NDArray[np.uint16]:
    """All texts one after another, each behind an end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[NDArray[np.uint16]] = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch_fast(list(texts[start : start + 512])):
            pieces.append(np.array([end, *encoding.ids], dtype=np.uint16))
    return np.concatenate(pieces)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
