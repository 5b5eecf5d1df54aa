"""What a model's configuration says about parameters, floating-point operations, and bytes that training keeps.

Everything is counted from the shapes, for Qwen3.5's hybrid and for plain decoders.
Units: parameters, FLOP (a multiply-add is two), bytes. One token unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_opsd.errors import OpsdError

Kind = Literal["linear_attention", "full_attention"]
#: LoRA targets of the recipes.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Tokens that a brief adds to the teacher's view, where nothing else is said.
BRIEF = 4096
#: Bytes of an entry in bf16.
BF16 = 2
#: Keys of a configuration that count experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Kinds of layers that see a part of the past.
WINDOWS = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; the linear ones are 0 where no layer is ``linear_attention``. ``fused``: its layers run on this project's
    kernels, or else on transformers'. ``positions``: tokens of the longest sequence that it is made for; None where it does not say."""

    hidden: int
    intermediate: int
    kinds: tuple[Kind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    gated_query: bool
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_width: int = 0
    fused: bool = True
    positions: int | None = None

    @classmethod
    def of(cls, config: Any, fused: bool = True) -> ModelShape:
        """From a configuration of transformers.

        Raises:
            OpsdError: a model that is not counted: of another kind of attention, or a mixture of experts.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        kinds = tuple(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
        # A window holds less than the whole past does, so that these layers are counted from above.
        kinds = tuple("full_attention" if k in WINDOWS else k for k in kinds)
        others = sorted(set(kinds) - set(get_args(Kind))) + [k for k in EXPERTS if getattr(text, k, None)]
        if others:
            raise OpsdError(
                f"a {text.model_type} model with {', '.join(others)}",
                "memory and time are counted for dense decoders with full attention, or with Qwen3.5's linear attention beside it",
                "choose such a model",
            )
        linear = "linear_attention" in kinds
        return cls(
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            kinds=kinds,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab=text.vocab_size,
            tied=bool(text.tie_word_embeddings),
            gated_query=linear,
            linear_key_heads=text.linear_num_key_heads if linear else 0,
            linear_value_heads=text.linear_num_value_heads if linear else 0,
            linear_key_dim=text.linear_key_head_dim if linear else 0,
            linear_value_dim=text.linear_value_head_dim if linear else 0,
            conv_width=text.linear_conv_kernel_dim if linear else 0,
            fused=fused,
            positions=getattr(text, "max_position_embeddings", None),
        )

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads; values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def linear_keys(self) -> int:
        """Width of all key heads of a linear layer."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_values(self) -> int:
        """Width of all value heads of a linear layer."""
        return self.linear_value_heads * self.linear_value_dim

    def layer_parameters(self, kind: Kind) -> int:
        """Parameters of the matrices of one layer (its few vectors left out)."""
        mlp = 3 * self.hidden * self.intermediate
        if kind == "full_attention":
            wide = self.query * (2 if self.gated_query else 1)
            return mlp + self.hidden * (wide + 2 * self.keys + self.query)
        mixed = 2 * self.linear_keys + self.linear_values
        inner = mixed + 2 * self.linear_values + 2 * self.linear_value_heads
        return mlp + self.hidden * inner + mixed * self.conv_width

    @property
    def body(self) -> int:
        """Parameters of all layers."""
        return sum(self.layer_parameters(k) for k in self.kinds)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.body + self.vocab * self.hidden * (1 if self.tied else 2)

    def lora_parameters(self, rank: int, targets: tuple[str, ...] = TARGETS) -> int:
        """Parameters of adapters."""
        wide = self.query * (2 if self.gated_query else 1)
        size = {
            "q_proj": self.hidden + wide,
            "k_proj": self.hidden + self.keys,
            "v_proj": self.hidden + self.keys,
            "o_proj": self.query + self.hidden,
        }
        mlp = {k: self.hidden + self.intermediate for k in ("gate_proj", "up_proj", "down_proj")}
        attention = self.kinds.count("full_attention") * sum(v for k, v in size.items() if k in targets)
        return rank * (attention + len(self.kinds) * sum(v for k, v in mlp.items() if k in targets))

    def attention_flop(self, context: int) -> float:
        """Forward FLOP of one token in one full-attention layer, over half the context on average (causal)."""
        return 4.0 * self.query * context / 2

    def delta_flop(self) -> float:
        """Forward FLOP of one token in one linear layer's delta rule, chunks of 64: products within a chunk and with the state."""
        per_head = 64 * (3 * self.linear_key_dim + 2 * self.linear_value_dim) + 6 * self.linear_key_dim * self.linear_value_dim
        return float(self.linear_value_heads * per_head)

    def layer_flop(self, kind: Kind, context: int) -> float:
        """Forward FLOP of one token in one layer."""
        inner = self.attention_flop(context) if kind == "full_attention" else self.delta_flop()
        return 2.0 * self.layer_parameters(kind) + inner

    def forward_flop(self, context: int) -> float:
        """Forward FLOP of one token, without the vocabulary head."""
        return sum(self.layer_flop(k, context) for k in self.kinds)

    def boundary_bytes(self) -> int:
        """Bytes that a checkpointed layer keeps: its input."""
        return BF16 * self.hidden

    def saved_mlp_bytes(self) -> int:
        """Of :meth:`saved_bytes`, those of the gated MLP and its norm."""
        if self.fused:
            return BF16 * (2 * self.hidden + 3 * self.intermediate)
        return BF16 * (2 * self.hidden + 4 * self.intermediate) + 8 * self.hidden

    def saved_bytes(self, kind: Kind) -> int:
        """Bytes that a layer's backward reads, with adapters on :data:`TARGETS`.

        Inputs of both norms; inputs of adapted products; gate, up and their product; what the kernels of attention or of the
        delta rule save (q, k, v, output, and for the delta rule the convolution's input, decays, and a 64 x 64 matrix a chunk).
        Layers that are not fused also save two float32 copies of each norm's input, SiLU(gate), a copy of attention's output, the
        delta rule's normed output, and the convolution's input in float32.
        """
        if kind == "full_attention":
            inner = 2 * self.hidden + (5 if self.fused else 6) * self.query + 4 * self.keys
        else:
            mixed = 2 * self.linear_keys + self.linear_values
            inner = (
                self.hidden + 2 * mixed + (2 if self.fused else 3) * self.linear_values + self.linear_value_heads * (64 + 11)
            )
        if self.fused:
            return self.saved_mlp_bytes() + BF16 * inner
        convolved = 0 if kind == "full_attention" else 2 * self.linear_keys + self.linear_values
        return self.saved_mlp_bytes() + BF16 * inner + 8 * self.hidden + 4 * convolved

    def remade_bytes(self, kind: Kind) -> int:
        """Of :meth:`saved_bytes`, those that a fused layer makes again in backward (``models.remade``) and does not keep: the gated MLP's
        input and the gate's product, and attention's input and gated output."""
        mixer = self.hidden + self.query if kind == "full_attention" else 0
        return BF16 * (self.hidden + self.intermediate + mixer) if self.fused else 0

    def kept_bytes(self, kind: Kind) -> int:
        """Bytes that a layer keeps for its backward when it is not checkpointed."""
        return self.saved_bytes(kind) - self.remade_bytes(kind)

    def carried_bytes(self) -> int:
        """Bytes of keys and values that a sequence in parts carries."""
        return BF16 * 2 * self.keys * self.kinds.count("full_attention")
