"""Small vision models: Hugging Face's own classes, and a ResNet in torchvision's style."""

from __future__ import annotations

import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn


def vit() -> nn.Module:
    config = tf.ViTConfig(
        hidden_size=36, num_hidden_layers=4, num_attention_heads=3, intermediate_size=60, image_size=20,
        patch_size=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=7,
    )  # fmt: skip
    return tf.ViTForImageClassification._from_config(config, attn_implementation="sdpa").eval()


def dinov2() -> nn.Module:
    config = tf.Dinov2Config(
        hidden_size=36, num_hidden_layers=4, num_attention_heads=3, mlp_ratio=2, image_size=20, patch_size=5
    )
    return tf.Dinov2Model._from_config(config, attn_implementation="sdpa").eval()


def swin() -> nn.Module:
    config = tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=12, depths=[2, 2, 2], num_heads=[2, 3, 4], window_size=4,
        mlp_ratio=2.0, drop_path_rate=0.2, hidden_dropout_prob=0.1, num_labels=7,
    )  # fmt: skip
    return tf.SwinForImageClassification._from_config(config, attn_implementation="sdpa").eval()


def convnext() -> nn.Module:
    config = tf.ConvNextConfig(
        num_stages=3,
        hidden_sizes=[10, 14, 22],
        depths=[3, 4, 3],
        patch_size=2,
        image_size=32,
        drop_path_rate=0.2,
        num_labels=7,
    )
    return tf.ConvNextForImageClassification(config).eval()


class BasicBlock(nn.Module):
    """torchvision's: the ReLU stands after the add, so no plain sum runs through the network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, blocks of one width, pooling and a head."""

    def __init__(self, width: int = 14, blocks: int = 5, classes: int = 7) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.blocks = nn.Sequential(*(BasicBlock(width) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.stem(x)))
        return self.head(hidden.mean((2, 3)))


def resnet() -> nn.Module:
    return ResNet().eval()
