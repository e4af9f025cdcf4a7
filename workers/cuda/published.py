"""What thread blocks have published last, decoded on the host: after a token, words hold every phase's output of the last layer.

For debugging; the formats are those of collectives/device/words.cuh, the places those of the generated header.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.records import dataclass
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_shape import KernelShape

Words = NDArray[np.uint64]
Values = NDArray[np.float32]
_CONSTANT = re.compile(r"\b(k\w+) = (\d+)[,;]")


@dataclass(frozen=True)
class Vector:
    """A published vector: its values, how many of its words carry another tag, and whether all replicas are equal bit by bit."""

    values: Values
    num_wrong_tags: int
    replicas_agree: bool = True


def pair_values(words: Words) -> tuple[Values, NDArray[np.uint32]]:
    """The values (2n,) and tags (n,) of pair words (n,)."""
    halves = words.view(np.uint32).reshape(-1, 2)
    low_byte = halves & np.uint32(0xFF)
    return (halves & np.uint32(0xFFFFFF00)).view(np.float32).reshape(-1), low_byte[:, 0] | low_byte[:, 1] << np.uint32(8)


def value_payloads(words: Words) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The payloads (n,) and tags (n,) of value words (n,)."""
    halves = words.view(np.uint32).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


class Published:
    """The words of a kernel after the token with number `epoch`: steps since they were zeroed, from 0."""

    def __init__(self, shape: KernelShape, words: Words, epoch: int) -> None:
        self.shape, self.epoch = shape, epoch
        self._words = words
        self._constants = {name: int(value) for name, value in _CONSTANT.findall(shape_header(shape))}
        layers = shape.spec.num_layers
        self._tag = (epoch * (layers + 1) + layers) & 0xFFFF  # `layer_tag` of the last layer, in layout.cuh

    def qkv(self, lane: int) -> Vector:
        """Query, key and value rows of a hosted lane; queries and keys are turned, not scaled."""
        return self._pairs("Qkv", [lane], self.shape.spec.lane_qkv_rows)

    def attended(self, lane: int) -> Vector:
        """The output (heads * head_dim,) of the lane's heads."""
        return self._pairs("Attended", self._copies(lane), self.shape.spec.lane_heads * self.shape.spec.head_dim)

    def parts(self, lane: int, partition: int) -> tuple[Vector, Vector]:
        """Outputs (heads * splits * head_dim,) of a partition's splits, and their log-sums (heads * splits,)."""
        spec, shape = self.shape.spec, self.shape
        num_rows = spec.lane_heads * shape.splits
        outputs = self._pairs("Part", [lane], num_rows * spec.head_dim, partition * num_rows * spec.head_dim // 2)
        payloads, tags = value_payloads(self._slice("LogSum", lane, num_rows, partition * shape.words.log_sums))
        return outputs, Vector(payloads.view(np.float32), int((tags != self._tag).sum()))

    def middle(self, lane: int) -> Vector:
        """The lane's residual stream after attention."""
        return self._pairs("Middle", self._stream_copies(lane), self.shape.spec.hidden_size)

    def activation(self, lane: int) -> Vector:
        """silu(gate) * up of the lane's FFN columns, of the chosen experts and the shared one in turn, times their weights."""
        shared = 0 if self.shape.experts is None else self.shape.experts.lane_shared
        num_values = self.shape.spec.num_ffns_read * self.shape.spec.lane_ffn + shared
        return self._pairs("Activation", self._copies(lane), num_values)

    def stream(self, lane: int) -> Vector:
        """The lane's residual stream after the layer."""
        return self._pairs("Stream", self._stream_copies(lane), self.shape.spec.hidden_size)

    def best_candidate(self) -> tuple[float, int, int]:
        """Score and token id of the best candidate, ties to the lower id, and how many words carry another tag."""
        payloads, tags = value_payloads(self._slice("Candidate", 0, 2 * self.shape.num_ctas))
        scores, ids = payloads[0::2].view(np.float32), payloads[1::2]
        best = min(range(len(ids)), key=lambda cta: (-float(scores[cta]), int(ids[cta])))
        return float(scores[best]), int(ids[best]), int((tags != np.uint32(self.epoch + 1)).sum())

    def _copies(self, lane: int) -> list[int]:
        return [lane * self.shape.words.replicas + replica for replica in range(self.shape.words.replicas)]

    def _stream_copies(self, lane: int) -> list[int]:
        return self._copies(self.shape.stream_of(lane))

    def _slice(self, name: str, copy: int, num_words: int, behind: int = 0) -> Words:
        first = self._constants[f"k{name}Offset"] + copy * self._constants[f"k{name}Stride"] + behind
        return self._words[first : first + num_words]

    def _pairs(self, name: str, copies: list[int], num_values: int, behind: int = 0) -> Vector:
        all_words = [self._slice(name, copy, num_values // 2, behind) for copy in copies]
        decoded: list[tuple[Any, Any]] = [pair_values(words) for words in all_words]
        wrong = sum(int((tags != self._tag).sum()) for _, tags in decoded)
        return Vector(decoded[0][0], wrong, all(np.array_equal(words, all_words[0]) for words in all_words))
