"""Small backbones and towers within transformers' other models, for those whose defaults are large or trained."""

from __future__ import annotations

from typing import Any


def resnet() -> Any:
    """A small ResNet, for detectors whose default backbone is a trained one of timm's."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24, 32, 40], depths=[2, 2, 2, 2], layer_type="basic", out_indices=[4]
    )


def repvit() -> Any:
    """A small backbone of timm's, for a model that knows no other."""
    from transformers import EdgeTamVisionConfig, TimmWrapperConfig

    backbone = TimmWrapperConfig(
        architecture="repvit_m0_9", model_args={"features_only": True, "out_indices": [0, 1, 2, 3]}
    )
    return EdgeTamVisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[384, 192, 96, 48],
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
        fpn_hidden_size=64,
    )


def fastvit() -> Any:
    """A small image tower of timm's, for a model that knows no other."""
    from transformers import TimmWrapperConfig

    options = {"inference_mode": False, "layers": (2, 2, 2, 2), "embed_dims": (32, 32, 64, 64)}
    return TimmWrapperConfig(architecture="fastvit_sa12", hidden_size=128, model_args=options, do_pooling=False)


def pe_tower() -> Any:
    """A small plain image tower of timm's, for models that know no other."""
    from transformers import TimmWrapperConfig

    options = {"embed_dim": 64, "depth": 4, "num_heads": 4, "img_size": (32, 32)}
    return TimmWrapperConfig(architecture="vit_pe_core_tiny_patch16_384", model_args=options, do_pooling=False)


def swin() -> Any:
    """A Swin transformer of timm's, which hands out states with their channels last."""
    from transformers import TimmBackboneConfig

    return TimmBackboneConfig(
        backbone="swin_tiny_patch4_window7_224", out_indices=[1, 2, 3], use_pretrained_backbone=False
    )


def resnet_3() -> Any:
    config = resnet()
    config.set_output_features_output_indices(None, [2, 3, 4])
    return config


def det_lcnet() -> Any:
    """A convolutional network with a map of features at each of four scales, for detectors of text."""
    from transformers import PPLCNetV4Config

    widths = (16, 24, 32, 40)
    before = (16, *widths)
    # Kernel size, channels in and out, stride, squeeze and excitation; the stem has a stride of 4 already.
    stages = [
        [
            [3, before[stage], width, 1 if stage == 0 else 2, False],
            [3, width, width, 1, True],
            [3, width, width, 1, False],
        ]
        for stage, width in enumerate(widths)
    ]
    return PPLCNetV4Config(
        stem_channels=[3, 8, 16], block_configs=stages, out_features=["stage1", "stage2", "stage3", "stage4"]
    )
