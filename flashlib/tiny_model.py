"""A small language model of the Llama family, written out, in which the attention is an argument.

Nothing in it knows how attention is computed: `attend(q, k, v)` gets queries of nheads heads and keys and values of
nheads_kv, and returns the heads' outputs. So attention can be swapped, and the logits compared.

Source: the blocks are those of Llama 3, https://arxiv.org/abs/2407.21783 (section 3.2); RoPE: RoFormer,
https://arxiv.org/abs/2104.09864 (section 3.2.2).
"""

import torch
import torch.nn.functional as F
from torch import nn

from flashlib.attention import flash_attention
from flashlib.varlen import flash_attention_varlen

ROPE_BASE = 10000.0


def sdpa(q, k, v):
    """Attend with PyTorch's own causal attention; (batch, nheads, seqlen, head_dim), K/V heads shared."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash(q, k, v):
    """Attend with ours."""
    return flash_attention(q, k, v, causal=True)


def packed(cu_seqlens, longest):
    """Return an attend for sequences that lie one behind the other in a batch of one."""

    def attend(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return out.transpose(0, 1)[None]

    return attend


def rotate(x, positions):
    """Turn pairs of columns of x, (batch, nheads, seqlen, head_dim), by angles that grow with the position (RoPE)."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention: projections, RoPE, attend, projection."""

    def __init__(self, width, nheads, nheads_kv):
        super().__init__()
        self.nheads, self.nheads_kv, self.head_dim = nheads, nheads_kv, width // nheads
        self.to_q = nn.Linear(width, nheads * self.head_dim, bias=False)
        self.to_k = nn.Linear(width, nheads_kv * self.head_dim, bias=False)
        self.to_v = nn.Linear(width, nheads_kv * self.head_dim, bias=False)
        self.to_out = nn.Linear(nheads * self.head_dim, width, bias=False)

    def forward(self, x, positions, attend):
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.to_q, self.to_k, self.to_v))
        # [batch, seqlen, heads, head_dim] -> [batch, heads, seqlen, head_dim]: a view, nothing is copied.
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        out = attend(rotate(q, positions), rotate(k, positions), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind an RMSNorm and added to what came in."""

    def __init__(self, width, nheads, nheads_kv):
        super().__init__()
        self.attention = Attention(width, nheads, nheads_kv)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm_attention, self.norm_feed = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x, positions, attend):
        x = x + self.attention(self.norm_attention(x), positions, attend)
        y = self.norm_feed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, logits: tokens (batch, seqlen) -> (batch, seqlen, vocabulary).

    Args:
        vocabulary: number of tokens. width: columns of the model, nheads times an even head_dim of at least 16.
        nheads, nheads_kv: heads of queries; of keys and values, which divide them. layers: blocks.
    """

    def __init__(self, vocabulary=101, width=64, nheads=4, nheads_kv=2, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, nheads, nheads_kv) for _ in range(layers))
        self.norm, self.to_logits = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, attend=flash, positions=None):
        """Return logits; positions (seqlen,) default to 0, 1, …"""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.to_logits(self.norm(x))
