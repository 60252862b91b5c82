"""timm: one or a few models of every module of ``timm.models``, made small by the options that the family takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.survey.entry import Entry
from tests.zoo.survey.images import images

BATCH, CLASSES = 2, 7


@dataclass(frozen=True)
class Choice:
    """One registered model: side of its square images in pixels, and what is said instead of its own options."""

    model: str
    side: int
    design: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def _(model: str, side: int, design: str = "", **options: Any) -> Choice:
    return Choice(model, side, design, options)


def entries() -> list[Entry]:
    """The entries of all families.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    import timm  # noqa: F401

    return [entry(choice, family) for family, choices in FAMILIES.items() for choice in choices]


def entry(choice: Choice, family: str) -> Entry:
    """The entry of one choice."""
    return Entry(
        name=f"timm/vision/{family}/{choice.model}",
        library="timm",
        kind="vision",
        build=partial(_build, choice),
        inputs=partial(images, key="x", batch=BATCH, side=choice.side),
        layers={key: choice.options[key] for key in DEPTH & choice.options.keys()},
        design=choice.design or family,
    )


def _build(choice: Choice) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(choice.model, pretrained=False, num_classes=CLASSES, **choice.options)
    return model.eval()


# Names under which families take their depth.
DEPTH = {"depth", "depths", "layers", "stages", "serial_depths", "parallel_depth", "block_config", "depth_list"}
D2, D3 = (2, 2, 2, 2), (2, 2, 2)
# For families with one add per block: stages of two, three and four.
D4 = (2, 3, 4, 3)
# A plain vision transformer, small.
VIT = {"depth": 4, "embed_dim": 48, "num_heads": 3}

# What each family is asked for. Families that take no depth are taken as they are registered.
FAMILIES: dict[str, tuple[Choice, ...]] = {
    "beit": (
        _("beit_base_patch16_224", 64, "LayerScale, relative positions", img_size=64, **VIT),
        _("beitv2_base_patch16_224", 64, "pre-norm, no LayerScale", img_size=64, init_values=None, **VIT),
    ),
    "byoanet": (
        _("halonet_h1", 256, "post-activation, local attention"),
        _("lambda_resnet26t", 64),
        _("botnet26t_256", 64, img_size=64),
    ),
    "byobnet": (
        _("test_byobnet", 64, "bottlenecks, all skips projected"),
        _("repvgg_a0", 64, "re-parameterised convolutions"),
        _("mobileone_s0", 64, "re-parameterised convolutions"),
        _("regnetz_b16", 64, "inverted bottlenecks, linear output"),
        _("resnet50_clip", 64, "bottlenecks, attention pooling", img_size=64),
    ),
    "cait": (_("cait_xxs24_224", 64, "LayerScale, class attention", img_size=64, **VIT),),
    "coat": (
        _("coat_lite_tiny", 64, "one path", img_size=64, serial_depths=D2, embed_dims=(16, 24, 32, 40)),
        _(
            "coat_tiny",
            64,
            "parallel paths",
            img_size=64,
            serial_depths=D2,
            parallel_depth=2,
            embed_dims=(16, 32, 32, 32),
        ),
    ),
    "convit": (_("convit_tiny", 64, img_size=64, depth=4, embed_dim=48, num_heads=4, local_up_to_layer=2),),
    "convmixer": (_("convmixer_768_32", 56),),
    "convnext": (
        _("test_convnext", 64, "norm first, MLP"),
        _("convnextv2_atto", 64, "GRN", depths=D4, dims=(8, 16, 24, 32)),
        _("convnext_atto", 64, "LayerScale", depths=D4, dims=(8, 16, 24, 32)),
        _("convnext_zepto_rms", 64, "RMSNorm", depths=D4, dims=(8, 16, 24, 32)),
    ),
    "cpubone": (_("cpubone_nano", 64), _("cpubone_b1_dwnorm", 64)),
    "crossvit": (
        _("crossvit_9_240", 240, "two paths that exchange class tokens"),
        _("crossvit_9_dagger_240", 240, "two paths that exchange class tokens"),
    ),
    "csatv2": (_("csatv2", 64, depths=D2, transformer_depths=(0, 0, 2, 2)),),
    "cspnet": (
        _("cs3darknet_focus_s", 64, "cross-stage partial, linear output"),
        _("darknet53", 64, "linear output"),
        _("cspresnet50", 64, "cross-stage partial, post-activation"),
    ),
    "cspnext": (_("cspnext_tiny", 64, depths=D4),),
    "davit": (_("davit_tiny", 64, depths=D2, embed_dims=(12, 16, 24, 32), num_heads=(2, 2, 3, 4)),),
    "deepseek_vit": (
        _("deepseek_vit_412m", 84, "classifier", img_size=84, **VIT),
        _("deepseek_vit_412m_enc", 84, "encoder", img_size=84, **VIT),
    ),
    "deit": (
        _("deit_tiny_distilled_patch16_224", 64, "pre-norm, distillation token", img_size=64, **VIT),
        _("deit3_small_patch16_224", 64, "pre-norm, LayerScale", img_size=64, **VIT),
    ),
    "densenet": (_("densenet121", 64, "concatenation", growth_rate=8, block_config=D2),),
    "dla": (_("dla46x_c", 64), _("dla60_res2net", 64)),
    "dpn": (_("dpn48b", 64),),
    "edgenext": (_("edgenext_xx_small", 64, depths=D4), _("edgenext_small_rw", 64, depths=D4)),
    "efficientformer": (_("efficientformer_l1", 224, depths=(2, 2, 2, 3), num_vit=2),),
    "efficientformer_v2": (_("efficientformerv2_s0", 224, depths=(2, 2, 3, 3)),),
    "efficientnet": (
        _("test_efficientnet", 64, "inverted bottlenecks"),
        _("test_efficientnet_ln", 64, "inverted bottlenecks, LayerNorm"),
        _("efficientnet_b0", 64, "inverted bottlenecks, squeeze-excite"),
        _("mobilenetv2_035", 64, "inverted bottlenecks, linear output"),
        _("mixnet_s", 64, "mixed kernels"),
        _("mobilenet_edgetpu_v2_xs", 64, "edge residuals"),
        _("efficientnet_cc_b0_4e", 64, "conditional convolutions"),
    ),
    "efficientvim": (_("efficientvim_m1", 64), _("efficientvim_m1_dist", 64)),
    "efficientvit_mit": (
        _("efficientvit_b0", 64, depths=(1, 2, 2, 2, 2)),
        _("efficientvit_l1", 64, depths=(1, 1, 1, 2, 2), widths=(8, 16, 32, 32, 64)),
    ),
    "efficientvit_msra": (_("efficientvit_m0", 112, img_size=112, depth=D3),),
    "eva": (
        _("eva02_tiny_patch14_224", 56, "pre-norm, SwiGLU, rotary", img_size=56, **VIT),
        _("eva02_base_patch16_clip_224", 64, "sub-norms", img_size=64, **VIT),
        _("eva_giant_patch14_224", 56, "pre-norm", img_size=56, depth=4, embed_dim=48, num_heads=3),
        _("eva_giant_patch14_clip_224", 56, "post-norm branches", img_size=56, **VIT, use_post_norm=True),
        _("vit_small_patch16_dinov3", 64, "pre-norm, rotary, LayerScale", img_size=64, **VIT),
        _("vit_pe_core_tiny_patch16_384", 64, "norm before the blocks", img_size=64, **VIT),
    ),
    "fasternet": (_("fasternet_t0", 64, "partial convolutions", depths=D4, layer_scale_init_value=0.1),),
    "fastvit": (
        _("fastvit_t8", 64, layers=D2),
        _("fastvit_sa12", 64, "attention in the last stage", layers=D2),
        _("fastvit_mci0", 64, "attention in the last stage, LayerScale", layers=D2),
    ),
    "focalnet": (
        _("focalnet_tiny_srf", 64, "pre-norm"),
        _("focalnet_tiny_lrf", 64, "norm after the branch, LayerScale", use_post_norm=True, layerscale_value=0.1),
    ),
    "gcvit": (_("gcvit_xxtiny", 224),),
    "gemma4_vit": (
        _(
            "gemma4_vit_167m",
            96,
            "sandwich norm, classifier",
            img_size=96,
            depth=4,
            embed_dim=48,
            num_heads=3,
            head_dim=16,
        ),
        _("gemma4_vit_167m_enc", 96, "sandwich norm", img_size=96, depth=4, embed_dim=48, num_heads=3, head_dim=16),
    ),
    "ghostnet": (_("ghostnet_050", 64), _("ghostnetv2_100", 64), _("ghostnetv3_050", 64)),
    "hardcorenas": (_("hardcorenas_a", 64),),
    "hgnet": (_("hgnetv2_b0", 64), _("hgnet_tiny", 64)),
    "hiera": (_("hiera_tiny_224", 64, img_size=64, stages=D2, embed_dim=16),),
    "hieradet_sam2": (
        _("sam2_hiera_tiny", 128, stages=D2, embed_dim=16, window_spec=(8, 4, 4, 2), global_att_blocks=(5, 7)),
    ),
    "hrnet": (_("hrnet_w18_small", 64),),
    "iformer": (
        _("iformer_t", 64, depths=(2, 2, 6, 4), attn_groups=(0, 0, 1, 1), layer_scale_init_value=0.1),
        _("iformer_s", 64),
    ),
    "inception_next": (_("inception_next_atto", 64, depths=D4),),
    "inception_resnet_v2": (_("inception_resnet_v2", 80),),
    "inception_v3": (_("inception_v3", 80),),
    "inception_v4": (_("inception_v4", 80),),
    "lcnetv2": (_("lcnetv2_small", 64),),
    "levit": (_("levit_128s", 224, "batch norm in the branch"), _("levit_conv_128s", 224, "batch norm in the branch")),
    "lowformer": (_("lowformer_b0", 64),),
    "mambaout": (_("test_mambaout", 64), _("mambaout_femto", 64, depths=D4)),
    "maxxvit": (
        _("test_coatnet", 160, "convolutions and attention"),
        _("test_maxvit", 160, "blocks and grids"),
        _("coatnet_nano_cc_224", 224, "ConvNeXt blocks and attention", depths=D2),
        _("maxvit_tiny_pm_256", 128, "parallel block and grid", img_size=128, depths=D2),
        _("maxxvitv2_nano_rw_256", 128, "ConvNeXt blocks, no block attention", img_size=128, depths=D2),
        _("coatnet_bn_0_rw_224", 224, "batch norm", depths=D2),
    ),
    "metaformer": (
        _("poolformer_s12", 64, "pooling, LayerScale"),
        _("poolformerv2_s12", 64, "pooling, residual scale"),
        _("convformer_s18", 64, "separable convolutions, residual scale"),
        _("caformer_s18", 64, "attention, residual scale"),
    ),
    "mlp_mixer": (
        _("mixer_s32_224", 64, "mixer", img_size=64),
        _("gmixer_12_224", 64, "gated mixer", img_size=64),
        _("resmlp_12_224", 64, "affine, LayerScale", img_size=64),
        _("gmlp_ti16_224", 64, "spatial gating", img_size=64),
    ),
    "mobilenetv3": (
        _("mobilenetv3_small_050", 64, "inverted bottlenecks, squeeze-excite"),
        _("mobilenetv4_conv_small_035", 64, "universal inverted bottlenecks"),
        _("mobilenetv4_hybrid_medium_075", 128, "inverted bottlenecks and attention, LayerScale"),
        _("lcnet_035", 64, "no residuals"),
    ),
    "mobilenetv5": (
        _("mobilenetv5_300m", 64, channel_multiplier=0.25),
        _("mobilenetv5_300m_enc", 64, channel_multiplier=0.25),
    ),
    "mobilevit": (_("mobilevit_xxs", 64), _("mobilevitv2_050", 64)),
    "mvitv2": (_("mvitv2_tiny", 64, img_size=64), _("mvitv2_small_cls", 64, img_size=64)),
    "naflexvit": (
        _("naflexvit_base_patch16_gap", 64, "pre-norm", **VIT),
        _("naflexvit_base_patch16_par_gap", 64, "parallel", **VIT),
    ),
    "nasnet": (_("nasnetalarge", 64),),
    "nest": (_("nest_tiny_jx", 224),),
    "nextvit": (_("nextvit_small", 64),),
    "nfnet": (
        _("test_nfnet", 64, "scaled pre-activation"),
        _("nf_regnet_b0", 64, "scaled pre-activation"),
        _("nf_resnet26", 64),
    ),
    "pit": (
        _("pit_ti_224", 64, img_size=64, depth=D3, base_dims=(16, 16, 16)),
        _("pit_ti_distilled_224", 64, "distilled", img_size=64, depth=D3, base_dims=(16, 16, 16)),
    ),
    "pnasnet": (_("pnasnet5large", 64),),
    "pvt_v2": (
        _("pvt_v2_b0", 64, depths=D2),
        _("pvt_v2_b2_li", 64, "linear attention", depths=D2, embed_dims=(16, 16, 40, 64)),
    ),
    "qwen3_vit": (
        _("qwen3_vit_88m", 64, "classifier", img_size=64, **VIT),
        _("qwen3_vit_88m_enc", 64, "encoder", img_size=64, **VIT),
        _("qwen3_vit_88m_merge", 64, "merging encoder", img_size=64, **VIT),
    ),
    "rdnet": (_("rdnet_tiny", 64, "concatenation", growth_rates=(8,) * 7, num_init_features=16),),
    "regnet": (
        _("regnetx_002", 64, "post-activation"),
        _("regnetz_005", 64, "inverted bottlenecks, linear output"),
        _("regnetv_040", 64, "pre-activation"),
    ),
    "repghost": (_("repghostnet_050", 64),),
    "repvit": (_("repvit_m0_9", 64), _("repvit_m1", 64, "legacy form")),
    "res2net": (_("res2net50_48w_2s", 64, layers=D2, channels=(8, 16, 24, 32)),),
    "resnest": (_("resnest14d", 64, channels=(8, 16, 24, 32)),),
    "resnet": (
        _("test_resnet", 64, "post-activation", layers=D2),
        _("resnet26t", 64, "post-activation, bottlenecks", layers=D2, channels=(8, 16, 24, 32)),
        _("ecaresnet26t", 64, "post-activation, channel attention", channels=(8, 16, 24, 32)),
    ),
    "resnetv2": (
        _("resnetv2_50d_gn", 64, "pre-activation, GroupNorm", layers=D4, channels=(128, 128, 128, 128)),
        _("resnetv2_50", 64, "pre-activation, BatchNorm", layers=D4, channels=(16, 32, 48, 64)),
        _("resnetv2_18", 64, "pre-activation, basic blocks", channels=(16, 32, 48, 64)),
    ),
    "rexnet": (_("rexnet_100", 64, "update of some channels"),),
    "selecsls": (_("selecsls42", 64),),
    "senet": (_("legacy_seresnet18", 64),),
    "sequencer": (_("sequencer2d_s", 56, "LSTM", img_size=56, layers=D2, embed_dims=(32, 48, 48, 48)),),
    "shvit": (_("shvit_s1", 128), _("shvit_s4", 128)),
    "sknet": (_("skresnet18", 64, layers=D2, channels=(16, 32, 48, 64)),),
    "starnet": (_("starnet_s050", 64, depths=list(D4)),),
    "swiftformer": (_("swiftformer_xs", 64, layers=[2, 2, 2, 2]),),
    "swin_transformer": (
        _("swin_tiny_patch4_window7_224", 56, "pre-norm", img_size=56, embed_dim=12, depths=D2, num_heads=(2, 2, 4, 4)),
    ),
    "swin_transformer_v2": (
        _(
            "swinv2_tiny_window8_256",
            64,
            "norm after the branch",
            img_size=64,
            embed_dim=12,
            depths=D2,
            num_heads=(2, 2, 4, 4),
        ),
    ),
    "swin_transformer_v2_cr": (
        _(
            "swinv2_cr_tiny_224",
            64,
            "norm after the branch",
            img_size=64,
            embed_dim=12,
            depths=D2,
            num_heads=(2, 2, 4, 4),
            init_values=None,
        ),
        _(
            "swinv2_cr_tiny_ns_224",
            64,
            "norm after the branch, one per stage",
            img_size=64,
            embed_dim=12,
            depths=D2,
            num_heads=(2, 2, 4, 4),
        ),
    ),
    "tiny_vit": (_("tiny_vit_5m_224", 64),),
    "tnt": (
        _("tnt_s_patch16_224", 64, img_size=64, depth=4, embed_dim=48, inner_dim=12, num_heads_outer=3),
        _(
            "tnt_s_legacy_patch16_224",
            64,
            "legacy form",
            img_size=64,
            depth=4,
            embed_dim=48,
            inner_dim=12,
            num_heads_outer=3,
        ),
    ),
    "tresnet": (_("tresnet_m", 64), _("tresnet_v2_l", 64)),
    "twins": (
        _("twins_pcpvt_small", 64, "spatial reduction", img_size=64, depths=D2, embed_dims=(16, 24, 40, 64)),
        _("twins_svt_small", 64, "local and global attention", img_size=64, depths=D2, embed_dims=(16, 32, 64, 64)),
    ),
    "vgg": (_("vgg11_bn", 64, "no residuals", mlp_ratio=0.03125),),
    "visformer": (_("visformer_tiny", 64, img_size=64),),
    "vision_transformer": (
        _("vit_tiny_patch16_224", 64, "pre-norm", img_size=64, **VIT),
        _("test_vit", 64, "pre-norm, class token", img_size=64, depth=4),
        _("test_vit3", 64, "pre-norm, registers, LayerScale", img_size=64),
        _("vit_base_patch16_rpn_224", 64, "norm after the branch", img_size=64, **VIT),
        _("vit_base_patch16_xp_224", 64, "parallel scaling, pre-norm", img_size=64, **VIT),
        _("vit_small_patch16_18x2_224", 64, "two branches of each kind in parallel", img_size=64, **VIT),
        _("vit_base_patch32_clip_224", 64, "norm before the blocks", img_size=64, **VIT),
        _("vit_small_patch14_dinov2", 56, "pre-norm, LayerScale", img_size=56, **VIT),
        _("vit_base_patch16_siglip_224", 64, "attention pooling", img_size=64, **VIT),
        _("aimv2_large_patch14_224", 56, "RMSNorm, SwiGLU", img_size=56, **VIT),
        _("beit3_base_patch16_224", 64, "sub-norms", img_size=64, **VIT),
    ),
    "vision_transformer_hybrid": (
        _("vit_tiny_r_s16_p8_224", 64, "after a stem of convolutions", img_size=64, **VIT),
        _("vit_base_resnet26d_224", 64, "after a ResNet", img_size=64, **VIT),
        _("vit_base_mci_224", 64, "after a stem of convolutions", img_size=64, depth=4),
    ),
    "vision_transformer_relpos": (
        _("vit_relpos_small_patch16_224", 64, "pre-norm", img_size=64, **VIT),
        _("vit_relpos_small_patch16_rpn_224", 64, "norm after the branch", img_size=64, **VIT),
    ),
    "vision_transformer_sam": (
        _("samvit_base_patch16", 64, "windows, neck", img_size=64, global_attn_indexes=(1, 3), window_size=2, **VIT),
        _("samvit_base_patch16_224", 64, "windows", img_size=64, global_attn_indexes=(1, 3), window_size=2, **VIT),
    ),
    "vitamin": (_("vitamin_small_224", 64, "after a stem of convolutions", img_size=64, depth=4),),
    "volo": (_("volo_d1_224", 64, img_size=64),),
    "vovnet": (_("ese_vovnet19b_slim_dw", 64, "concatenation"), _("eca_vovnet39b", 64, "concatenation")),
    "xception": (_("legacy_xception", 96),),
    "xception_aligned": (_("xception41", 96, "post-activation in the branch"), _("xception41p", 96, "pre-activation")),
    "xcit": (_("xcit_nano_12_p16_224", 64, img_size=64, depth=4, embed_dim=48, num_heads=4, tokens_norm=True),),
}
