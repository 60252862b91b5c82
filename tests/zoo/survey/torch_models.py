"""torchvision: one or two classification models of every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.survey.entry import Entry
from tests.zoo.survey.images import images

BATCH, CLASSES = 2, 7


@dataclass(frozen=True)
class Choice:
    """A model: side of its square images in pixels, what is special about it, and how it is made smaller.

    Attributes:
        make: from ``torchvision.models`` and the registered builder to the model; ``None`` for the builder's own.
    """

    model: str
    side: int
    design: str = ""
    options: Mapping[str, Any] | None = None
    make: Callable[[Any], nn.Module] | None = None


def entries() -> list[Entry]:
    """The entries of all families.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    import torchvision  # noqa: F401

    return [entry(choice, family) for family, choices in FAMILIES.items() for choice in choices]


def entry(choice: Choice, family: str) -> Entry:
    """The entry of one choice."""
    return Entry(
        name=f"torchvision/vision/{family}/{choice.model}",
        library="torchvision",
        kind="vision",
        build=partial(_build, choice),
        inputs=partial(images, key="x", batch=BATCH, side=choice.side),
        design=choice.design or family,
    )


def _build(choice: Choice) -> nn.Module:
    from torchvision import models

    if choice.make is not None:
        return choice.make(models).eval()
    return models.get_model(choice.model, weights=None, num_classes=CLASSES, **(choice.options or {})).eval()


# --- families whose builders fix their depth: made from the class behind them


def _densenet(models: Any) -> nn.Module:
    made: nn.Module = models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=CLASSES)
    return made


def _resnet(block: str, models: Any, **options: Any) -> nn.Module:
    made: nn.Module = models.ResNet(getattr(models.resnet, block), [2, 3, 2, 2], num_classes=CLASSES, **options)
    return made


def _resnext(models: Any) -> nn.Module:
    return _resnet("Bottleneck", models, groups=8, width_per_group=4)


def _wide(models: Any) -> nn.Module:
    return _resnet("Bottleneck", models, width_per_group=128)


def _convnext(models: Any) -> nn.Module:
    setting = models.convnext.CNBlockConfig
    widths = [8, 16, 24, 32]
    stages = [
        setting(width, following, layers)
        for width, following, layers in zip(widths, [*widths[1:], None], (2, 2, 4, 2), strict=True)
    ]
    made: nn.Module = models.ConvNeXt(stages, layer_scale=0.1, num_classes=CLASSES)
    return made


def _swin(models: Any, block: Any = None, layer: Any = None, window: int = 4) -> nn.Module:
    options = {} if block is None else {"block": block, "downsample_layer": layer}
    made: nn.Module = models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2, 2, 2],
        num_heads=[2, 2, 4, 4],
        window_size=[window, window],
        num_classes=CLASSES,
        **options,
    )
    return made


def _swin_v2(models: Any) -> nn.Module:
    swin = models.swin_transformer
    return _swin(models, swin.SwinTransformerBlockV2, swin.PatchMergingV2)


def _vit(models: Any) -> nn.Module:
    made: nn.Module = models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=4, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=CLASSES
    )
    return made


def _maxvit(models: Any) -> nn.Module:
    made: nn.Module = models.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 24, 32, 40],
        block_layers=[2, 2, 2, 2],
        head_dim=8,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return made


def _vgg(norm: bool, models: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = models.VGG(models.vgg.make_layers(models.vgg.cfgs["A"], norm), CLASSES, init_weights=False)
    # Nearly all of its 130 million parameters are in the head, which has no part in this.
    made.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, CLASSES))
    made.features = models.vgg.make_layers(models.vgg.cfgs["A"], norm)
    return made


# By the modules of torchvision.models that have classifiers.
FAMILIES: dict[str, tuple[Choice, ...]] = {
    "alexnet": (Choice("alexnet", 64, "no residuals"),),
    "convnext": (Choice("convnext_tiny", 64, "LayerScale", make=_convnext),),
    "densenet": (Choice("densenet121", 64, "concatenation", make=_densenet),),
    "efficientnet": (
        Choice("efficientnet_b0", 64, "inverted bottlenecks, squeeze-excite"),
        Choice("efficientnet_v2_s", 64, "fused inverted bottlenecks"),
    ),
    "googlenet": (Choice("googlenet", 64, "no residuals", options={"init_weights": False, "aux_logits": False}),),
    "inception": (Choice("inception_v3", 80, "no residuals", options={"init_weights": False, "aux_logits": False}),),
    "maxvit": (Choice("maxvit_t", 64, "convolutions, blocks and grids", make=_maxvit),),
    "mnasnet": (Choice("mnasnet0_5", 64, "inverted bottlenecks"),),
    "mobilenetv2": (Choice("mobilenet_v2", 64, "inverted bottlenecks", options={"width_mult": 0.35}),),
    "mobilenetv3": (
        Choice("mobilenet_v3_small", 64, "inverted bottlenecks, squeeze-excite"),
        Choice("mobilenet_v3_large", 64, "inverted bottlenecks, squeeze-excite"),
    ),
    "regnet": (
        Choice("regnet_x_400mf", 64, "post-activation"),
        Choice("regnet_y_400mf", 64, "post-activation, squeeze-excite"),
    ),
    "resnet": (
        Choice("resnet18", 64, "post-activation"),
        Choice("resnet50", 64, "post-activation, bottlenecks", make=partial(_resnet, "Bottleneck")),
        Choice("resnext50_32x4d", 64, "post-activation, grouped bottlenecks", make=_resnext),
        Choice("wide_resnet50_2", 64, "post-activation, wide bottlenecks", make=_wide),
    ),
    "shufflenetv2": (Choice("shufflenet_v2_x0_5", 64, "concatenation"),),
    "squeezenet": (Choice("squeezenet1_0", 64, "no residuals"), Choice("squeezenet1_1", 64, "no residuals")),
    "swin_transformer": (
        Choice("swin_t", 64, "pre-norm, windows", make=_swin),
        Choice("swin_v2_t", 64, "norm after the branch, windows", make=_swin_v2),
    ),
    "vgg": (
        Choice("vgg11", 64, "no residuals", make=partial(_vgg, False)),
        Choice("vgg11_bn", 64, "no residuals", make=partial(_vgg, True)),
    ),
    "vision_transformer": (Choice("vit_b_16", 64, "pre-norm", make=_vit),),
}
