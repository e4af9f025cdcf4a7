"""Training against loops: text that repeats itself, in which the same tokens must become less likely with every round.

This is DITTO ("Learning to Break the Loop", Xu et al., arXiv 2206.02369) on stretches of token ids: a language model that sees
a line twice expects it a third time, more surely each time, and at low temperatures never leaves. Here it is shown loops and
taught that a token of a round has half the probability that it had one round before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

STRETCH = 256  # tokens: each stretch of a row begins as it was and ends as a loop of its own
_FIRST_STARTS = (32, 128)  # of the loop's first round within its stretch
_PERIODS = (1, 64)
_FALL = 0.5  # probability of a token, relative to the same one a round before
_SMALLEST = 1e-6


def with_loops(rows: Tensor, num_looped: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """`rows` (count, time + 1) with the first `num_looped` made of loops, and the place of each token a round before.

    Where nothing is repeated that is the token's own place. A round is a run of tokens that the next one of the text began
    alike, so that loops close as naturally as those of a model; where there is none its length is random.
    """
    count, size = rows.shape
    places = torch.arange(size, device=rows.device).expand(count, size)
    if num_looped == 0:
        return rows, places
    num_stretches = -(-size // STRETCH)
    shape = (num_looped, num_stretches)
    offsets, lengths = draw.integers(*_FIRST_STARTS, shape), draw.integers(*_PERIODS, shape)
    preferred = draw.random((*shape, _PERIODS[1] - _PERIODS[0]))  # of the lengths that close naturally, the highest is taken
    starts = torch.from_numpy(offsets + np.arange(num_stretches) * STRETCH).to(rows.device)
    own = rows[:num_looped]

    def tokens_at(at: Tensor) -> Tensor:
        return own.gather(1, at.clamp(max=size - 1).flatten(1)).view(at.shape)

    ahead = torch.arange(*_PERIODS, device=rows.device)
    closing = tokens_at(starts[..., None] + ahead) == tokens_at(starts)[..., None]
    chosen = (closing * torch.from_numpy(preferred).to(rows.device)).argmax(-1) + _PERIODS[0]
    periods = torch.where(closing.any(-1), chosen, torch.from_numpy(lengths).to(rows.device))

    stretch_of = torch.arange(size, device=rows.device) // STRETCH
    start, period, place = starts[:, stretch_of], periods[:, stretch_of], places[:num_looped]
    repeated = place >= start + period
    looped = own.gather(1, torch.where(repeated, start + (place - start) % period, place))
    before = torch.where(repeated, place - period, place)
    return torch.cat((looped, rows[num_looped:])), torch.cat((before, places[num_looped:]))


def loop_loss(logits: Tensor, targets: Tensor, before: Tensor) -> Tensor:
    """Mean loss in nats of `targets` (batch, time): cross entropy, and where a token repeats another one, DITTO's penalty.

    before: for each target the index of the target that it repeats, or its own one.
    """
    surprise = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
    chance = torch.exp(-surprise)
    wanted = _FALL * chance.detach().gather(1, before)
    penalty = -torch.log((1 - (chance - wanted).abs()).clamp(min=_SMALLEST))
    repeated = before != torch.arange(before.shape[1], device=before.device)
    return torch.where(repeated, penalty, surprise).mean()
