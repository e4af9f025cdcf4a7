"""`prepare`: from projects to token shards, a tokenizer, held-out functions and the record of sources."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as LibraryTokenizer

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import opened, read_text
from kog_dist.train.bpe import train_tokenizer
from kog_dist.train.cleaning import END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, SPECIAL_TOKENS
from kog_dist.train.corpus import Document, Project, Tally, documents
from kog_dist.train.fill_in_middle import rearrange
from kog_dist.train.held_out import HeldOutFunction, held_out_functions, save_functions

SHARD_TOKENS = 2**24
_TOKENIZER_SAMPLE_CHARS = 80_000_000
_HELD_OUT_SHARE = 16  # one project in 16 is held out unless named
_MAX_PLAIN_FUNCTIONS, _MAX_TESTED_FUNCTIONS = 2000, 500
_ENCODED_AT_ONCE = 512


def prepare(
    projects: Sequence[Project],
    refused: Mapping[str, str],
    out: Path,
    *,
    held_out: Sequence[str] = (),
    vocab_size: int = 4096,
    seed: int = 0,
    max_project_bytes: int = 24_000_000,
    num_processes: int = 2,
    tokenizer_file: Path | None = None,
    fim_rate: float = 0.0,
    with_functions: bool = False,
) -> dict[str, Any]:
    """Write `train-*.npy`, `held_out.npy` (uint16), `tokenizer.json`, `held_out_functions.json`, `sources.json`; returns counts.

    with_functions: also write `functions-*.npy`, the different functions of 4 to 40 lines of the training files in random order,
    each on its own behind an end-of-text token: what `run --function-share` ends with.

    held_out: names of projects that are kept from training; by default one in 16 by the hash of the name. They come first: of
    near duplicates on both sides of the split, the training side's are dropped. fim_rate: see `fill_in_middle.rearrange`;
    held-out tokens are never rearranged. Equal input gives equal files, and `digest` says that they are equal.
    Raises ConfigError if either side of the split is empty, or a rate or tokenizer does not fit.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not 0 <= fim_rate <= 1:
        raise ConfigError(f"--fim-rate must be from 0 to 1, got {fim_rate}")
    names = _held_out_names(projects, held_out)
    ordered = sorted(projects, key=lambda project: (project.name not in names, project.name))
    train: list[str] = []
    kept: list[Document] = []
    trained_functions: dict[bytes, str | None] = {}
    tallies: dict[str, Tally] = {}
    for document in documents(ordered, tallies, max_project_bytes=max_project_bytes, num_processes=num_processes):
        if document.project in names:
            kept.append(document)
        else:
            train.append(document.text)
            trained_functions.update(document.functions)
    if not train or not kept:
        raise ConfigError(
            f"{len(train)} files to train on and {len(kept)} held out; both must be some: name projects to hold out"
        )
    random.Random(seed).shuffle(train)
    tokenizer = _tokenizer(train, vocab_size, tokenizer_file, fim=fim_rate > 0)
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = _encode(tokenizer, train, fim_rate, seed)
    _save_shards(out, "train", tokens)
    alone = _encode(tokenizer, _standalone_texts(trained_functions, seed) if with_functions else (), 0.0, seed)
    _save_shards(out, "functions", alone)
    held_texts = [document.text for document in kept]
    held_tokens = _encode(tokenizer, held_texts, 0.0, seed)
    np.save(out / "held_out.npy", held_tokens, allow_pickle=False)
    functions = _functions(kept, trained_functions.keys(), seed, num_processes)
    save_functions(out / "held_out_functions.json", functions)
    counts = {
        "digest": _digest(out),
        "num_train_tokens": len(tokens),
        "num_train_bytes": _num_bytes(train),
        "train_bytes_per_token": round(_num_bytes(train) / len(tokens), 5),
        "num_function_tokens": len(alone),
        "num_held_out_tokens": len(held_tokens),
        "num_held_out_bytes": _num_bytes(held_texts),
        "held_out_bytes_per_token": round(_num_bytes(held_texts) / len(held_tokens), 5),
        "num_held_out_functions": len(functions),
        "num_tested_functions": sum(function.tests is not None for function in functions),
        "vocab_size": tokenizer.get_vocab_size(),
        "fim_rate": fim_rate,
    }
    record = {**counts, "refused": refused, "sources": _source_records(ordered, tallies, names)}
    (out / "sources.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return counts


def _held_out_names(projects: Sequence[Project], named: Sequence[str]) -> set[str]:
    unknown = set(named) - {project.name for project in projects}
    if unknown:
        raise ConfigError(f"no permissively licensed source of {', '.join(sorted(unknown))}, which should be held out")
    if named:
        return set(named)
    return {p.name for p in projects if int(hashlib.sha256(p.name.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0}


def _source_records(projects: Sequence[Project], tallies: Mapping[str, Tally], held_out: set[str]) -> list[dict[str, object]]:
    """One entry per project that gave files, by name: licence, what says so, what was kept and why the rest was not."""
    return [
        {
            "name": project.name,
            "version": project.version,
            "licence": project.licence,
            "evidence": project.evidence,
            "files": tallies[project.name].num_kept,
            "bytes": tallies[project.name].num_bytes,
            "dropped": dict(sorted(tallies[project.name].dropped.items())),
            "held_out": project.name in held_out,
        }
        for project in sorted(projects, key=lambda project: project.name)
        if tallies[project.name].num_kept
    ]


def _standalone_texts(functions: Mapping[bytes, str | None], seed: int) -> list[str]:
    """The functions' texts in random order, which does not depend on the order of `functions`."""
    texts = [text for _, text in sorted(functions.items()) if text is not None]
    random.Random(seed).shuffle(texts)
    return texts


def _functions(kept: Sequence[Document], trained: Set[bytes], seed: int, num_processes: int) -> list[HeldOutFunction]:
    """Up to 2,000 functions in random order, then those with unit tests that were not among them."""
    own = partial(_functions_of, trained=frozenset({digest for document in kept for digest in document.functions} & trained))
    with ProcessPoolExecutor(num_processes) if num_processes > 1 else nullcontext() as pool:
        per_document = pool.map(own, kept, chunksize=4) if pool else map(own, kept)
        functions = list({function.source: function for found in per_document for function in found}.values())
    random.Random(seed).shuffle(functions)
    plain, rest = functions[:_MAX_PLAIN_FUNCTIONS], functions[_MAX_PLAIN_FUNCTIONS:]
    return plain + [function for function in rest if function.tests is not None][:_MAX_TESTED_FUNCTIONS]


def _functions_of(document: Document, trained: frozenset[bytes]) -> list[HeldOutFunction]:
    return list(held_out_functions(document, trained, with_tests=True))


def _tokenizer(texts: Sequence[str], vocab_size: int, file: Path | None, *, fim: bool) -> Any:
    special_tokens = SPECIAL_TOKENS if fim else SPECIAL_TOKENS[:1]
    if file is not None:
        tokenizer = LibraryTokenizer.from_str(read_text(file))
        missing = [token for token in special_tokens if tokenizer.token_to_id(token) is None]
        if missing:
            raise ConfigError(f"{file} has no {', '.join(missing)}; train a tokenizer with the same --fim-rate")
        return tokenizer
    sample, num_chars = [], 0
    for text in texts:
        sample.append(text)
        num_chars += len(text)
        if num_chars > _TOKENIZER_SAMPLE_CHARS:
            break
    return train_tokenizer(sample, vocab_size, special_tokens)


def _encode(tokenizer: Any, texts: Iterable[str], fim_rate: float, seed: int) -> NDArray[np.uint16]:
    """All texts one after another, each (and each rearranged part) behind an end-of-text token."""
    draw = random.Random(seed)
    pieces: list[str] = []  # what is encoded on its own
    marks: list[str] = []  # the special token in front of each piece
    for text in texts:
        for part in rearrange(text, fim_rate, draw) if fim_rate else [text]:
            if isinstance(part, str):
                pieces.append(part)
                marks.append(END_OF_TEXT)
            else:
                pieces += ["", *part]
                marks += [END_OF_TEXT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE]
    ids = {mark: tokenizer.token_to_id(mark) for mark in set(marks)}
    encoded: list[NDArray[np.uint16]] = []
    for start in range(0, len(pieces), _ENCODED_AT_ONCE):
        several = slice(start, start + _ENCODED_AT_ONCE)
        for mark, encoding in zip(marks[several], tokenizer.encode_batch_fast(pieces[several]), strict=True):
            encoded.append(np.array([ids[mark], *encoding.ids], dtype=np.uint16))
    return np.concatenate([np.empty(0, np.uint16), *encoded])


def _save_shards(out: Path, stem: str, tokens: NDArray[np.uint16]) -> None:
    """Replace the shards of that name; no shard for no tokens."""
    for old in out.glob(f"{stem}-*.npy"):
        old.unlink()
    for shard_idx, start in enumerate(range(0, len(tokens), SHARD_TOKENS)):
        np.save(out / f"{stem}-{shard_idx:03d}.npy", tokens[start : start + SHARD_TOKENS], allow_pickle=False)


def _digest(out: Path) -> str:
    """SHA-256 over the files of the data set: equal exactly for equal tokens, tokenizer and held-out functions."""
    shards = [file for stem in ("train", "functions") for file in sorted(out.glob(f"{stem}-*.npy"))]
    files = [*shards, out / "held_out.npy", out / "tokenizer.json", out / "held_out_functions.json"]
    hasher = hashlib.sha256()
    for file in files:
        with opened(file) as stream:
            hasher.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return hasher.hexdigest()


def _num_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)
