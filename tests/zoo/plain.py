"""Models without a model library: torch's own encoder, and a script in the manner of nanoGPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.text import VOCAB


def _encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        36,
        nhead=3,
        dim_feedforward=60,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=norm_first,
    )
    # Nested tensors belong to an inference fast path; the constructor warns where they do not fit.
    return nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(36), enable_nested_tensor=False).eval()


def encoder_norm_first() -> nn.Module:
    return _encoder(True)


def encoder_norm_last() -> nn.Module:
    return _encoder(False)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, length, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Token and position embeddings, pre-norm blocks, a tied head."""

    def __init__(self, width: int = 40, heads: int = 5, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        length = 32
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, width),
                "wpe": nn.Embedding(length, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(width, heads, length, dropout) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.transformer.drop(self.transformer.wte(input_ids) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def nanogpt() -> nn.Module:
    return NanoGPT().eval()
