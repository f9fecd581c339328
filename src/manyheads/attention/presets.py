"""Names for combinations that papers introduce as one mechanism."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from manyheads.core.part import Part
from manyheads.core.registry import find, register_preset
from manyheads.core.spec import Spec


@register_preset
@dataclass(frozen=True)
class MHA:
    """Multi-head attention: `gqa` with a key head for every query head.

    Options: head_dim, as in `gqa`.

    Source: arXiv 1706.03762.
    """

    name: ClassVar[str] = "mha"
    paper: ClassVar[str] = "arXiv 1706.03762"

    head_dim: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("gqa")(head_dim=self.head_dim),)  # type: ignore[call-arg]


@register_preset
@dataclass(frozen=True)
class MQA:
    """Multi-query attention: `gqa` with one key head for all query heads.

    Options: head_dim, as in `gqa`.

    Source: arXiv 1911.02150.
    """

    name: ClassVar[str] = "mqa"
    paper: ClassVar[str] = "arXiv 1911.02150"

    head_dim: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("gqa")(kv_heads=1, head_dim=self.head_dim),)  # type: ignore[call-arg]


@register_preset
@dataclass(frozen=True)
class GDA:
    """Grouped differential attention: `differential` and its `head_norm`.

    Options: ratio of signal to noise heads (the authors' large model has 4; 1 is plain differential attention).

    Source: arXiv 2510.06949.
    """

    name: ClassVar[str] = "gda"
    paper: ClassVar[str] = "arXiv 2510.06949"

    ratio: int = 1
    offset: int = 0

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"differential(ratio={self.ratio}, offset={self.offset}) + "
            f"head_norm(scale=differential, offset={self.offset})"
        ).parts


@register_preset
@dataclass(frozen=True)
class RCMHA:
    """Relative convolutional multi-head attention: `conv` on queries, keys and values, and `relative` positions.

    Options: as in its parts. Without `conv` it is the authors' RMHA, without `relative` (and no rotation) their MDHA.
    The authors' W_V and W_O have a bias.

    Source: arXiv 2308.03429.
    """

    name: ClassVar[str] = "rcmha"
    paper: ClassVar[str] = "arXiv 2308.03429"

    taps: int = 3
    per_head: bool = False
    context: int = 4096

    def parts(self) -> tuple[Part, ...]:
        line = f"conv(taps={self.taps}, per_head={str(self.per_head).lower()}) + relative(context={self.context})"
        return Spec.parse(line).parts


@register_preset
@dataclass(frozen=True)
class FixedHeadSize:
    """Heads of a fixed width, whatever D and H: `gqa(head_dim=…)`.

    Scores of n tokens have rank head_dim at most: with D/H channels a head, more heads express fewer patterns each.

    Options: head_dim (the paper's theory takes the sequence length; a power of two from 32 to 128 is usual).
    kv_heads, v_dim as in `gqa`.

    Source: Bhojanapalli et al. 2020, arXiv 2002.07028.
    """

    name: ClassVar[str] = "fixed-head-size"
    paper: ClassVar[str] = "arXiv 2002.07028"

    head_dim: int = 64
    kv_heads: int | None = None
    v_dim: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("gqa")(kv_heads=self.kv_heads, head_dim=self.head_dim, v_dim=self.v_dim),)  # type: ignore[call-arg]


@register_preset
@dataclass(frozen=True)
class MWMHA:
    """Multi-window multi-head attention: `multi_window` and its `window_bias`.

    Options: windows, one for each head, 0 for a global one (the default: the divisors of the authors' 250 tokens and
    two global heads). shift: see `multi_window`.

    Source: arXiv 2306.00561.
    """

    name: ClassVar[str] = "mw-mha"
    paper: ClassVar[str] = "arXiv 2306.00561"

    windows: tuple[int, ...] = (2, 5, 10, 25, 50, 125, 0, 0)
    shift: bool = False

    def parts(self) -> tuple[Part, ...]:
        windows = [*self.windows]
        shift = str(self.shift).lower()
        return Spec.parse(f"window_bias(windows={windows}) + multi_window(windows={windows}, shift={shift})").parts


@register_preset
@dataclass(frozen=True)
class QKVSharingPlus:
    """Tied projections made asymmetric, (X)⁺: `qkv-sharing` and `pair-bias`.

    Options: tie, kv_heads: see `qkv-sharing`. of: see `pair-bias`.

    Source: arXiv 2606.04032.
    """

    name: ClassVar[str] = "qkv-sharing-plus"
    paper: ClassVar[str] = "arXiv 2606.04032"

    tie: Literal["kv", "qk", "qkv"] = "qkv"
    kv_heads: int | None = None
    of: Literal["pair", "distance"] = "pair"

    def parts(self) -> tuple[Part, ...]:
        kv_heads = "none" if self.kv_heads is None else self.kv_heads
        return Spec.parse(f"qkv-sharing(tie={self.tie}, kv_heads={kv_heads}) + pair-bias(of={self.of})").parts


@register_preset
@dataclass(frozen=True)
class MEA:
    """Explicit multi-head attention: `head_composition` of keys and values, and a `head_norm` of what is read of them.

    Options: kv_heads, the heads composed of the cached ones (default: as many).

    Source: arXiv 2601.19611. A converted model keeps its outputs only without the norm: use `head_composition` alone.
    """

    name: ClassVar[str] = "mea"
    paper: ClassVar[str] = "arXiv 2601.19611"

    kv_heads: int | None = None

    def parts(self) -> tuple[Part, ...]:
        heads = "" if self.kv_heads is None else f"(kv_heads={self.kv_heads})"
        return Spec.parse(f"head_composition{heads} + head_norm").parts


@register_preset
@dataclass(frozen=True)
class CLLA:
    """Cross-layer latent attention: `mla` whose latents are cached in 4 bits, for layers that share them.

    c = RMSNorm(x W_DKV), ĉ = s · round(c / s) with s = max|c| / 7 a token, k_h = [W_UK^h ĉ ; k_r], v_h = W_UV^h ĉ.
    A stack of `clla` with `kv_source="cla(2)"` has one latent for two layers, each with queries, W_UK, W_UV and W_O of
    its own. A token takes bits·rank/8 + 2·rank/block + rope_bits·rope_dim/8 (+ 2 for that scale) bytes in a layer that
    has latents: below 2 % of 16-bit multi-head attention with 512 + 64 numbers in place of 4096.

    Options: rank, rope_dim, nope_dim, bits, rope_bits, block: see `mla`.

    The paper's equations were not seen: that the latent is what layers share, that quantisation is symmetric and is
    trained in, and all sizes are assumed.

    Source: arXiv 2410.15252.
    """

    name: ClassVar[str] = "clla"
    paper: ClassVar[str] = "arXiv 2410.15252"

    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    bits: int = 4
    rope_bits: int = 8
    block: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("mla")(**asdict(self)),)


@register_preset
@dataclass(frozen=True)
class LinearAttention:
    """Linear attention with a feature map: `features` and `linear`.

    Options: map, see `features` (one that is not negative).

    Source: Katharopoulos et al. 2020, arXiv 2006.16236.
    """

    name: ClassVar[str] = "linear-attention"
    paper: ClassVar[str] = "arXiv 2006.16236"

    map: Literal["elu", "relu", "softmax"] = "elu"

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(f"features(map={self.map}) + linear").parts


@register_preset
@dataclass(frozen=True)
class RetNet:
    """The heads of a RetNet layer: rotation, `retention`, the norm of each head without a gain, the swish gate.

    The paper's values are twice as wide as its keys: `gqa(head_dim=256, v_dim=512) + retnet`.

    Options: first, see `retention`.

    Source: Sun et al. 2023, arXiv 2307.08621.
    """

    name: ClassVar[str] = "retnet"
    paper: ClassVar[str] = "arXiv 2307.08621"

    first: int = 5

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"rope(pairing=interleaved) + retention(first={self.first}) + head_norm(gain=false) + "
            "output_gate(activation=silu)"
        ).parts


@register_preset
@dataclass(frozen=True)
class GatedLinearAttention:
    """A layer of gated linear attention (GLA): `gated_linear`, the norm of each head, the swish gate.

    The paper's keys are half as wide as its values, and heads are few: `gqa(head_dim=128, v_dim=256)` of 4 heads where
    D = 1024.

    Options: rank, tau, see `gated_linear`.

    Source: Yang et al. 2023, arXiv 2312.06635.
    """

    name: ClassVar[str] = "gated-linear-attention"
    paper: ClassVar[str] = "arXiv 2312.06635"

    rank: int = 16
    tau: float = 16.0

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"gated_linear(rank={self.rank}, tau={self.tau}) + head_norm + output_gate(activation=silu)"
        ).parts


SHORT_CONV = "conv(taps={taps}, per_head=true, activation=silu, bias=false)"


@register_preset
@dataclass(frozen=True)
class DeltaNet:
    """A layer of DeltaNet: short convolutions with SiLU on queries, keys and values, `delta`, the norm of each head.

    Options: taps of the convolutions. negative, see `delta`.

    Source: Yang et al. 2024, arXiv 2406.06484.
    """

    name: ClassVar[str] = "delta_net"
    paper: ClassVar[str] = "arXiv 2406.06484"

    taps: int = 4
    negative: bool = False

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"{SHORT_CONV.format(taps=self.taps)} + delta(negative={str(self.negative).lower()}) + head_norm"
        ).parts


@register_preset
@dataclass(frozen=True)
class GatedDeltaNet:
    """A layer of Gated DeltaNet: that of DeltaNet with a decay of the whole state, and the output gate with SiLU.

    Options: as in `delta_net`.

    Source: Yang et al. 2024, arXiv 2412.06464.
    """

    name: ClassVar[str] = "gated_delta_net"
    paper: ClassVar[str] = "arXiv 2412.06464"

    taps: int = 4
    negative: bool = False

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"{SHORT_CONV.format(taps=self.taps)} + delta(gated=true, negative={str(self.negative).lower()}) + "
            "head_norm + output_gate(activation=silu)"
        ).parts


@register_preset
@dataclass(frozen=True)
class SoftmaxLinearAttention:
    """A layer with a state in place of keys whose heads compete: `retnet`, a GLA or a Gated DeltaNet with `sla`.

    The read gate stands between the norm of each head and the layer's output gate.

    Options: base: the layer it is added to. gate: what heads read (`sla`), what they write (`sla_write`), or both; the
    delta rule takes keys of length one, so that a write gate does not reach it.

    Source: arXiv 2602.01744.
    """

    name: ClassVar[str] = "softmax-linear-attention"
    paper: ClassVar[str] = "arXiv 2602.01744"

    base: Literal["retention", "gated_linear", "gated_delta"] = "gated_linear"
    gate: Literal["read", "write", "both"] = "read"

    def parts(self) -> tuple[Part, ...]:
        base = {"retention": "retnet", "gated_linear": "gated-linear-attention", "gated_delta": "gated_delta_net"}
        *heads, output = Spec.parse(base[self.base]).parts
        write = () if self.gate == "read" else Spec.parse("sla_write").parts
        read = () if self.gate == "write" else Spec.parse("sla").parts
        return (*write, *heads, *read, output)


@register_preset
@dataclass(frozen=True)
class MHLALayer:
    """The language layer of MHLA: a feature map, rotation, `mhla`, the norm of each head, the output gate with SiLU.

    Rotation behind the feature map leaves no positive weights, which is why this layer has no normaliser.

    Options: map, see `features`. block, blocks, see `mhla`.

    Source: arXiv 2601.07832.
    """

    name: ClassVar[str] = "mhla_layer"
    paper: ClassVar[str] = "arXiv 2601.07832"

    map: Literal["elu", "relu", "softmax", "silu"] = "relu"
    block: int = 64
    blocks: int = 32

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"features(map={self.map}) + rope + mhla(block={self.block}, blocks={self.blocks}) + head_norm + "
            "output_gate(activation=silu)"
        ).parts


@register_preset
@dataclass(frozen=True)
class MTAGated:
    """A whole layer of multi-token attention: `mta`, `head_norm` and `head_gate`.

    Options: those of `mta`.

    Source: arXiv 2504.00927.
    """

    name: ClassVar[str] = "mta_gated"
    paper: ClassVar[str] = "arXiv 2504.00927"

    queries: int = 6
    keys: int = 11
    conv: Literal["both", "scores", "weights", "none"] = "both"
    mix: Literal["both", "scores", "weights", "none"] = "both"
    block: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("mta")(**asdict(self)), *Spec.parse("head_norm + head_gate").parts)


@register_preset
@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 block: `multi_value`, a `conv` of its rows with SiLU, `ssd`, and the gated norm.

    Options: state N, groups and expand as in `multi_value` (the authors' heads are 64 wide: expand·D/64 of them). taps
    of the convolution.

    Source: arXiv 2405.21060.
    """

    name: ClassVar[str] = "mamba2"
    paper: ClassVar[str] = "arXiv 2405.21060"

    state: int = 128
    groups: int = 1
    expand: int = 2
    taps: int = 4

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"multi_value(groups={self.groups}, key_dim={self.state}, expand={self.expand}, scale=1.0) + "
            f"conv(taps={self.taps}, per_head=true, activation=silu) + ssd + "
            f"output_gate(activation=silu) + output_norm(groups={self.groups})"
        ).parts


@register_preset
@dataclass(frozen=True)
class Mamba:
    """A Mamba block: `selective_ssm` and its gate, silu(x W_z) on every channel.

    Options: those of `selective_ssm`.

    Source: arXiv 2312.00752.
    """

    name: ClassVar[str] = "mamba"
    paper: ClassVar[str] = "arXiv 2312.00752"

    state: int = 16
    expand: int = 2
    taps: int = 4
    dt_rank: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("selective_ssm")(**asdict(self)), *Spec.parse("output_gate(activation=silu)").parts)


@register_preset
@dataclass(frozen=True)
class MossNet:
    """MossNet's block: Mamba's with a mixture of `experts`, of which `top` serve a token.

    Options: those of `selective_ssm`; one expert is Mamba. The paper also mixes the feed-forwards, which are no part of
    a layer here.

    Source: arXiv 2510.26182.
    """

    name: ClassVar[str] = "mossnet"
    paper: ClassVar[str] = "arXiv 2510.26182"

    experts: int = 8
    top: int = 2
    kind: Literal["mixed", "apart"] = "mixed"
    state: int = 16
    expand: int = 2
    taps: int = 4
    dt_rank: int | None = None

    def parts(self) -> tuple[Part, ...]:
        return (find("selective_ssm")(**asdict(self)), *Spec.parse("output_gate(activation=silu)").parts)


@register_preset
@dataclass(frozen=True)
class Hymba:
    """A hybrid-head layer: `gqa`, within a `window` if one is given, and `ssm_heads` under the same output.

    Options: kv_heads, head_dim, v_dim: see `gqa` (the authors' values are 2·D/H wide). window W: a query sees the W
    tokens before it, and the first `meta` ones at any distance; none (the default) sees all. The authors' layers have
    one, but for the first, the middle and the last: that is a list of specs, one a layer. state, taps, dt_rank: see
    `ssm_heads`. The stack's `meta` and `kv_source` are the paper's meta tokens and its sharing of keys and values.

    Source: arXiv 2411.13676.
    """

    name: ClassVar[str] = "hymba"
    paper: ClassVar[str] = "arXiv 2411.13676"

    kv_heads: int | None = None
    head_dim: int | None = None
    v_dim: int | None = None
    window: int | None = None
    meta: int = 0
    state: int = 16
    taps: int = 4
    dt_rank: int | None = None

    def parts(self) -> tuple[Part, ...]:
        heads = find("gqa")(kv_heads=self.kv_heads, head_dim=self.head_dim, v_dim=self.v_dim)  # type: ignore[call-arg]
        near = () if self.window is None else (find("window")(size=self.window + 1, first=self.meta),)  # type: ignore[call-arg]
        ssm = find("ssm_heads")(state=self.state, taps=self.taps, dt_rank=self.dt_rank)  # type: ignore[call-arg]
        return (heads, *near, ssm)
