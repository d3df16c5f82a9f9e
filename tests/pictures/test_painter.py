"""The tiny painter: what it is taught, that a stopped training goes on as if nothing had been, and its fast step against the exact one."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from PIL import Image

from stretto.pictures import painter
from stretto.pictures.painter import Recipe, build, is_held_out, lessons, sample, train
from stretto.tasks.shapes.draw import drawable, see, unmet
from stretto.tasks.shapes.ledger import describe, read

TINY = Recipe(pictures=64, autoencoder_steps=3, autoencoder_rows=8, steps=6, rows=8, dim=32, layers=1)


def test_lessons_show_what_they_say_and_leave_prompts_out() -> None:
    some = list(islice(lessons(Recipe()), 300))
    for prompt, pixels_HWC in some:
        asked = drawable(read(prompt))
        assert unmet(asked, see(Image.fromarray(pixels_HWC))) == () and not is_held_out(describe(asked))
    phrased = [prompt for prompt, _ in some if prompt.count(".") > 2]
    assert 5 <= len(phrased) <= 60 and any(" to the left of a" in prompt for prompt, _ in some)
    rng = random.Random(1)
    assert 10 <= sum(is_held_out(describe(sample(rng))) for _ in range(400)) <= 60
    assert [prompt for prompt, _ in islice(lessons(Recipe(seed=1)), 20)] != [prompt for prompt, _ in some[:20]]


def test_a_prompt_needs_no_full_stop() -> None:
    tokenizer = build(TINY, ("A red circle. ", "Two blue squares.")).tokenizer
    whole = tokenizer("A red circle.")["input_ids"]
    assert (
        tokenizer("a red circle")["input_ids"] == tokenizer("A red circle  ")["input_ids"] == whole and len(whole) == 5
    )
    assert tokenizer("")["input_ids"] == whole[:1] and len(tokenizer("a cat")["input_ids"]) == 4


@pytest.mark.slow
def test_a_training_that_was_stopped_ends_where_one_ends_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole", TINY)
    monkeypatch.setattr(painter, "_SNAPSHOT_S", -1.0)
    real, calls = painter._painter_step, [0]

    def stopping(*args: Any) -> float:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(painter, "_painter_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", TINY)
    assert (tmp_path / "stopped/training.pt").exists() and not (tmp_path / "stopped/pipeline").exists()
    train(tmp_path / "stopped", TINY)
    assert calls[0] == 4 + 3  # three were done, the fourth was stopped
    for part in ("vae", "transformer"):
        name = f"pipeline/{part}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    assert not (tmp_path / "stopped/training.pt").exists()


def test_latents_are_scaled_as_the_pipeline_scales_them_back() -> None:
    prompts, pictures_BCHW = painter._read_lessons(TINY, "cpu")
    vae = build(TINY, prompts).vae.eval()
    latents_BCHW = painter._encode(vae, pictures_BCHW)
    assert latents_BCHW.mean((0, 2, 3)).abs().max() < 1e-4
    back_BCHW = latents_BCHW * torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + 1e-5) + vae.bn.running_mean.view(
        1, -1, 1, 1
    )
    with torch.no_grad():
        plain_BCHW = vae.encode(pictures_BCHW / 127.5 - 1).latent_dist.mode()
    torch.testing.assert_close(
        painter.ErnieImagePipeline._unpatchify_latents(back_BCHW), plain_BCHW, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_fast_step_is_the_exact_one_up_to_bf16(compiled: bool) -> None:
    prompts, _ = painter._read_lessons(TINY, "cpu")
    pipeline = build(TINY, prompts)
    torch.nn.init.normal_(
        pipeline.transformer.final_linear.weight, std=0.05
    )  # zero at first: nothing would reach the layers
    told = pipeline.tokenizer(prompts, padding=True, return_tensors="pt")
    latents_BCHW = torch.randn(64, 32, 4, 4, generator=torch.Generator().manual_seed(0))

    taught = painter._Taught(latents_BCHW, told["input_ids"], told["attention_mask"].sum(1))

    def gradient(network: torch.nn.Module) -> tuple[float, torch.Tensor]:
        loss = painter._painter_step(network, taught, TINY, 0)
        return loss, torch.cat([each.grad.float().flatten() for each in network.parameters() if each.grad is not None])

    exact_loss, exact = gradient(painter._Network(pipeline))
    for parameter in pipeline.transformer.parameters():
        parameter.grad = None
    for parameter in pipeline.text_encoder.parameters():
        parameter.grad = None
    network = painter._Network(pipeline).bfloat16()
    if compiled:
        if not painter._can_compile():
            pytest.skip("no g++, or no headers of Python")
        network.transformer.compile_repeated_blocks(dynamic=True)
    fast_loss, fast = gradient(network)
    assert abs(fast_loss / exact_loss - 1) < 2**-7  # bf16 keeps 8 bits; errors of a mean over thousands mostly cancel
    assert torch.nn.functional.cosine_similarity(fast, exact, dim=0) > 0.99
