"""How a token is chosen from logits: the definition for every engine, bit by bit. docs/sampling.md has the reasons.

bits        float32 functions that a kernel can repeat exactly: Philox noise, logarithm, fixed-point probability masses
choice      greedy and temperature: the best candidate of any slices of the vocabulary
processors  penalties, biases, top-k, top-p, min-p: which ids are allowed, and with what scores
sampler     the same applied to one request, with its memory of what was said
logprobs    what is reported about a choice
"""

from kog_dist.decode.sampling.bits import gumbel, gumbel_of, log32, masses, philox4x32, philox4x32_counters
from kog_dist.decode.sampling.choice import NO_CANDIDATE, Candidate, candidate, pick, sample
from kog_dist.decode.sampling.logprobs import token_logprobs
from kog_dist.decode.sampling.processors import adjust, in_order, select
from kog_dist.decode.sampling.sampler import Sampler

__all__ = [
    "NO_CANDIDATE",
    "Candidate",
    "Sampler",
    "adjust",
    "candidate",
    "gumbel",
    "gumbel_of",
    "in_order",
    "log32",
    "masses",
    "philox4x32",
    "philox4x32_counters",
    "pick",
    "sample",
    "select",
    "token_logprobs",
]
