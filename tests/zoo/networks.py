"""Networks of torchvision, MONAI, timm, transformers, segmentation-models-pytorch, nnU-Net and torch.nn.

All are small instances with random weights: few classes, small pictures. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """How to make a module, and what it takes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    """By the names of the arguments of ``forward``."""


class Picked(nn.Module):
    """A module whose outputs are one tensor: the first of floating point, or the one named ``logits``."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = inner
        taken = inspect.signature(inner.forward).parameters
        self.names = names if taken.keys() >= set(names) else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        given = (x,) if other is None else (x, other)
        if self.names is None:
            return _first(self.inner(*given))
        return _first(self.inner(**dict(zip(self.names, given, strict=True))))


def _first(made: Any) -> Tensor:
    if isinstance(made, Tensor):
        return made
    if isinstance(made, Mapping):
        return _first(next(made[key] for key in ("logits", "out", "last_hidden_state", *made) if key in made))
    return _first(made[0])


RATES = (
    *("p", "drop_prob", "dropout", "attn_drop", "dropout_rate", "attention_dropout", "drop_rate"),
    "drop_connect_rate",
)


def calm(module: nn.Module) -> nn.Module:
    """Without random numbers: Dropout, stochastic depth and their like let everything pass."""
    for part in module.modules():
        for name in RATES:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


def of(library: str, name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """A class or function of a library, called when the network is wanted."""

    def make() -> nn.Module:
        found: nn.Module = getattr(importlib.import_module(library), name)(*args, **options)
        return found

    return make


def images(size: int, channels: int = 3, axes: int = 2, name: str = "x") -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(BATCH, channels, *(size,) * axes)}


def tokens(*names: str, length: int = 12, vocabulary: int = 64) -> Callable[[], Inputs]:
    return lambda: {name: torch.randint(2, vocabulary, (BATCH, length)) for name in names}


def vision(name: str, size: int = 64, *, where: str = "torchvision.models", **options: Any) -> Network:
    return Network(of(where, name, **{"num_classes": 5, "weights": None, **options}), images(size))


def monai(name: str, size: int = 16, axes: int = 3, *, bare: bool = False, **options: Any) -> Network:
    both = {} if bare else {"in_channels": 1, "out_channels": 2, "spatial_dims": axes}
    return Network(of("monai.networks.nets", name, **{**both, **options}), images(size, 1, axes))


def timm(name: str, size: int = 64, **options: Any) -> Network:
    return Network(of("timm", "create_model", name, pretrained=False, num_classes=5, **options), images(size))


def smp(name: str, encoder: str = "resnet18", size: int = 64) -> Network:
    made = of("segmentation_models_pytorch", name, encoder_name=encoder, encoder_weights=None, classes=2)
    return Network(made, images(size))


def hf(name: str, config: str, inputs: Callable[[], Inputs], **options: Any) -> Network:
    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        found: nn.Module = getattr(library, name)(getattr(library, config)(**options))
        return found

    return Network(make, inputs)


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 32}
IDS = tokens("input_ids")
VIDEO = "torchvision.models.video"
SEGMENT = {"where": "torchvision.models.segmentation", "weights_backbone": None}

TORCHVISION = {
    **{name: vision(name) for name in (
        "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "mobilenet_v2",
        "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0", "efficientnet_b1", "efficientnet_v2_s",
        "convnext_tiny", "regnet_x_400mf", "regnet_y_400mf", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
        "squeezenet1_0", "squeezenet1_1", "mnasnet0_5", "vgg11", "vgg11_bn", "swin_t", "swin_v2_t")},
    "alexnet": vision("alexnet"),
    "googlenet": vision("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": vision("inception_v3", 96, aux_logits=False, init_weights=False),
    "vit": Network(of("torchvision.models", "VisionTransformer", image_size=32, patch_size=8, num_layers=2,
                      num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5), images(32)),
    "fcn_resnet50": vision("fcn_resnet50", **SEGMENT),
    "deeplabv3_resnet50": vision("deeplabv3_resnet50", **SEGMENT),
    "lraspp_mobilenet_v3_large": vision("lraspp_mobilenet_v3_large", **SEGMENT),
    **{name: Network(of(VIDEO, name, num_classes=5, weights=None),
                     lambda: {"x": torch.randn(BATCH, 3, 8, 32, 32)})
       for name in ("r3d_18", "mc3_18", "r2plus1d_18")},
}  # fmt: skip

MONAI = {
    "UNet": monai("UNet", channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "UNet2d": monai("UNet", 32, 2, channels=(4, 8, 16), strides=(2, 2)),
    "BasicUNet": monai("BasicUNet", features=(4, 4, 8, 16, 16, 4), size=32),
    "BasicUNetPlusPlus": monai("BasicUNetPlusPlus", 32, features=(4, 4, 8, 8, 16, 4)),
    "DynUNet": monai("DynUNet", kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
                     filters=(4, 8, 16)),
    "SegResNet": monai("SegResNet", init_filters=8, blocks_down=(1, 2), blocks_up=(1,)),
    "SegResNetDS": monai("SegResNetDS", 32, init_filters=8, blocks_down=(1, 2, 2)),
    "UNETR": monai("UNETR", 32, img_size=32, feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2),
    "SwinUNETR": monai("SwinUNETR", 64, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
    "VNet": monai("VNet", 32),
    "AttentionUnet": monai("AttentionUnet", channels=(4, 8, 16), strides=(2, 2)),
    "HighResNet": monai("HighResNet"),
    "FlexibleUNet": monai("FlexibleUNet", 64, 2, backbone="efficientnet-b0", in_channels=1),
    "RegUNet": monai("RegUNet", num_channel_initial=4, depth=2, out_kernel_initializer="kaiming_uniform",
                     out_activation=None),
    "AutoEncoder": monai("AutoEncoder", channels=(4, 8), strides=(2, 2)),
    "DenseNet121": monai("DenseNet121", 64, 2),
    "SEResNet50": Network(of("monai.networks.nets", "SEResNet50", spatial_dims=2, in_channels=1,
                             num_classes=5), images(64, 1)),
    "EfficientNetBN": Network(of("monai.networks.nets", "EfficientNetBN", "efficientnet-b0", pretrained=False,
                                 spatial_dims=3, in_channels=1, num_classes=5), images(32, 1, 3)),
    "resnet10": Network(of("monai.networks.nets", "resnet10", spatial_dims=3, n_input_channels=1,
                           num_classes=5), images(32, 1, 3)),
    "ViT": Network(of("monai.networks.nets", "ViT", in_channels=1, img_size=16, patch_size=8, hidden_size=24,
                      mlp_dim=32, num_layers=2, num_heads=2, classification=True), images(16, 1, 3)),
    "MedNeXt": monai("MedNeXt", init_filters=4, encoder_expansion_ratio=2, decoder_expansion_ratio=2,
                     bottleneck_expansion_ratio=2, blocks_down=(1, 1), blocks_bottleneck=1,
                     blocks_up=(1, 1)),
    "Regressor": monai("Regressor", bare=True, in_shape=(1, 16, 16, 16), out_shape=(3,), channels=(4, 8),
                       strides=(2, 2)),
}  # fmt: skip

TIMM = {
    **{name: timm(name) for name in (
        "resnet18", "resnet26d", "legacy_seresnet18", "skresnet18", "res2net50_26w_4s",
        "resnest14d", "convnext_atto", "convnextv2_atto", "mobilenetv3_small_050", "tf_efficientnet_b0",
        "efficientnet_lite0", "ghostnet_050", "mobilevit_xxs", "rexnet_100", "regnety_002", "hrnet_w18_small",
        "dla34", "repvgg_a0", "tinynet_e", "edgenext_xx_small", "poolformer_s12", "semnasnet_075",
        "hardcorenas_a", "lcnet_050", "cspresnet50", "ese_vovnet19b_dw")},
    **{name: timm(name, img_size=64) for name in (
        "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "resmlp_12_224",
        "xcit_nano_12_p16_224", "swin_tiny_patch4_window7_224")},
    "pit_ti_224": timm("pit_ti_224", 224),
}  # fmt: skip

SMP = {
    **{name: smp(name) for name in (
        "Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "MAnet")},
    "PAN": smp("PAN", size=128),  # it pools its last level thrice
    "Unet-mobilenet": smp("Unet", "mobilenet_v2"),
    "Unet-efficientnet": smp("Unet", "timm-efficientnet-b0"),
}  # fmt: skip

TRANSFORMERS = {
    "Bert": hf("BertForSequenceClassification", "BertConfig", IDS, **BERT),
    "DistilBert": hf("DistilBertForSequenceClassification", "DistilBertConfig", IDS, vocab_size=64, dim=32,
                     n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=32),
    "Roberta": hf("RobertaForSequenceClassification", "RobertaConfig", IDS, **BERT),
    "Electra": hf("ElectraForSequenceClassification", "ElectraConfig", IDS, **BERT, embedding_size=32),
    "Albert": hf("AlbertForSequenceClassification", "AlbertConfig", IDS, **BERT, embedding_size=16),
    "GPT2": hf("GPT2LMHeadModel", "GPT2Config", IDS, vocab_size=64, n_positions=32, n_embd=32, n_layer=2,
               n_head=2, use_cache=False),
    "Llama": hf("LlamaForCausalLM", "LlamaConfig", IDS, **BERT, use_cache=False),
    "Qwen2": hf("Qwen2ForCausalLM", "Qwen2Config", IDS, **BERT, num_key_value_heads=1, use_cache=False),
    "OPT": hf("OPTForCausalLM", "OPTConfig", IDS, **SMALL, ffn_dim=64, max_position_embeddings=32,
              word_embed_proj_dim=32, use_cache=False),
    "T5": hf("T5ForConditionalGeneration", "T5Config", tokens("input_ids", "decoder_input_ids"),
             vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, use_cache=False),
    "ViT": hf("ViTForImageClassification", "ViTConfig", images(32, name="pixel_values"), hidden_size=32,
              num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8),
    "Segformer": hf("SegformerForSemanticSegmentation", "SegformerConfig", images(64, name="pixel_values"),
                    hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
                    decoder_hidden_size=16),
}  # fmt: skip

_NNUNET = "dynamic_network_architectures.architectures.unet"
_STAGES: dict[str, Any] = {
    "input_channels": 1, "n_stages": 3, "features_per_stage": [4, 8, 16], "conv_op": nn.Conv3d,
    "kernel_sizes": 3, "strides": [1, 2, 2], "num_classes": 2, "n_conv_per_stage_decoder": 1,
    "conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True},
    "nonlin": nn.LeakyReLU, "deep_supervision": False,
}  # fmt: skip
NNUNET = {
    "PlainConvUNet": Network(of(_NNUNET, "PlainConvUNet", **_STAGES, n_conv_per_stage=2), images(16, 1, 3)),
    "ResidualEncoderUNet": Network(
        of(_NNUNET, "ResidualEncoderUNet", **_STAGES, n_blocks_per_stage=2), images(16, 1, 3)
    ),
}


class Sequence(nn.Module):
    """A recurrent layer or an encoder between two linear layers."""

    def __init__(self, layer: nn.Module, out: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 8), layer, nn.Linear(out, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(_first(self.layer(self.first(x))))
        return made


class Translate(nn.Module):
    """Encoder and decoder, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.net = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        made: Tensor = self.out(
            self.net(
                self.table(source),
                self.table(target),
                tgt_mask=self.get_buffer("mask"),
                tgt_is_causal=True,  # else it looks at the numbers of the mask
            )
        )
        return made


def series() -> Inputs:
    return {"x": torch.randn(BATCH, 10, 6)}


PLAIN = {
    "mlp": Network(lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)), series),
    **{
        f"{kind}{' both ways' * both}": Network(
            lambda kind=kind, both=both: Sequence(  # type: ignore[misc]
                getattr(nn, kind)(8, 8, 2, batch_first=True, bidirectional=both), 16 if both else 8
            ),
            series,
        )
        for kind in ("LSTM", "GRU", "RNN")
        for both in (False, True)
    },
    "encoder": Network(
        lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 8), series
    ),
    "transformer": Network(Translate, tokens("source", "target")),
    "attention": Network(
        lambda: nn.TransformerDecoderLayer(6, 2, 12, 0.0, batch_first=True),
        lambda: {"tgt": torch.randn(BATCH, 5, 6), "memory": torch.randn(BATCH, 7, 6)},
    ),
    "upscaling": Network(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.PReLU(8),
            nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2),
        ),
        images(16, name="input"),
    ),
    "depthwise 1d": Network(
        lambda: nn.Sequential(
            nn.Conv1d(6, 12, 3, groups=6, padding=1), nn.Hardswish(), nn.AvgPool1d(2, ceil_mode=True),
            nn.Conv1d(12, 4, 1),
        ),
        lambda: {"input": torch.randn(BATCH, 6, 15)},
    ),
    "convolution lstm stem": Network(
        lambda: nn.Sequential(nn.Conv1d(6, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ELU(),
                              nn.AdaptiveAvgPool1d(1)),
        lambda: {"input": torch.randn(BATCH, 6, 20)},
    ),
}  # fmt: skip

LIBRARIES = {
    "torch.nn": PLAIN,
    "torchvision": TORCHVISION,
    "MONAI": MONAI,
    "timm": TIMM,
    "smp": SMP,
    "transformers": TRANSFORMERS,
    "nnU-Net": NNUNET,
}
NETWORKS: dict[str, Network] = {
    f"{library}/{name}": found for library, table in LIBRARIES.items() for name, found in table.items()
}
