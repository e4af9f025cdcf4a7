"""What a user would write without this project: the model's decode step in plain torch, compiled, in a CUDA graph, greedy.

16-bit weights, activations and KV cache; the lanes' matrices are batched. `num_lanes` 1 with `delay` 0 is the dense twin: the
same bytes in one wide matrix for each use. Nothing here is shared with the engines.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kog_dist.bench.report import percentile
from kog_dist.model.layout import EMBEDDING, head_name, layer_prefix, norm_name, tensor_layouts
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import HeadType, ModelSpec, Sublayer

if TYPE_CHECKING:
    from torch import Tensor

TensorSource = Callable[[str], "Tensor"]  # a tensor of a checkpoint by its published name, on the device, in its final type
FORMS = ("lanes", "dense")
# How a matrix meets its vector: through the library's product, or as multiplications and a sum that the compiler fuses.
PRODUCTS: tuple[str, ...] = ("matmul", "fused")
WARM_UP_STEPS = 3


class TorchDecoder:
    """One decode step of a Laneformer. `cache_length`: positions that layers without a window keep room for.

    Calling it with the token and its position (both int64 (1,)) gives the logits (vocab,), and writes the KV cache.
    """

    def __init__(self, spec: ModelSpec, tensors: TensorSource, cache_length: int, product: str = "matmul") -> None:
        import torch

        self.spec, self.product = spec, product
        self.embedding = tensors(EMBEDDING)
        self.head = self.embedding if spec.tied_embeddings else tensors(head_name(spec))
        self.final_norm = tensors(norm_name(spec, "model.norm"))
        self.layers = [self._layer(tensors, layer_prefix(i)) for i in range(spec.num_layers)]
        self.modes = [
            spec.reduce_mode(i, sublayer).value for i in range(spec.num_layers) for sublayer in Sublayer
        ]  # by sublayer of the stack
        device, dtype = self.embedding.device, self.embedding.dtype
        cos, sin = rope_table(spec, spec.max_context)
        self.cos, self.sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
        lengths = [min(spec.window(i) or cache_length, cache_length) for i in range(spec.num_layers)]
        heads = spec.num_lanes * spec.lane_kv_heads
        self.caches = [torch.zeros(2, heads, length, spec.head_dim, device=device, dtype=dtype) for length in lengths]
        self.slots = [torch.arange(length, device=device) for length in lengths]

    def _layer(self, tensors: TensorSource, prefix: str) -> dict[str, Tensor]:
        import torch

        def stacked(*names: str) -> Tensor:
            return torch.cat([tensors(f"{prefix}{name}.weight") for name in names], dim=1)

        return {
            "attention_norm": tensors(norm_name(self.spec, f"{prefix}attention_norm")),
            "wqkv": stacked("attention.wq", "attention.wk", "attention.wv"),
            "wo": stacked("attention.wo"),
            "ffn_norm": tensors(norm_name(self.spec, f"{prefix}ffn_norm")),
            "w13": stacked("feed_forward.w1", "feed_forward.w3"),
            "w2": stacked("feed_forward.w2"),
        }

    def __call__(self, token: Tensor, position: Tensor) -> Tensor:
        """See the class."""
        import torch

        stream = self.embedding[token]  # (lanes or 1, hidden): one row as long as all lanes hold the same
        partials: list[Tensor] = []  # by sublayer of the stack: attention and MLP of layer 0, of layer 1, ...
        for layer_idx, weights in enumerate(self.layers):
            mixed = self._attention(layer_idx, weights, self._norm(stream, weights["attention_norm"]), position)
            stream = self._reduce(stream, self._times(weights["wo"], mixed), partials)
            gate, up = self._times(weights["w13"], self._norm(stream, weights["ffn_norm"])).chunk(2, dim=1)
            activation = torch.nn.functional.silu(gate) * up
            stream = self._reduce(stream, self._times(weights["w2"], activation), partials)
        return self._logits(stream)

    def _norm(self, stream: Tensor, weight: Tensor) -> Tensor:
        wide = stream.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.spec.norm_eps).rsqrt()
        return (wide * scale).to(stream.dtype) * weight

    def _times(self, weight: Tensor, x: Tensor) -> Tensor:
        """Each lane's weight (lanes, out, in) times its x (lanes or 1, in): (lanes, out)."""
        import torch

        lanes, rows, columns = weight.shape
        if self.product == "fused":
            return (weight.float() * x.float()[:, None]).sum(-1).to(x.dtype)
        if x.shape[0] == 1:
            return torch.nn.functional.linear(x, weight.reshape(lanes * rows, columns)).view(lanes, rows)
        return torch.bmm(weight, x[..., None])[..., 0]

    def _attention(self, layer_idx: int, weights: dict[str, Tensor], x: Tensor, position: Tensor) -> Tensor:
        """Outputs (lanes, heads * head_dim) of all lanes' heads."""
        import torch

        spec, cache, slots = self.spec, self.caches[layer_idx], self.slots[layer_idx]
        qkv = self._times(weights["wqkv"], x).view(spec.num_lanes, -1, spec.head_dim)
        query, key, value = torch.split(qkv, [spec.lane_heads, spec.lane_kv_heads, spec.lane_kv_heads], dim=1)
        heads = spec.num_lanes * spec.lane_kv_heads
        cos, sin = self.cos[position], self.sin[position]
        slot = position % len(slots)
        cache[0].index_copy_(1, slot, self._rotate(key, cos, sin).reshape(heads, 1, spec.head_dim))
        cache[1].index_copy_(1, slot, value.reshape(heads, 1, spec.head_dim))
        query = self._rotate(query, cos, sin).reshape(heads, -1, 1, spec.head_dim).float()
        scores = (query * cache[0].float()[:, None]).sum(-1) * spec.head_dim**-0.5  # (KV heads, group, slots)
        held = position - (position - slots) % len(slots)  # the position that a slot of the ring holds
        chances = torch.softmax(scores.masked_fill(held < 0, -math.inf), dim=-1)
        mixed = (chances[..., None] * cache[1].float()[:, None]).sum(-2)
        return mixed.to(x.dtype).view(spec.num_lanes, -1)

    @staticmethod
    def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch

        even, odd = heads.float().view(*heads.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(heads.dtype)

    def _reduce(self, stream: Tensor, partial: Tensor, partials: list[Tensor]) -> Tensor:
        """Add the next sublayer's partial sums to the streams."""
        mode = self.modes[len(partials)]
        partials.append(partial)
        if mode == "blocking":
            return stream + partial.sum(0, keepdim=True)
        if mode == "local":
            return stream + partial * math.sqrt(self.spec.num_lanes)
        past = partials[-1 - 2 * self.spec.delay]
        return stream + (partial + (past.sum(0, keepdim=True) - past))

    def _logits(self, stream: Tensor) -> Tensor:
        if self.spec.pre_norm_lane_agg:
            stream = stream.expand(self.spec.num_lanes, -1).sum(0, keepdim=True)
        normed = self._norm(stream, self.final_norm)
        if self.spec.head_type is HeadType.VOCAB_PARALLEL:
            return self._times(self.head, normed).flatten()
        if self.spec.head_type is HeadType.LANE:
            return self._times(self.head[None], normed.expand(self.spec.num_lanes, -1).reshape(1, -1))[0]
        return self._times(self.head[None], normed.mean(0, keepdim=True))[0]


def measure(spec: ModelSpec, form: str, contexts: tuple[int, ...], tokens: int, budget_s: float) -> list[dict[str, object]]:
    """Median and p99 us per token at each context, with the better of PRODUCTS; what `budget_s` does not reach is left out."""
    import torch

    spec = spec if form == "lanes" else replace(spec, num_lanes=1, delay=0)
    layouts = tensor_layouts(spec)

    def random(name: str) -> Tensor:
        shape = layouts[name].shape
        std = 1.0 if name == EMBEDDING or "norm" in name else shape[-1] ** -0.5
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * std

    weights = {name: random(name) for name in layouts}
    end_s = time.monotonic() + budget_s
    products, figures = PRODUCTS, list[dict[str, Any]]()
    for context in contexts:
        measured: list[dict[str, Any]] = []
        for product in products:
            if (figures or measured) and time.monotonic() > end_s:
                break
            measured.append(_measure_one(spec, weights.__getitem__, product, context, tokens))
        if not measured:
            break
        best = min(measured, key=lambda figure: float(figure["us_per_token"]))
        products = (str(best["product"]),)  # compiling takes long: the other contexts are measured with the better one
        figures.append({"form": form, **best})
    return figures


def _measure_one(spec: ModelSpec, tensors: TensorSource, product: str, context: int, tokens: int) -> dict[str, object]:
    import torch

    steps = min(tokens, spec.max_context - context - 1)
    length = min(-(-(context + steps + WARM_UP_STEPS) // 128) * 128, spec.max_context)
    decoder = TorchDecoder(spec, tensors, length, product)
    token, position = (torch.full((1,), value, device="cuda") for value in (1, context - 1))
    begin_s = time.monotonic()
    step = torch.compile(lambda: decoder(token, position).argmax().view(1), fullgraph=True, dynamic=False)
    with torch.no_grad():
        replay = _captured(step, token, position)
    compile_s = time.monotonic() - begin_s
    position.fill_(context - 1)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]  # type: ignore[no-untyped-call]
    for event in events:
        replay()
        event.record()
    torch.cuda.synchronize()
    times_us = [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return {
        "context": context,
        "product": product,
        "us_per_token": round(percentile(times_us, 0.5), 1),
        "p99_us": round(percentile(times_us, 0.99), 1),
        "compile_s": round(compile_s, 1),
    }


def _captured(step: Callable[[], Tensor], token: Tensor, position: Tensor) -> Callable[[], None]:
    """A CUDA graph of a step that feeds its token to the next one."""
    import torch

    def advance() -> None:
        token.copy_(step())
        position.add_(1)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and warms up what must not be captured
        for _ in range(WARM_UP_STEPS):
            advance()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return graph.replay
