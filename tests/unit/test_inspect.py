"""Words of a kernel are decoded as it writes them, compared with the interpreter, and the first wrong phase is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.kernel.inspect import LIMITS, Expected, compare, first_suspicious, limited, limited_weights, table
from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.sampling import sample
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.published import Published, pair_values

SPEC = ModelSpec(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=90, max_context=64, num_lanes=2,
    delay=1, sliding_window=8, window_layers=(0, 2),
)  # fmt: skip
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]
EPOCH = 70_123  # tags wrap
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def pair_words(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], tag: int) -> Words:
    """`make_pair_word` of words.cuh."""
    bits = (values.astype(np.float32).view(np.uint32) + np.uint32(0x80)) & np.uint32(0xFFFFFF00)
    low, high = bits[0::2] | np.uint32(tag & 0xFF), bits[1::2] | np.uint32(tag >> 8)
    return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)


def value_words(payloads: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], tag: int) -> Words:
    return np.uint64(tag) << np.uint64(32) | payloads.astype(np.uint64)


def test_pair_words_round_trip() -> None:
    values = np.random.default_rng(1).standard_normal(64).astype(np.float32) * np.float32(1e3)
    found, tags = pair_values(pair_words(values, 0xBEEF))
    assert (tags == 0xBEEF).all()
    assert np.abs(found / values - 1).max() < 2**-16
    assert (found != values).any()


class MadeUp:
    """The words that a right kernel would leave, made of what the interpreter has."""

    def __init__(self, folder: Path, spec: ModelSpec, num_layers: int, *, num_partitions: int = 1) -> None:
        write_checkpoint(folder, spec, random_tensors(spec, 2), manifest=False)
        weights = limited_weights(open_checkpoint(folder).rank_weights(range(spec.num_lanes)), num_layers)
        self.spec = limited(spec, num_layers)
        self.shape = TrialShape(self.spec, range(spec.num_lanes), copies=2, splits=8, partition_batches=1)
        assert self.shape.cache.num_partitions == num_partitions
        self.expected = Expected(self.spec, weights, IDS, "bfloat16")
        self.words = np.zeros(self.shape.words.num_words, np.uint64)
        self.tag = (EPOCH * (num_layers + 1) + num_layers) & 0xFFFF
        self.offset = 0
        self._write()

    def _write(self) -> None:
        """In the order of the header's offsets."""
        lanes, expected = range(self.spec.num_lanes), self.expected
        streams = lanes[: self.shape.num_streams]
        for source, sources in ((expected.stream, streams), (expected.middle, streams), (expected.activation, lanes)):
            self._put([pair_words(source(lane), self.tag) for lane in sources for _ in range(2)])
        self._put([pair_words(expected.qkv(lane), self.tag) for lane in lanes])
        self.offset = self.place("Attended")
        self._put([pair_words(expected.attended(lane), self.tag) for lane in lanes for _ in range(2)])
        candidates = np.zeros((self.shape.num_ctas, 2), np.uint32)
        candidates[:, 0] = np.float32(-np.inf).view(np.uint32)
        best = sample(expected.logits, len(IDS) - 1, SamplingParams())
        candidates[best % self.shape.num_ctas] = expected.logits[best].astype(np.float32).view(np.uint32), best
        self._put([value_words(candidates.reshape(-1), EPOCH + 1)] * 2)
        boxes = self.shape.words.boxes  # of the build with processors come last
        assert self.offset + 2 * boxes.choice_words + boxes.report_words == len(self.words)

    def _put(self, copies: list[Words]) -> None:
        stride = -(-len(copies[0]) // 16) * 16
        for words in copies:
            self.words[self.offset : self.offset + len(words)] = words
            self.offset += stride

    def place(self, name: str) -> int:
        return Published(self.shape, self.words, EPOCH)._constants[f"k{name}Offset"]

    def report(self) -> str:
        findings = compare(Published(self.shape, self.words, EPOCH), self.expected.logits, self.expected, "bfloat16")
        return table(findings, self.spec.num_layers - 1, LIMITS["bfloat16"])


VARIANTS = {
    "delayed": (SPEC, 4),
    "blocking": (SPEC, 1),
    "local": (replace(SPEC, mlp_comm=False), 3),
    "one lane": (replace(SPEC, num_lanes=1, delay=0), 2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_right_words_are_right(tmp_path: Path, variant: str) -> None:
    made = MadeUp(tmp_path, *VARIANTS[variant])
    findings = compare(Published(made.shape, made.words, EPOCH), made.expected.logits, made.expected, "bfloat16")
    assert [f.phase for f in findings if f.lane <= 0] == ["qkv", "attend", "out", "gate_up", "down", "head", "sample"]
    assert max(finding.error for finding in findings) < 1e-4
    assert first_suspicious(findings, LIMITS["bfloat16"]) is None
    assert made.report().endswith("all below 0.01")


def test_parts_are_read_by_partition(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, replace(SPEC, max_context=300), 4, num_partitions=3)
    shape, rng = made.shape, np.random.default_rng(4)
    num_rows = SPEC.lane_heads * shape.splits
    values, sums = (rng.standard_normal((3, count), np.float32) for count in (num_rows * SPEC.head_dim, num_rows))
    made.offset = made.place("Part") + -(-3 * values.shape[1] // 2 // 16) * 16  # of lane 1
    made._put([pair_words(values.reshape(-1), made.tag)])
    made.offset = made.place("LogSum") + 3 * shape.words.log_sums
    made._put([np.resize(value_words(row.view(np.uint32), made.tag), shape.words.log_sums) for row in sums])
    for partition in range(3):
        outputs, log_sums = Published(shape, made.words, EPOCH).parts(1, partition)
        assert outputs.num_wrong_tags == log_sums.num_wrong_tags == 0
        assert np.allclose(outputs.values, values[partition], rtol=1e-4)
        assert np.array_equal(log_sums.values, sums[partition])
    assert Published(shape, made.words, EPOCH).parts(0, 0)[0].num_wrong_tags > 0, "nobody published them"


def flip(made: MadeUp, name: str, word: int, bits: int) -> None:
    made.words[made.place(name) + word] ^= np.uint64(bits)


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda made: flip(made, "Activation", 2 * 16 * 2 - 16, 1 << 31), "gate_up"),
        (lambda made: flip(made, "Qkv", 5, 1 << 30), "qkv, lane 0"),
        (lambda made: flip(made, "Attended", 5, 1 << 30), "attend, lane 0"),
        (lambda made: flip(made, "Middle", 3, 1 << 2), "out, lane 0"),
        (lambda made: flip(made, "Stream", 32 * 3 + 7, 1 << 20), "down, lane 1"),
        (lambda made: flip(made, "Candidate", 0, 1 << 33), "sample"),
    ],
    ids=["activation", "qkv", "attended", "tag", "replica", "candidate"],
)
def test_the_first_wrong_phase_is_named(tmp_path: Path, damage: Callable[[MadeUp], None], wanted: str) -> None:
    made = MadeUp(tmp_path, SPEC, 4)
    damage(made)
    report = made.report()
    assert f"first suspicious: {wanted}" in report, report
    assert report.count("!") == 1
    assert ("1 words with another tag" in report) == (wanted in ("out, lane 0", "sample"))


def test_the_layer_limit_is_a_smaller_model() -> None:
    spec = limited(SPEC, 2)
    assert (spec.num_layers, spec.window_layers) == (2, (0,))
    assert limited(SPEC, 4) == SPEC
