"""Many texts continued at once, with a KV cache: what `evaluate` needs to judge hundreds of completions in a minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.records import dataclass
from kog_dist.train.cleaning import END_OF_TEXT

IsOver = Callable[[int, str], bool]  # (row, last line so far with the newline in front of it) -> whether the text ends before it


@dataclass(frozen=True)
class Continuation:
    """What was written behind a prompt. `ended`: by the end-of-text token or `is_over`, not by the limit."""

    text: str
    ended: bool


def continue_texts(
    module: Laneformer,
    tokenizer: Any,
    prompts: Sequence[str],
    is_over: IsOver,
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    batch: int = 256,
) -> list[Continuation]:
    """Sample behind each prompt, `batch` of them at a time.

    The n-th token of a row is drawn with the n-th of the row's own random numbers, whatever the other rows do: device and batch
    change it only where probabilities differ in their last bits.
    """
    numbers = torch.rand(len(prompts), max_new_tokens, generator=torch.Generator().manual_seed(seed)).to(module.cos.device)
    found: list[Continuation] = []
    for first in range(0, len(prompts), batch):
        rows = [tokenizer.encode(prompt).ids for prompt in prompts[first : first + batch]]

        def is_row_over(row: int, line: str, first: int = first) -> bool:
            return is_over(first + row, line)

        found += _continue_rows(module, tokenizer, rows, is_row_over, temperature, numbers[first : first + batch])
    return found


@torch.no_grad()
def _continue_rows(
    module: Laneformer, tokenizer: Any, rows: list[list[int]], is_over: IsOver, temperature: float, numbers: Tensor
) -> list[Continuation]:
    """All rows advance together, so that a shorter prompt just starts to generate earlier. numbers: (rows, max_new_tokens)."""
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    sizes = [len(row) for row in rows]
    device, max_new_tokens = numbers.device, numbers.shape[1]
    last_lines, ended = ["\n"] * len(rows), [False] * len(rows)
    pieces: dict[int, str] = {}  # text by token id
    active = list(range(len(rows)))
    cache = KvCache()
    position = min(sizes)
    token_ids = torch.tensor([row[:position] for row in rows], device=device)
    while active:
        logits = module(token_ids, cache)[:, -1]
        places = torch.tensor([[row, max(0, position - sizes[row])] for row in active], device=device)
        drawn = draw_tokens(logits, temperature, numbers[places[:, 0], places[:, 1]]).tolist()
        for row, token_id in zip(active, drawn, strict=True):
            if len(rows[row]) > position:  # still inside the prompt
                continue
            rows[row].append(token_id)
            if token_id not in pieces:
                pieces[token_id] = tokenizer.decode([token_id])
            line = last_lines[row] + pieces[token_id]
            ended[row] = token_id == end_id or is_over(row, line)
            last_lines[row] = line[line.rfind("\n") :]
        position += 1
        kept = [slot for slot, row in enumerate(active) if not ended[row] and len(rows[row]) < sizes[row] + max_new_tokens]
        if len(kept) < len(active):
            cache.keep_rows(torch.tensor(kept, device=device, dtype=torch.long))
            active = [active[slot] for slot in kept]
        token_ids = torch.tensor([[rows[row][position - 1]] for row in active], device=device)
    return [Continuation(tokenizer.decode(row[size:]), done) for row, size, done in zip(rows, sizes, ended, strict=True)]


def draw_tokens(logits: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """One token per row of `logits` (rows, vocab) by inverting the distribution at `numbers` (rows,) in [0, 1); 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulated = torch.softmax(logits.float() / temperature, -1).cumsum(-1)
    return torch.searchsorted(cumulated, numbers[:, None] * cumulated[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
