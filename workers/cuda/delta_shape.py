"""Gated delta nets in the monokernel: which thread block has which columns of a state, and how much a rank keeps of it."""

from __future__ import annotations

from functools import cached_property

from kog_dist.model.layers import DeltaNet
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

_ATTEND_WARPS = 4
_TOGETHER = 4  # columns of a state that a thread reads with one load, of each of its keys
_SLICES = (1, 2, 4, 8)  # with the warps of each at most 32 sums of squares of a head: one of each thread of a warp
_WARP = 32


@dataclass(frozen=True)
class DeltaShape:
    """The nets of a rank that hosts `num_lanes` lanes of a model, all of one kind, with `num_ctas` thread blocks.

    `terms`: rows of codes that each of the two factors of a value head is the sum of; 1 where inputs have 16 bit.

    An item is a slice of the columns of a value head. Each of the four attention warps has a quarter of these, and of a column
    a thread every 32nd key.
    """

    spec: ModelSpec
    net: DeltaNet
    num_lanes: int
    num_ctas: int
    terms: int = 1

    @staticmethod
    def of(spec: ModelSpec, num_lanes: int, num_ctas: int, terms: int = 1) -> DeltaShape | None:
        """None for a model without."""
        net = next((part for part in spec.kinds if isinstance(part, DeltaNet)), None)
        return None if net is None else DeltaShape(spec, net, num_lanes, num_ctas, terms)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Those with a delta net."""
        return tuple(number for number, layer in enumerate(self.spec.layers) if isinstance(layer.mixer, DeltaNet))

    @property
    def heads(self) -> int:
        """Value heads of a lane."""
        return self.net.num_value_heads // self.spec.num_lanes

    @property
    def key_heads(self) -> int:
        """The same of query and key heads."""
        return self.net.num_key_heads // self.spec.num_lanes

    @property
    def rows(self) -> int:
        """Of a lane's input: queries, keys, values, output gates, and two factors of each value head."""
        return self.net.num_rows // self.spec.num_lanes

    @property
    def num_factors(self) -> int:
        """Of a lane: the last ones of `rows`."""
        return 2 * self.heads

    def matrix_row(self, row: int) -> int:
        """Where one of `rows` begins among those of the lane's matrix, `matrix_rows` of them."""
        return row + (self.terms - 1) * max(row - self.rows + self.num_factors, 0)

    @property
    def matrix_rows(self) -> int:
        """Of a lane's input, as it is multiplied."""
        return self.matrix_row(self.rows)

    @cached_property
    def slices(self) -> int:
        """Slices of a head's columns: so many that a layer keeps as many thread blocks busy as there are, and no more."""
        most = self.num_ctas // (self.num_lanes * self.heads)
        fitting = (n for n in _SLICES if n <= most and self.net.value_dim % (n * _ATTEND_WARPS * _TOGETHER) == 0)
        return max(fitting, default=1)

    @property
    def items(self) -> int:
        """Of a lane and layer."""
        return self.heads * self.slices

    @property
    def square_words(self) -> int:
        """Sums of squares of a head's outputs: one of each warp of each slice."""
        return self.slices * _ATTEND_WARPS

    @property
    def item_channels(self) -> int:
        """Of the convolution: all of its head's query and key, and its columns of the value."""
        return 2 * self.net.key_dim + self.net.value_dim // self.slices

    @property
    def item_values(self) -> int:
        """What an item keeps of a sequence, in float32: its columns of the state, and the convolution's last inputs."""
        return self.net.key_dim * self.net.value_dim // self.slices + self.net.conv_width * self.item_channels

    @property
    def kept_values(self) -> int:
        """What an item keeps of a token that may not count, in float32: inputs of its channels, and in each warp's own copy those
        of decay and beta."""
        return self.item_channels + 2 * _ATTEND_WARPS

    @property
    def num_items(self) -> int:
        """Of all lanes and layers."""
        return len(self.layers) * self.num_lanes * self.items

    @property
    def num_bytes(self) -> int:
        """What a rank keeps of a sequence."""
        return 4 * self.num_items * self.item_values

    @property
    def vector_values(self) -> int:
        """Of all layers, what a rank has of them beside products: taps of convolutions, factors of heads, norms."""
        channels = 2 * self.key_heads * self.net.key_dim + self.heads * self.net.value_dim
        of_lane = channels * self.net.conv_width + 2 * self.heads
        return len(self.layers) * (self.num_lanes * of_lane + self.net.value_dim)

    @property
    def findings(self) -> list[str]:
        """What no build of the kernel can have."""
        net, attended = self.net, self.spec.lane_heads * self.spec.head_dim
        lane_values = self.heads * net.value_dim
        against = {
            f"keys of {net.key_dim} values in delta nets (a multiple of {_WARP})": net.key_dim % _WARP,
            f"value heads of {net.value_dim} values in delta nets (a power of two from 16 on)": (
                net.value_dim < _ATTEND_WARPS * _TOGETHER or net.value_dim & (net.value_dim - 1)
            ),
            f"delta nets whose lanes give {lane_values} values, beside attention's {attended} (as many)": lane_values != attended,
            f"a convolution over {net.conv_width} tokens (2 or more)": net.conv_width < 2,
        }
        return [name for name, is_so in against.items() if is_so]

    def header(self) -> list[str]:
        """What the kernel knows of them."""
        net = self.net
        numbers = {
            "kDeltaLayers": len(self.layers), "kDeltaHeads": self.heads, "kDeltaKeyHeads": self.key_heads, "kKeyDim": net.key_dim,
            "kValueDim": net.value_dim, "kConvWidth": net.conv_width, "kDeltaSlices": self.slices, "kFactorTerms": self.terms,
        }  # fmt: skip
        lines = [
            "#define KOG_DELTA",
            *(f"namespace kog {{ constexpr int {name} = {value}; }}" for name, value in numbers.items()),
        ]
        scale = f"static_cast<float>({net.key_dim**-0.5!r})"
        return [*lines, f"namespace kog {{ constexpr float kDeltaQueryScale = {scale}; }}"]
