"""Tiny models of images and audio; importing the module adds them to the builders of tiny.py."""

import json
from pathlib import Path
from typing import Any

from tests import tiny, tiny_multimodal
from tests.tiny import SMALL, STARS, hf
from tests.tiny_tokenizers import bert_tokenizer, roberta_tokenizer

SIZE = {"height": 32, "width": 32}
PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "initializer_range": 0.5,
}
VISION = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 32}


def vit_base() -> list[Any]:
    config = hf.ViTConfig(image_size=32, patch_size=8, **SMALL)
    return [hf.ViTModel(config), hf.ViTImageProcessorPil(size=SIZE)]


def segformer() -> list[Any]:
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**PYRAMID, **STARS))
    return [model, hf.SegformerImageProcessorPil(size=SIZE)]


def glpn() -> list[Any]:
    model = hf.GLPNForDepthEstimation(hf.GLPNConfig(**PYRAMID))
    return [model, hf.GLPNImageProcessorPil(size_divisor=8)]


def yolos() -> list[Any]:
    config = hf.YolosConfig(
        image_size=[32, 48], patch_size=8, num_detection_tokens=6, **SMALL, **STARS
    )
    processor = hf.YolosImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 48})
    return [hf.YolosForObjectDetection(config), processor]


def detr(head: str) -> list[Any]:
    backbone = hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"] if head == "Segmentation" else None,
    )
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        num_queries=6,
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 8 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        init_std=0.5,
        **STARS,
    )
    model = getattr(hf, f"DetrFor{head}")(config)
    size = {"shortest_edge": 64, "longest_edge": 96}
    return [model, hf.DetrImageProcessorPil(size=size)]


def new_tokenizer() -> Any:
    """BERT's tokenizer without token types, which these models do not accept."""
    tokenizer = bert_tokenizer(32)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        **SMALL,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 32,
        "projection_dim": 32,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def text_and_image(family: str, head: str, size: dict[str, int]) -> list[Any]:
    tokenizer = new_tokenizer()
    config = getattr(hf, f"{family}Config")(
        text_config=text_config(tokenizer),
        vision_config=VISION,
        projection_dim=32,
        initializer_factor=5.0,
    )
    processor = getattr(hf, f"{family}ImageProcessorPil")(size=size, crop_size=SIZE)
    return [getattr(hf, f"{family}{head}")(config), processor, tokenizer]


def clap() -> list[Any]:
    tokenizer = roberta_tokenizer()
    audio = {
        "window_size": 4,
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_size": 2,
        "patch_stride": [2, 2],
        "hidden_size": 32,
        "patch_embeds_hidden_size": 16,
        "depths": [2, 2],
        "num_attention_heads": [2, 2],
        "num_hidden_layers": 2,
        "projection_dim": 32,
        "initializer_factor": 5.0,
    }
    config = hf.ClapConfig(
        text_config=text_config(tokenizer, initializer_factor=5.0, max_position_embeddings=34),
        audio_config=audio,
        projection_dim=32,
    )
    extractor = hf.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=16000,
        hop_length=160,
        fft_window_size=512,
        max_length_s=1,
        frequency_max=8000,
        truncation="rand_trunc",
    )
    return [hf.ClapModel(config), extractor, tokenizer]


def vits() -> list[Any]:
    """Without the noise that makes each call's speech different."""
    letters = ["<pad>", "<unk>", *" abcdefghijklmnopqrstuvwxyz'"]
    vocab = Path(tiny._root.name) / "vits-letters.json"
    vocab.write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    config = hf.VitsConfig(
        vocab_size=len(letters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=16,
        spectrogram_bins=9,
        use_stochastic_duration_prediction=False,
        noise_scale=0.0,
        noise_scale_duration=0.0,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        duration_predictor_filter_channels=16,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return [hf.VitsModel(config), hf.VitsTokenizer(str(vocab), phonemize=False)]


def superglue() -> list[Any]:
    detector = hf.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=32,
        descriptor_decoder_dim=32,
        keypoint_threshold=0.0,
        max_keypoints=20,
        initializer_range=0.5,
    )
    config = hf.SuperGlueConfig(
        keypoint_detector_config=detector,
        hidden_size=32,
        keypoint_encoder_sizes=[16, 32],
        gnn_layers_types=["self", "cross"],
        num_attention_heads=2,
        sinkhorn_iterations=5,
        initializer_range=0.5,
    )
    processor = hf.SuperGlueImageProcessorPil(size={"height": 64, "width": 80})
    return [hf.SuperGlueForKeypointMatching(config), processor]


def decider() -> list[Any]:
    """A chat model whose tokenizer has letters for the options of a decision."""
    from transformers.decision import DecisionConfig

    labels = {"noul": ["Y", "N"], "choice": list("ABCD"), "score": list("ABCD")}
    return [*tiny.BUILDERS["llama-lm"](), DecisionConfig(labels=labels)]


tiny.BUILDERS.update(
    {
        "superglue": superglue,
        "decider": decider,
        "vit-base": vit_base,
        "segformer": segformer,
        "glpn": glpn,
        "yolos": yolos,
        "detr": lambda: detr("ObjectDetection"),
        "detr-panoptic": lambda: detr("Segmentation"),
        "clip": lambda: text_and_image("CLIP", "Model", {"shortest_edge": 32}),
        "owlvit": lambda: text_and_image("OwlViT", "ForObjectDetection", SIZE),
        "clap": clap,
        "vits": vits,
        "llava": tiny_multimodal.llava,
    }
)
