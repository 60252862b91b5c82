"""Small models and a training loop: what every script of these tests may import from the folder beside it."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer, self.mlp = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Four sublayers over eight features; four queries."""

    def __init__(self, dim=8, depth=2):
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 20)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(nn.Module):
    """No residual stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def ids():
    return torch.arange(10).reshape(2, 5)


def loss_of(model):
    return F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(model, *optimizers, steps=2):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
