"""Token ids on the device, and the rows that a step draws from them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import opened, read_text
from kog_dist.late_numpy import Array
from kog_dist.records import dataclass


@dataclass(frozen=True)
class TokenSet:
    """What `prepare` wrote: token ids (count,) int32 on the device. `functions`: single functions, if it was asked for them."""

    train: Tensor
    held_out: Tensor
    functions: Tensor | None = None

    @cached_property
    def function_starts(self) -> Tensor:
        """Where each function begins, behind its end-of-text token: (count,) on the CPU. Raises ConfigError without any."""
        if self.functions is None:
            raise ConfigError("the data holds no functions-*.npy; run `prepare --functions`, or leave --function-share at 0")
        return (self.functions == self.functions[0]).nonzero()[:, 0].cpu() + 1

    @classmethod
    def load(cls, folder: Path, row_time: int, device: torch.device) -> TokenSet:
        """Read the shards of a folder. Raises ConfigError if there are none, or too few tokens for a row."""
        train = _load_tokens(sorted(folder.glob("train-*.npy")), row_time, device)
        functions = sorted(folder.glob("functions-*.npy"))
        held_out = _load_tokens([folder / "held_out.npy"], row_time, device)
        return cls(train, held_out, _load_tokens(functions, row_time, device) if functions else None)

    def check_fits(self, vocab_size: int) -> None:
        """Raise ConfigError if there are token ids that a model of this vocabulary does not know."""
        highest = max(int(self.train.max()), int(self.held_out.max()))
        if highest >= vocab_size:
            raise ConfigError(
                f"there is a token id {highest}, but the model has a vocabulary of {vocab_size}; "
                f"prepare with --vocab-size {vocab_size}"
            )

    def drawn(self, num_rows: int, row_time: int, seed: int, step_idx: int, num_function_rows: int = 0) -> Tensor:
        """Random rows of the training tokens, (num_rows, row_time + 1) int64: the same ones for equal seed and step.

        The last `num_function_rows` are of `functions`, each from the beginning of one.
        """
        draw = np.random.default_rng((seed, step_idx))
        starts = torch.from_numpy(draw.integers(0, len(self.train) - row_time, num_rows - num_function_rows))
        rows = _rows(self.train, starts, row_time)
        if num_function_rows == 0:
            return rows
        begins = self.function_starts
        assert self.functions is not None
        num_begins = int(torch.searchsorted(begins, len(self.functions) - row_time))  # with a row of tokens behind them
        chosen = torch.from_numpy(draw.integers(0, num_begins, num_function_rows))
        return torch.cat((rows, _rows(self.functions, begins[chosen], row_time)))

    def spaced(self, num_rows: int, row_time: int) -> Tensor:
        """Evenly spaced rows of the held-out tokens, (num_rows, row_time + 1) int64."""
        last = len(self.held_out) - row_time - 1
        return _rows(self.held_out, torch.linspace(0, last, num_rows, dtype=torch.float64).long(), row_time)


def held_out_bytes_per_token(folder: Path) -> float:
    """Bytes of held-out source per token, from `sources.json`. Raises ConfigError if that file is missing or says nothing."""
    try:
        counts = json.loads(read_text(folder / "sources.json"))
        return float(counts["num_held_out_bytes"]) / float(counts["num_held_out_tokens"])
    except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(f"{folder / 'sources.json'} does not tell the held-out bytes and tokens: {error!r}") from None


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of source."""
    return loss / math.log(2) / bytes_per_token


def load_shard(file: Path) -> Array:
    """The tokens of one file. Raises OSError, ValueError."""
    with opened(file) as stream:
        tokens: Array = np.load(stream, allow_pickle=False)
        return tokens


def _load_tokens(files: Sequence[Path], row_time: int, device: torch.device) -> Tensor:
    try:
        shards = [load_shard(file) for file in files]
        if not shards:
            raise FileNotFoundError("there are no train-*.npy")
    except (OSError, ValueError) as error:
        raise ConfigError(f"token shards cannot be read: {error}; run `python -m kog_dist.train prepare` first") from None
    num_tokens = sum(len(shard) for shard in shards)
    if num_tokens <= row_time + 1:
        raise ConfigError(f"{num_tokens} tokens are too few for rows of {row_time}; prepare more source or lower --time")
    return torch.from_numpy(np.concatenate(shards).astype(np.int32)).to(device)


def _rows(tokens: Tensor, starts: Tensor, row_time: int) -> Tensor:
    offsets = torch.arange(row_time + 1, device=tokens.device)
    return tokens[starts.to(tokens.device)[:, None] + offsets].long()
