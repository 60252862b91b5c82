"""A GPT in plain PyTorch, after nanoGPT, with dropout; nothing in it knows of Attention Residuals.

python examples/nanogpt.py                          # convert it, and train it for a few steps
attnres inspect examples/nanogpt.py                 # what would be converted
attnres verify examples/nanogpt.py --train          # exactness, dropout drawing the same masks in both
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 96
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight", "c_attn.weight", "c_fc.weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig())


example_inputs = (torch.randint(0, 256, (2, 32)), torch.randint(0, 256, (2, 32)))


def main() -> None:
    import attnres_compile as ac

    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = build_model()
    ac.transform(model, example_inputs, ac.AttnResConfig(num_blocks=4, lowering="eager"))
    queries = ac.pseudo_queries(model)
    print(f"converted: {len(queries)} queries, {sum(q.numel() for q in queries.values())} parameters")
    data = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 41):
        starts = torch.randint(0, len(data) - 65, (8,)).tolist()
        batch = torch.stack([data[start : start + 65] for start in starts])
        _, loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            furthest = max(query.norm().item() for query in queries.values())
            print(f"step {step:2}: loss {loss.item():.3f}, longest query {furthest:.3f}")


if __name__ == "__main__":
    main()
