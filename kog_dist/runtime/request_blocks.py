"""The blocks of the control page in which the coordinator hands requests to ranks.

Their layout is REQUEST_BLOCK of kog_dist/runtime/abi.py. Behind the struct of a block lie the prompt, the LogitBias array, the
KvCopy array and the prediction. A block carries a checksum over all of them.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from kog_dist.decode.request import DecodeRequest, KvCopy, KvCopyKind, KvUse
from kog_dist.errors import ProtocolError, RequestError
from kog_dist.late_numpy import np
from kog_dist.runtime.abi import KV_COPY, LOGIT_BIAS, MAX_STOP_IDS, MOST_PARALLEL, PLAIN_PARAMS, REQUEST_BLOCK
from kog_dist.runtime.memfd import Segment, round_up
from kog_dist.sampling_params import MAX_LOGIT_BIAS, SamplingParams

NUM_BLOCKS: Final = 2
MAX_KV_COPIES: Final = 8192
_IGNORE_EOS, _LOGIT_DIGESTS, _ONLY_COPIES, _DRAFTS = 1, 2, 4, 8
_U32, _U64 = 2**32, 2**64
_PACKER: Final = REQUEST_BLOCK.packer
_CHECK = slice(REQUEST_BLOCK.offsets["check"], REQUEST_BLOCK.offsets["check"] + 8)
_CHECK_WORD: Final = struct.Struct("<Q")
_NAMES: Final = tuple(field.name for field in REQUEST_BLOCK.fields)


def block_bytes(max_context: int) -> int:
    """Bytes from one block to the next."""
    return round_up(_prediction_offset(max_context) + 4 * max_context)


def _bias_offset(max_context: int) -> int:
    """Bytes from a request block to its LogitBias array: behind the room for the longest prompt."""
    return round_up(REQUEST_BLOCK.size_bytes + 4 * max_context, 8)


def _copy_offset(max_context: int) -> int:
    """The same to its KvCopy array."""
    return round_up(_bias_offset(max_context) + MAX_LOGIT_BIAS * LOGIT_BIAS.size_bytes, 8)


def _prediction_offset(max_context: int) -> int:
    """The same to the prediction."""
    return _copy_offset(max_context) + MAX_KV_COPIES * KV_COPY.size_bytes


class RequestBlocks:
    """One process's view of the blocks, which are used in turn."""

    def __init__(self, segment: Segment, offset: int, stride: int, max_context: int) -> None:
        self._segment, self._offset, self._stride, self._max_context = segment, offset, stride, max_context

    def write(self, seq: int, request: DecodeRequest) -> None:
        """Fill the block of request `seq`. Raises RequestError for values that the block cannot hold. Writer: coordinator."""
        _check_fits(request, self._max_context)
        sampling, kv = request.sampling, request.kv
        values = {name: getattr(sampling, name) for name in PLAIN_PARAMS} | {
            "seq": seq, "check": 0, "num_prompt": len(request.prompt), "max_tokens": request.max_tokens,
            "flags": _IGNORE_EOS * request.ignore_eos | _LOGIT_DIGESTS * request.logit_digests
            | _ONLY_COPIES * request.only_copies | _DRAFTS * request.drafts,
            "num_stop_ids": len(request.stop_ids), "stop_ids": array("I", request.stop_ids).tobytes(),
            "decode_slot": request.decode_slot, "kv_cache": kv.cache, "kv_source": kv.source,
            "num_cached": kv.num_cached, "num_kv_copies": len(kv.copies),
            "num_logit_bias": len(sampling.logit_bias), "logprobs": 0 if sampling.logprobs is None else sampling.logprobs + 1,
            "mask_epoch": request.mask_epoch, "num_prediction": len(request.prediction),
        }  # fmt: skip
        raw, prompt = bytearray(_PACKER.pack(*map(values.__getitem__, _NAMES))), array("I", request.prompt).tobytes()
        biases = np.array(list(sampling.logit_bias), LOGIT_BIAS.dtype).tobytes() if sampling.logit_bias else b""
        copies = array("I", chain.from_iterable((*copy, 0) for copy in kv.copies)).tobytes()
        prediction = array("I", request.prediction).tobytes()
        raw[_CHECK] = _CHECK_WORD.pack(_check(raw, prompt, biases, copies, prediction))
        start, max_context = self._offset + seq % NUM_BLOCKS * self._stride, self._max_context
        places = (
            0,
            REQUEST_BLOCK.size_bytes,
            _bias_offset(max_context),
            _copy_offset(max_context),
            _prediction_offset(max_context),
        )
        for offset, part in zip(places, (bytes(raw), prompt, biases, copies, prediction), strict=True):
            self._segment.buffer[start + offset : start + offset + len(part)] = part

    def read(self, seq: int) -> DecodeRequest:
        """Request `seq`, complete or not at all: ProtocolError when the block is damaged or already holds another request."""
        start = self._offset + seq % NUM_BLOCKS * self._stride

        def copy(offset: int, size_bytes: int) -> bytes:  # what is checked is what is used
            return self._segment.buffer[start + offset : start + offset + size_bytes]

        raw = bytearray(copy(0, REQUEST_BLOCK.size_bytes))
        block = dict(zip(_NAMES, _PACKER.unpack(raw), strict=True))
        num_prompt, num_biases, num_copies = block["num_prompt"], block["num_logit_bias"], block["num_kv_copies"]
        prompt = copy(REQUEST_BLOCK.size_bytes, 4 * min(num_prompt, self._max_context))
        biases = copy(_bias_offset(self._max_context), LOGIT_BIAS.size_bytes * min(num_biases, MAX_LOGIT_BIAS))
        copies = copy(_copy_offset(self._max_context), KV_COPY.size_bytes * min(num_copies, MAX_KV_COPIES))
        num_prediction = block["num_prediction"]
        prediction = copy(_prediction_offset(self._max_context), 4 * min(num_prediction, self._max_context))
        raw[_CHECK] = bytes(8)
        is_whole = len(prompt) == 4 * num_prompt and len(biases) == LOGIT_BIAS.size_bytes * num_biases
        is_whole = is_whole and len(copies) == KV_COPY.size_bytes * num_copies and len(prediction) == 4 * num_prediction
        if block["seq"] != seq or block["check"] != _check(raw, prompt, biases, copies, prediction) or not is_whole:
            raise ProtocolError(f"request {seq} was not complete in its block, which holds request {block['seq']}")
        return DecodeRequest(
            prompt=array("I", prompt),
            max_tokens=block["max_tokens"],
            sampling=_sampling(block, biases),
            stop_ids=tuple(array("I", block["stop_ids"][: 4 * block["num_stop_ids"]])),
            ignore_eos=bool(block["flags"] & _IGNORE_EOS),
            logit_digests=bool(block["flags"] & _LOGIT_DIGESTS),
            kv=KvUse(block["kv_cache"], block["kv_source"], block["num_cached"], _copies(copies)),
            mask_epoch=block["mask_epoch"],
            only_copies=bool(block["flags"] & _ONLY_COPIES),
            drafts=bool(block["flags"] & _DRAFTS),
            prediction=array("I", prediction),
            decode_slot=block["decode_slot"],
        )


def _check(*parts: bytes | bytearray) -> int:
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return check


def _copies(raw: bytes) -> tuple[KvCopy, ...]:
    words = array("I", raw)
    return tuple(KvCopy(KvCopyKind(words[i]), words[i + 1], words[i + 2]) for i in range(0, len(words), 4))


def _sampling(block: Mapping[str, Any], biases: bytes) -> SamplingParams:
    values = {name: block[name] for name in PLAIN_PARAMS}
    if block["logprobs"]:
        values["logprobs"] = block["logprobs"] - 1
    if biases:
        values["logit_bias"] = tuple(np.frombuffer(biases, LOGIT_BIAS.dtype).tolist())
    return SamplingParams(**values)


def _check_fits(request: DecodeRequest, max_context: int) -> None:
    """Raises RequestError `invalid_request` for what the block could not hold."""
    finding = ""
    if not 1 <= len(request.prompt) <= max_context:
        finding = f"the prompt has {len(request.prompt)} tokens, expected 1 to {max_context}"
    elif not 1 <= request.max_tokens < _U32:
        finding = f"max_tokens is {request.max_tokens}, expected at least 1"
    elif len(request.stop_ids) > MAX_STOP_IDS:
        finding = f"there are {len(request.stop_ids)} stop ids, expected at most {MAX_STOP_IDS}"
    elif not all(0 <= token_id < _U32 for token_id in request.stop_ids):
        finding = "a stop id does not fit into 32 bits"
    elif not 0 <= request.kv.num_cached < len(request.prompt):
        finding = f"{request.kv.num_cached} of the prompt's {len(request.prompt)} tokens are cached, expected fewer than all"
    elif not 0 <= request.decode_slot < MOST_PARALLEL:
        finding = f"the decode slot is {request.decode_slot}, of {MOST_PARALLEL} at most"
    elif not (0 <= request.kv.cache < _U32 and 0 <= request.kv.source < _U32):
        finding = f"the KV caches {request.kv.cache} and {request.kv.source} do not exist"
    elif len(request.prediction) > max_context:
        finding = f"the prediction has {len(request.prediction)} tokens, expected at most {max_context}"
    elif len(request.kv.copies) > MAX_KV_COPIES:
        finding = f"there are {len(request.kv.copies)} copies of blocks, expected at most {MAX_KV_COPIES}"
    elif not 0 <= request.mask_epoch < _U64:
        finding = f"mask_epoch is {request.mask_epoch}, expected 0 to 2^64 - 1"
    elif not all(0 <= token_id < _U32 for token_id, _ in request.sampling.logit_bias):
        finding = "an id of logit_bias does not fit into 32 bits"
    if finding:
        raise RequestError("invalid_request", f"cannot submit the request: {finding}")
