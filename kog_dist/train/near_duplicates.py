"""Finds texts that are nearly the same: MinHash signatures of token shingles, compared through locality-sensitive bands."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

Signature = NDArray[np.uint32]  # (128,)

_NUM_HASHES, _BAND_ROWS = (
    128,
    8,
)  # 16 bands: a pair of similarity 0.8 shares one with 95 %, of 0.6 with 24 % (and is then refused)
_SHINGLE_TOKENS = 5
_TOKEN = re.compile(r"\w+|[^\w\s]")
_NUM_SHINGLES_AT_ONCE = 4096
_RNG = np.random.default_rng(20260101)
_FACTORS = _RNG.integers(1, 2**63, _NUM_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _RNG.integers(0, 2**63, _NUM_HASHES, dtype=np.uint64)
_MIXERS = _RNG.integers(1, 2**63, _SHINGLE_TOKENS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def signature(text: str) -> Signature:
    """MinHash of the set of runs of five tokens (words and punctuation, layout ignored); equal for equal text, everywhere."""
    tokens = _TOKEN.findall(text)
    codes = {token: zlib.crc32(token.encode()) for token in set(tokens)}
    hashes = np.fromiter((codes[token] for token in tokens), np.uint64, len(tokens))
    if len(hashes) < _SHINGLE_TOKENS:
        hashes = np.pad(hashes, (0, _SHINGLE_TOKENS - len(hashes)))
    num_shingles = len(hashes) - _SHINGLE_TOKENS + 1
    shingles = np.zeros(num_shingles, np.uint64)
    for place, mixer in enumerate(_MIXERS):
        shingles += hashes[place : place + num_shingles] * mixer
        shingles ^= shingles >> np.uint64(29)
    shingles = np.unique(shingles)
    smallest = np.full(_NUM_HASHES, 2**32 - 1, np.uint32)
    for start in range(0, len(shingles), _NUM_SHINGLES_AT_ONCE):
        part = shingles[start : start + _NUM_SHINGLES_AT_ONCE, None] * _FACTORS + _OFFSETS
        smallest = np.minimum(smallest, (part >> np.uint64(32)).astype(np.uint32).min(0))
    return smallest


class NearDuplicates:
    """The signatures of the texts kept so far."""

    def __init__(self, similarity: float = 0.8) -> None:
        """similarity: Jaccard index of the shingle sets, as estimated, from which on two texts are nearly the same."""
        self._similarity = similarity
        self._kept: list[Signature] = []
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def add(self, signature: Signature) -> bool:
        """Keep a text; False, and it is not kept, if one that was kept before is nearly the same."""
        rows = signature.reshape(-1, _BAND_ROWS)
        bands = [(band_idx, row.tobytes()) for band_idx, row in enumerate(rows)]
        candidates = {other for band in bands for other in self._bands.get(band, ())}
        if any(float((self._kept[other] == signature).mean()) >= self._similarity for other in sorted(candidates)):
            return False
        for band in bands:
            self._bands[band].append(len(self._kept))
        self._kept.append(signature)
        return True
