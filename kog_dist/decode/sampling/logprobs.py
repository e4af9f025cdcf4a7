"""What is reported about a choice: log-probabilities of the model's own logits, before penalties, temperature and filters.

The same as OpenAI's and vLLM's default. Bits are defined here, too: with m the largest logit and S the sum of
`masses(logit - m)`, an integer that depends on no order of additions, every value is
    logprob = max((logit - m) - log(S * 2**-40), lowest float32)          (`bits.log_of_mass`; each operation float32)
It differs from the exact log-softmax by less than 2e-6 + 1e-7 * |logprob| for vocabularies of up to 2**18 ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.sampling.bits import log_of_mass, masses
from kog_dist.decode.sampling.processors import in_order
from kog_dist.late_numpy import Array


def token_logprobs(logits: Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Of `token_id` and the `num_top` best ids, equal ones by id. `logits` (vocab,) are the model's, all finite."""
    raw = logits.astype(np.float32, copy=False)
    largest = raw.max()
    with np.errstate(over="ignore"):  # to minus infinity: no mass
        total = int(masses(raw - largest).sum())
    top_ids = in_order(raw, num_top)
    return logprobs_of(largest, total, raw[token_id], top_ids, raw[top_ids])


def logprobs_of(
    largest: np.float32, total: int, chosen: np.float32, top_ids: Array, top_logits: NDArray[np.float32]
) -> TokenLogprobs:
    """From the largest logit, the sum of all masses, and the logits of the token and of the best ids."""
    with np.errstate(over="ignore"):
        distance = np.append(top_logits, chosen) - largest
    *top, of_chosen = np.maximum(distance - log_of_mass(total), np.finfo(np.float32).min).tolist()
    return TokenLogprobs(of_chosen, tuple(top_ids.tolist()), tuple(top))
