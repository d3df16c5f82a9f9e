"""A tiny ErnieImagePipeline without training, for tests of the diffusers backend: real classes, real files."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

WORDS = ("<pad>", "<s>", "<unk>", ".", "a", "blue", "circle", "red", "squares", "two")


def build(dim: int) -> ErnieImagePipeline:
    """``dim``: width of the transformer, a multiple of 32."""
    torch.manual_seed(0)
    rule = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    rule.normalizer, rule.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    rule.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rule, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", model_max_length=128
    )
    text = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    blocks, channels = (16, 32, 32), 8
    autoencoder = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * len(blocks), up_block_types=("UpDecoderBlock2D",) * len(blocks),
        block_out_channels=blocks, layers_per_block=1, latent_channels=channels, norm_num_groups=8, sample_size=32,
        mid_block_add_attention=False,
    )  # fmt: skip
    transformer = ErnieImageTransformer2DModel(
        hidden_size=dim, num_attention_heads=dim // 32, num_layers=1, ffn_hidden_size=3 * dim, in_channels=4 * channels,
        out_channels=4 * channels, text_in_dim=text.hidden_size, rope_axes_dim=(8, 12, 12), rope_theta=16,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=4.0)
    return ErnieImagePipeline(transformer, autoencoder, Qwen3Model(text), tokenizer, scheduler)
