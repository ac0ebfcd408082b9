"""One pre-norm transformer layer: attention with rotary positions, then an MLP."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader expects
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from pipeloom.runtime.pieces import with_earlier_pieces

if TYPE_CHECKING:
    from pipeloom.model.config import TransformerConfig

DropoutKey = tuple[int, int] | tuple[int, int, int]
"""(step, microbatch): with seed, layer and place, all that a dropout mask depends on.

A piece of a sequence adds its first position: it drops what the whole sequence would drop there.
"""


def derive_seed(*parts: object) -> int:
    """A seed for one use: a 63-bit hash of `parts`, equal on every machine and in every process.

    Examples:
        >>> derive_seed(1234, "decoder.layers.0") == derive_seed(1234, "decoder.layers.0")
        True
        >>> derive_seed(1, 23) == derive_seed(12, 3)
        False
    """
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_norm(config: TransformerConfig) -> nn.Module:
    """The normalization that `config` names, over the hidden dimension."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layernorm_epsilon)


def blank_linear(num_in: int, num_out: int, *, bias: bool) -> nn.Linear:
    """A linear map without initial values: they come later, by name.

    torch's own values would cost time and the caller's random numbers.
    """
    return nn.Linear(num_in, num_out, bias=bias, device="meta").to_empty(device="cpu")


def _linear(config: TransformerConfig, num_in: int, num_out: int) -> nn.Linear:
    return blank_linear(num_in, num_out, bias=config.add_bias_linear)


@functools.lru_cache(maxsize=16)
def rotary_tables(
    sequence: int, head_size: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each `[sequence, head_size / 2]`."""
    # Cached tensors must be usable in training even if evaluation asked for them first.
    with torch.inference_mode(False), torch.no_grad():
        exponent = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        angles = torch.outer(torch.arange(sequence, dtype=torch.float64), base**-exponent)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last positions of a sequence.

    Args:
        query: `[batch, heads, positions, head_size]`.
        key: `[batch, heads, sequence, head_size]`, of all positions up to the last.
        value: Likewise.
    """
    positions, sequence = query.shape[2], key.shape[2]
    if positions == sequence:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mask: Tensor
    if query.is_cuda:
        mask = causal_lower_right(positions, sequence)  # a kernel's, never in memory
    else:
        mask = _lower_right_mask(positions, sequence, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@functools.lru_cache(maxsize=16)
def _lower_right_mask(positions: int, sequence: int, dtype: torch.dtype) -> Tensor:
    """-inf where a query may not look; of the queries' dtype, so that no layer makes its own."""
    with torch.inference_mode(False), torch.no_grad():
        hidden = torch.ones(positions, sequence, dtype=torch.bool).triu(sequence - positions + 1)
        return torch.zeros(positions, sequence, dtype=dtype).masked_fill(hidden, -torch.inf)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (i, i + head_size/2) of `x` `[batch, heads, sequence, head_size]`."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class SelfAttention(nn.Module):
    """Causal attention over hidden states `[sequence, batch, hidden]`."""

    def __init__(self, config: TransformerConfig) -> None:
        """Makes the fused query-key-value map and the output map."""
        super().__init__()
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        self.rotary_base = config.rotary_base
        self.linear_qkv = _linear(config, config.hidden_size, 3 * config.hidden_size)
        self.linear_proj = _linear(config, config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns `[sequence, batch, hidden]`; of a piece, that reads the earlier ones too."""
        sequence, batch, hidden = hidden_states.shape
        qkv = self.linear_qkv(hidden_states)
        qkv = qkv.view(sequence, batch, 3, self.num_heads, self.head_size)
        query, key, value = qkv.permute(2, 1, 3, 0, 4).unbind(0)  # [batch, heads, sequence, head]
        value = with_earlier_pieces(value, (self, "value"), dim=2)
        end = value.shape[2]
        tables = rotary_tables(end, self.head_size, self.rotary_base, query.device, query.dtype)
        cos, sin = (table[end - sequence :] for table in tables)
        key = with_earlier_pieces(apply_rotary(key, cos, sin), (self, "key"), dim=2)
        out = attend_causally(apply_rotary(query, cos, sin), key, value)
        out = out.permute(2, 0, 1, 3).reshape(sequence, batch, hidden)
        projected: Tensor = self.linear_proj(out)
        return projected


class MLP(nn.Module):
    """Two linear maps with GELU between them, or three with a SwiGLU gate."""

    def __init__(self, config: TransformerConfig) -> None:
        """Makes the maps; swiglu's gate and value are one fused map."""
        super().__init__()
        self.gated = config.activation == "swiglu"
        width = config.ffn_size * (2 if self.gated else 1)
        self.linear_fc1 = _linear(config, config.hidden_size, width)
        self.linear_fc2 = _linear(config, config.ffn_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns `[sequence, batch, hidden]`."""
        inner = self.linear_fc1(hidden_states)
        if self.gated:
            gate, value = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(inner)
        out: Tensor = self.linear_fc2(inner)
        return out


class TransformerLayer(nn.Module):
    """Layer `layer_number` (1-based, of the whole model): `x + attention`, then `x + MLP`.

    Args:
        config: The model.
        layer_number: Its global number, whichever chunk holds it.

    Examples:
        >>> import torch
        >>> from pipeloom.model.config import TransformerConfig
        >>> config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
        >>> layer = TransformerLayer(config, layer_number=2)
        >>> _ = [nn.init.normal_(parameter) for parameter in layer.parameters()]
        >>> layer(torch.zeros(5, 3, 8)).shape
        torch.Size([5, 3, 8])
    """

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        """Makes the layer's modules without initial values (`initialize` gives them)."""
        super().__init__()
        self.layer_number = layer_number
        self.seed, self.dropout = config.seed, config.hidden_dropout
        self.input_layernorm = make_norm(config)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden_states: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        """Returns `[sequence, batch, hidden]`; training with dropout needs `dropout_key`."""
        branch = self.self_attention(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + self._drop(branch, "attention", dropout_key)
        branch = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + self._drop(branch, "mlp", dropout_key)

    def _drop(self, branch: Tensor, place: str, key: DropoutKey | None) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return branch
        assert key is not None, "dropout needs (step, microbatch)"
        generator = torch.Generator(branch.device)
        (step, microbatch), start = key[:2], sum(key[2:])
        generator.manual_seed(derive_seed(self.seed, self.layer_number, place, step, microbatch))
        keep = branch.new_empty(start + branch.shape[0], *branch.shape[1:])
        keep.bernoulli_(1.0 - self.dropout, generator=generator)
        keep = keep[start:]
        return branch * keep / (1.0 - self.dropout)
