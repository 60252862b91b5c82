"""A small GPT to try the commands on, trained on the text of Python's own documentation topics.

::

    attnres inspect attnres_compile.demo
    attnres run -m attnres_compile.demo --steps 20

An ordinary training script: nothing in it knows of Attention Residuals.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same."""
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return result


class Block(nn.Module):
    """A pre-norm transformer layer: two sublayers of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``int64[batch, time]`` to logits ``[batch, time, 256]``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model() -> GPT:
    """The model that the commands find here."""
    torch.manual_seed(0)
    return GPT()


def example_inputs() -> Tensor:
    """Two rows of text, ``int64[2, 32]``."""
    return text()[:64].view(2, 32)


def text() -> Tensor:
    """Python's documentation topics as bytes, ``int64[length]``."""
    topics = "\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.frombuffer(bytearray(topics), dtype=torch.uint8).long()


def main() -> None:
    """Train for a few steps and print the loss."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = text()
    gpt = GPT(layers=options.layers)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=options.lr)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(data) - 65, (16,))
        batch = torch.stack([data[start : start + 65] for start in starts])
        logits = gpt(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
