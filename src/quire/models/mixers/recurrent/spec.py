"""Mixers with a recurrent state, as values: short convolutions, Mamba, Mamba-2, the gated delta
net and its form with a decay for each channel, lightning attention, gated linear recurrences.

Each states its memory: a state per request, whose float32 numbers come first, and the window of its
convolution in the model's dtype. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.layer_memory import RecurrentState

NO_LIMIT = float("inf")


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution (LFM2) of W = `width` channels: out(c * conv(b * x))."""

    width: int
    kernel: int
    bias: bool = False

    @property
    def memory(self) -> RecurrentState:
        """The last inputs of the convolution."""
        return RecurrentState(numbers=(self.kernel - 1) * self.width)

    @property
    def widest(self) -> int:
        return 3 * self.width

    def flops(self, context: int) -> int:
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state space of `state` numbers for each of `width` channels (Gu & Dao 2023).

    Of two projections x and z: x = silu(conv(x)); from it come b, c and, through `rank` numbers,
    the step; out(scan(x) * silu(z)). The norms, where `norm_eps` is given, are RMS norms of the
    rank's numbers, b and c, with weights or without.
    """

    width: int
    state: int
    kernel: int
    rank: int
    conv_bias: bool = True
    bias: bool = False
    norm_eps: float | None = None
    norm_weights: bool = False

    @property
    def memory(self) -> RecurrentState:
        """The states of all channels, and the last inputs of the convolution."""
        return RecurrentState((self.kernel - 1) * self.width, self.state * self.width)

    @property
    def widest(self) -> int:
        return 2 * self.width

    def flops(self, context: int) -> int:
        return 6 * self.memory.wide_numbers


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space of `state` x `head_dim` numbers for each head (Dao & Gu 2024).

    Of five projections z, x, b, c and the step: x, b and c = silu(conv(x, b, c)), where b and c
    belong to a group of heads; out(norm(scan(x) * silu(z))), a norm over the channels of one of
    `norm_groups`. The norm is first, then the gate, if not `gate_first`; it is absent without
    `norm_eps`. Steps are at least `least_step` and at most `largest_step`.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    norm_eps: float | None = 1e-5
    norm_groups: int = 1
    gate_first: bool = True
    least_step: float = 0.0
    largest_step: float = NO_LIMIT

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.width + 2 * self.groups * self.state

    @property
    def memory(self) -> RecurrentState:
        """The states of all heads, and the last inputs of the convolution."""
        return RecurrentState((self.kernel - 1) * self.conv_width, self.width * self.state)

    @property
    def widest(self) -> int:
        return self.width + self.conv_width + self.heads

    def flops(self, context: int) -> int:
        return 5 * self.memory.wide_numbers


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Linear attention by the gated delta rule (Yang et al. 2024): a state of `key_dim` x
    `value_dim` numbers for each of `value_heads`; a key head serves equally many of them.

    Queries, keys and values go through silu(conv(q, k, v)); the output is out(norm(o) * silu(z)),
    an RMS norm of each head with epsilon `norm_eps`. `strength`: the largest share of what a state
    lacks that a token writes to it; above 1 states may turn to the other side.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float
    strength: float = 1.0

    @property
    def keys_width(self) -> int:
        """Numbers of all keys."""
        return self.key_heads * self.key_dim

    @property
    def width(self) -> int:
        """Numbers of all values."""
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_width + self.width

    @property
    def memory(self) -> RecurrentState:
        """The states of all heads, and the last inputs of the convolution."""
        return RecurrentState(
            (self.kernel - 1) * self.conv_width,
            self.width * self.key_dim,
            # the op with another strength is plain torch's alone
            has_kernels=self.strength == 1.0,
        )

    @property
    def widest(self) -> int:
        return self.conv_width + self.width + 2 * self.value_heads

    def flops(self, context: int) -> int:
        return 7 * self.memory.wide_numbers


@dataclass(frozen=True, slots=True)
class ChannelDelta:
    """The gated delta rule with a decay for each channel of a head's keys (Kimi Team 2025): a state
    of `head_dim` x `head_dim` numbers for each of `heads`.

    Queries, keys and values go through silu(conv(q, k, v)); the output is out(norm(o) *
    sigmoid(z)), an RMS norm of each head with epsilon `norm_eps`. The decays and z are products of
    the input, each through `rank` numbers where there is one. `bound`, below 0, is the least
    logarithm of a decay, which is a sigmoid's share of it; None: decays have no bound.
    """

    heads: int
    head_dim: int
    kernel: int
    norm_eps: float
    rank: int | None = None
    bound: float | None = None

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 3 * self.width

    @property
    def memory(self) -> RecurrentState:
        """The states of all heads, and the last inputs of the convolution."""
        window, states = (self.kernel - 1) * self.conv_width, self.width * self.head_dim
        return RecurrentState(window, states, has_kernels=False)

    @property
    def widest(self) -> int:
        return 5 * self.width + self.heads

    def flops(self, context: int) -> int:
        return 7 * self.memory.wide_numbers


@dataclass(frozen=True, slots=True)
class Lightning:
    """Linear attention with a fixed decay for each head (lightning attention, Qin et al. 2024): a
    state of `head_dim` x `head_dim` numbers for each of `heads`, s = e^-slope * s + k v, o = q s.

    Queries, keys and values are activated; the output is out(norm(o) * sigmoid(z)), an RMS norm
    over all heads with epsilon `norm_eps`. Slopes are those of ALiBi's heads times `slope`.
    """

    heads: int
    head_dim: int
    slope: float
    norm_eps: float
    act: str = "silu"

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def memory(self) -> RecurrentState:
        """The states of all heads."""
        return RecurrentState(wide_numbers=self.width * self.head_dim)

    @property
    def widest(self) -> int:
        return 3 * self.width

    def flops(self, context: int) -> int:
        return 5 * self.memory.wide_numbers


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """Griffin's recurrent block (De et al. 2024): a real-gated linear recurrence over `width`
    channels, whose two gates are products within each of `gate_blocks` equal blocks of channels.

    out(recurrence(conv(x)) * act(y)) of two projections x and y, all with biases.
    """

    width: int
    gate_blocks: int
    kernel: int
    act: str = "gelu_tanh"

    @property
    def memory(self) -> RecurrentState:
        """A number for each channel, and the last inputs of the convolution."""
        return RecurrentState((self.kernel - 1) * self.width, self.width, has_kernels=False)

    @property
    def widest(self) -> int:
        return 2 * self.width

    def flops(self, context: int) -> int:
        return 12 * self.width


RecurrentMixer = ShortConv | Mamba | Mamba2 | GatedDelta | ChannelDelta | Lightning | GatedLinear
