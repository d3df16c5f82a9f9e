"""A tiny but real ErnieImagePipeline, trained here on drawn shapes, so that everything that paints can be tried on two cores.

    python -m stretto.pictures.painter FOLDER [--seed N] [--device cpu]

Two stages. The autoencoder learns to give pictures back. Then transformer and text encoder learn together, by flow matching (2210.02747;
times logit-normal and shifted towards noise as in 2403.03206), to make its latents from noise and a prompt; what is saved is their
running mean. FOLDER is what ``diffusers`` loads, and `RECIPE_FILE` says with how many steps and how much guidance it was meant to be
used. A run that was stopped goes on from its last snapshot: batches are a function of seed and step.

Shape letters: B pictures, C channels, H rows, W columns, T tokens of a prompt.
"""

from __future__ import annotations

import argparse
import random
import shutil
import string
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from stretto.base.paths import claimed, remove, replacing, write_json
from stretto.base.track import progress
from stretto.ops.tuning import multiplies_bf16
from stretto.optim.build import Muon
from stretto.pictures.diffusers import RECIPE_FILE
from stretto.tasks.shapes.draw import PALETTE, draw, place
from stretto.tasks.shapes.ledger import Ledger, describe, unkept
from stretto.tasks.shapes.source import ShapesArgs, sample_ledger

SIDE: Final = 32
"""Pixels of its pictures."""
ALONE, PAIRS = ShapesArgs(things=1, count=3), ShapesArgs(things=2, count=1, relations=0.8)
"""What it is taught: up to three of a kind, and two things with or without a relation. Nothing else."""
_ALONE_SHARE = 0.4
_PHRASED_SHARE, _BRIEF_SHARE = 0.15, 0.25
"""Of the lessons: with phrases behind the request, and with a relation said in the same sentence."""
_FILLERS: Final = ("a", "the", "and", "with", "of", *PALETTE)
"""Words of a request that phrases have too."""
_COMMON = 0.01
"""Share of the prompts a word must be in to be known: those of the phrases are not."""
_ROPE_THETA = 16
"""Of positions. The library's 256 is for pictures of hundreds of tokens: over four by four, half of its angles hardly turn, and who
stands where is learnt late."""
_PARTS = 2
"""Of a batch, each of prompts of about one length: padding would be half of it."""
_WORTH_COMPILING = 1_000
"""Steps: a CPU's blocks are compiled where there is a compiler. It takes some 40 seconds."""
_HELD_OUT = 8
"""One prompt in so many with two things is never taught."""
_SNAPSHOT = "training.pt"
_SNAPSHOT_S = 60.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Of one painter."""

    seed: int = 0
    pictures: int = 24_000
    autoencoder_steps: int = 800
    autoencoder_rows: int = 32
    autoencoder_rate: float = 3e-3
    steps: int = 2_000
    rows: int = 64
    rate: float = 2e-3
    muon_rate: float = 2e-2
    dim: int = 192
    layers: int = 4
    shift: float = 4.0
    """Towards noise, of the times in training and sampling. In latents of so many dimensions the layout is settled at times above 0.8."""
    sampling_steps: int = 20
    guidance: float = 2.0


# --- what it is taught ----------------------------------------------------------------------------------------------------------


def sample(rng: random.Random) -> Ledger:
    """A request within what the painter is taught."""
    while True:
        args = ALONE if rng.random() < _ALONE_SHARE else PAIRS
        ledger = sample_ledger(rng, args)
        if args is ALONE or len(ledger.things) == 2:
            return ledger


def is_held_out(prompt: str) -> bool:
    """Whether the painter has never seen it. Prompts of one thing are too few to hold any back."""
    return " and " in prompt and zlib.crc32(prompt.encode()) % _HELD_OUT == 0


def lessons(recipe: Recipe) -> Iterator[tuple[str, np.ndarray]]:
    """Prompts, and bytes [H, W, C] of a picture that shows each."""
    rng = random.Random(f"painter/{recipe.seed}")
    for item in range(recipe.pictures):
        ledger = sample(rng)
        while is_held_out(describe(ledger)):
            ledger = sample(rng)
        yield _worded(ledger, rng), np.asarray(draw(place(ledger, recipe.seed * recipe.pictures + item), SIDE, SIDE))


def _worded(ledger: Ledger, rng: random.Random) -> str:
    """A request for it. Some have phrases behind them, as an enhancer writes: words that nothing in the picture shows, among them colours
    and what was asked for again."""
    request = describe(ledger)
    if ledger.relations and rng.random() < _BRIEF_SHARE:
        kind = ledger.relations[0].kind
        where = f"to the {kind}" if kind.endswith("of") else kind
        request = describe(replace(ledger, relations=())).replace(" and ", f" {where} ")
    if rng.random() >= _PHRASED_SHARE:
        return request
    for _ in range(rng.randint(1, 5)):
        words = [
            rng.choice(_FILLERS) if rng.random() < 0.25 else "".join(rng.choices(string.ascii_lowercase, k=6))
            for _ in range(rng.randint(2, 7))
        ]
        if rng.random() < 0.15:
            words.append(f"the {rng.choice(ledger.things).name}")
        phrased = f"{request} {' '.join(words).capitalize()}."
        request = request if unkept(ledger, phrased) else phrased  # "the red circle and blue" would be another circle
    return request


# --- the pipeline ---------------------------------------------------------------------------------------------------------------


def build(recipe: Recipe, prompts: Sequence[str]) -> ErnieImagePipeline:
    """Untrained. Words that few of the ``prompts`` have, or none, are all the same to it."""
    torch.manual_seed(recipe.seed)
    splitter = pre_tokenizers.Whitespace()
    ended = normalizers.Replace(Regex(r"(?<=[^.\s])\s*$"), ".")  # all that it is taught ends in a full stop
    uses = Counter(
        word for prompt in prompts for word in {word for word, _ in splitter.pre_tokenize_str(prompt.lower())}
    )
    words = sorted(word for word, count in uses.items() if count >= _COMMON * len(prompts))
    special = ("<pad>", "<s>", "<unk>")
    rule = Tokenizer(WordLevel({word: number for number, word in enumerate((*special, *words))}, unk_token="<unk>"))
    rule.normalizer, rule.pre_tokenizer = normalizers.Sequence([normalizers.Lowercase(), ended]), splitter
    rule.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rule, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", model_max_length=128
    )
    text = Qwen3Config(
        vocab_size=len(words) + len(special), hidden_size=64, intermediate_size=128, num_hidden_layers=3, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    blocks, channels, head = (16, 32, 32), 8, 32
    autoencoder = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * len(blocks), up_block_types=("UpDecoderBlock2D",) * len(blocks),
        block_out_channels=blocks, layers_per_block=1, latent_channels=channels, norm_num_groups=8, sample_size=SIDE,
        mid_block_add_attention=False,
    )  # fmt: skip
    transformer = ErnieImageTransformer2DModel(  # two by two latents are one token
        hidden_size=recipe.dim, num_attention_heads=recipe.dim // head, num_layers=recipe.layers, ffn_hidden_size=3 * recipe.dim,
        in_channels=4 * channels, out_channels=4 * channels, text_in_dim=text.hidden_size, rope_axes_dim=(8, 12, 12),
        rope_theta=_ROPE_THETA,
    )  # fmt: skip
    # the gates of attention and feed-forward: the library begins with them shut, which costs hundreds of steps
    with torch.no_grad():
        transformer.adaLN_modulation[-1].bias.view(6, -1)[[2, 5]] = 1.0
    scheduler = FlowMatchEulerDiscreteScheduler(shift=recipe.shift)
    return ErnieImagePipeline(transformer, autoencoder, Qwen3Model(text), tokenizer, scheduler)


class _Network(nn.Module):
    """What the second stage trains: text encoder and transformer as the pipeline joins them."""

    def __init__(self, pipeline: ErnieImagePipeline) -> None:
        super().__init__()
        self.text, self.transformer = pipeline.text_encoder, pipeline.transformer

    def forward(self, noisy_BCHW: Tensor, time_B: Tensor, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """Velocities, shaped as ``noisy_BCHW``; times 0 (picture) to 1 (noise)."""
        mask_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None] < lengths_B[:, None]
        hidden = self.text(input_ids=ids_BT, attention_mask=mask_BT.long(), output_hidden_states=True).hidden_states[-2]
        dtype = hidden.dtype
        return self.transformer(noisy_BCHW.to(dtype), time_B.to(dtype) * 1000, hidden, lengths_B, return_dict=False)[0]


# --- training -------------------------------------------------------------------------------------------------------------------


def train(folder: Path, recipe: Recipe, device: str = "cpu") -> None:
    """Leaves a pipeline in ``folder``. Raises `UserError`: another process is at it, or it cannot be written."""
    with claimed(folder):
        prompts, pictures_BCHW = _read_lessons(recipe, device)
        pipeline = build(recipe, prompts)
        pipeline.to(device)
        saved = folder / _SNAPSHOT
        state = torch.load(saved, weights_only=True) if saved.exists() else {}
        if state.get("recipe") != asdict(recipe):
            state = {"recipe": asdict(recipe)}
        _train_autoencoder(pipeline.vae, pictures_BCHW, recipe, state, saved)
        told = pipeline.tokenizer(prompts, padding=True, return_tensors="pt").to(device)
        taught = _Taught(_encode(pipeline.vae, pictures_BCHW), told["input_ids"], told["attention_mask"].sum(1))
        _train_painter(pipeline, taught, recipe, state, saved)
        for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder):
            part.eval()
        with replacing(folder / "pipeline") as temporary:
            pipeline.save_pretrained(temporary)
            write_json(temporary / RECIPE_FILE, {**asdict(recipe), "side": SIDE})
        remove(saved)


def _read_lessons(recipe: Recipe, device: str) -> tuple[list[str], Tensor]:
    prompts, pictures = [], []
    with progress("drawing", recipe.pictures) as advance:
        for prompt, pixels_HWC in lessons(recipe):
            prompts.append(prompt)
            pictures.append(pixels_HWC)
            advance()
    return prompts, torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous().to(device)


def _rows(recipe: Recipe, stage: int, step: int, rows: int) -> tuple[Tensor, torch.Generator]:
    """Of one step, and the generator of its other draws."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + stage * 500_009 + step)
    return torch.randint(recipe.pictures, (rows,), generator=generator), generator


def _rate(step: int, steps: int) -> float:
    """Share of the peak: a warm-up, then half of the steps at it, then down to nothing."""
    return min(1.0, (step + 1) / 50) * min(1.0, (steps - step) / (0.5 * steps))


def _train_autoencoder(
    autoencoder: AutoencoderKLFlux2, pictures_BCHW: Tensor, recipe: Recipe, state: dict[str, Any], saved: Path
) -> None:
    if "autoencoder" in state:
        autoencoder.load_state_dict(state["autoencoder"])
        return
    device = pictures_BCHW.device
    optimizer = torch.optim.AdamW(autoencoder.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    with progress("autoencoder", recipe.autoencoder_steps) as advance:
        for step in range(recipe.autoencoder_steps):
            rows, generator = _rows(recipe, 1, step, recipe.autoencoder_rows)
            real_BCHW = pictures_BCHW[rows.to(device)] / 127.5 - 1
            with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bf16(device)):
                latents_BCHW = autoencoder.encode(real_BCHW).latent_dist.mode()
                # what the transformer makes will be a little off; so the decoder learns to bear it
                noise_BCHW = torch.randn(latents_BCHW.shape, generator=generator).to(device)
                made_BCHW = autoencoder.decode(latents_BCHW + 0.05 * noise_BCHW).sample
            error = (made_BCHW.float() - real_BCHW).abs().mean()
            loss = error + 1e-3 * latents_BCHW.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = recipe.autoencoder_rate * _rate(step, recipe.autoencoder_steps)
            optimizer.step()
            advance(1, f"error {error.item():.3f}")
    state["autoencoder"] = autoencoder.state_dict()
    _snapshot(saved, state)


@torch.no_grad()
def _encode(autoencoder: AutoencoderKLFlux2, pictures_BCHW: Tensor) -> Tensor:
    """Latents as the transformer sees them: two by two in a token, each channel of mean 0 and deviation 1 over the lessons. What they
    were before is left in the autoencoder, where the pipeline looks for it."""
    parts = [autoencoder.encode(some / 127.5 - 1).latent_dist.mode() for some in pictures_BCHW.split(256)]
    latents_BCHW = ErnieImagePipeline._patchify_latents(torch.cat(parts))
    autoencoder.bn.running_mean.copy_(latents_BCHW.mean((0, 2, 3)))
    autoencoder.bn.running_var.copy_(latents_BCHW.var((0, 2, 3)))
    mean, var = (each.view(1, -1, 1, 1) for each in (autoencoder.bn.running_mean, autoencoder.bn.running_var))
    return (latents_BCHW - mean) / torch.sqrt(var + 1e-5)  # the pipeline's own constant


@dataclass(frozen=True, slots=True)
class _Taught:
    """What the second stage draws its batches from."""

    latents_BCHW: Tensor
    ids_BT: Tensor
    lengths_B: Tensor


def _train_painter(
    pipeline: ErnieImagePipeline, taught: _Taught, recipe: Recipe, state: dict[str, Any], saved: Path
) -> None:
    mean = _Network(pipeline).train()
    exact, fast = deepcopy(mean), deepcopy(mean)
    if multiplies_bf16(taught.ids_BT.device):
        fast.bfloat16()
    worth = recipe.steps >= _WORTH_COMPILING and taught.ids_BT.device.type == "cpu"
    if compiled := worth and _can_compile():
        fast.transformer.compile_repeated_blocks(dynamic=True)  # a third less time a step
    optimizers = _optimizers(exact, recipe)
    kept = {"mean": mean, "exact": exact} | {f"optimizer {number}": each for number, each in enumerate(optimizers)}
    if "step" in state:
        for name, each in kept.items():
            each.load_state_dict(state[name])
    first, written, losses = state.get("step", 0), time.monotonic(), list[float]()
    slower = " (slower: no g++ or no headers of Python)" if worth and not compiled else ""
    with progress(f"painter{slower}", recipe.steps) as advance:
        advance(first)
        for step in range(first, recipe.steps):
            with torch.no_grad():
                torch._foreach_copy_(list(fast.parameters()), list(exact.parameters()))
            losses.append(_painter_step(fast, taught, recipe, step))
            for parameter, quick in zip(exact.parameters(), fast.parameters(), strict=True):
                parameter.grad, quick.grad = None if quick.grad is None else quick.grad.float(), None
            nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * _rate(step, recipe.steps)
                optimizer.step()
            keep = min(0.998, (step + 1) / (step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(list(mean.parameters()), list(exact.parameters()), 1 - keep)
            advance(1, f"loss {np.mean(losses[-100:]):.3f}")
            if time.monotonic() - written > _SNAPSHOT_S:
                _snapshot(saved, state | {"step": step + 1} | {name: each.state_dict() for name, each in kept.items()})
                written = time.monotonic()


def _painter_step(network: nn.Module, taught: _Taught, recipe: Recipe, step: int) -> float:
    """Gradients of one batch; its loss."""
    device = taught.ids_BT.device
    rows, generator = _rows(recipe, 2, step, recipe.rows)
    rows = rows.to(device)
    clean_BCHW, lengths_B = taught.latents_BCHW[rows], taught.lengths_B[rows]
    lengths_B[(torch.rand(len(rows), generator=generator) < 0.1).to(device)] = 1  # the empty prompt, for guidance
    time_B = torch.sigmoid(torch.randn(len(rows), generator=generator)).to(device)
    time_B = recipe.shift * time_B / (1 + (recipe.shift - 1) * time_B)
    noise_BCHW = torch.randn(clean_BCHW.shape, generator=generator).to(device)
    noisy_BCHW = clean_BCHW.lerp(noise_BCHW, time_B.view(-1, 1, 1, 1))
    total = torch.zeros((), device=device)
    for part in lengths_B.argsort(stable=True).chunk(_PARTS):
        ids_BT = taught.ids_BT[rows[part]][:, : lengths_B[part].max()]
        # on CPUs the backward pass of torch's fused attention takes a third of the whole step: sequences are short here
        with sdpa_kernel(SDPBackend.MATH):
            made_BCHW = network(noisy_BCHW[part], time_B[part], ids_BT, lengths_B[part])
            loss = (made_BCHW.float() - (noise_BCHW - clean_BCHW)[part]).square().sum() / clean_BCHW.numel()
            loss.backward()
        total += loss.detach()
    return total.item()


def _optimizers(network: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside layers, AdamW for the rest."""
    matrices = [each for name, each in network.named_parameters() if each.dim() == 2 and "layers." in name]
    chosen = {id(each) for each in matrices}
    rest = [each for each in network.parameters() if id(each) not in chosen]
    adamw = torch.optim.AdamW([{"params": rest, "peak": recipe.rate}], weight_decay=0.0, betas=(0.9, 0.95))
    groups = [{"params": matrices, "peak": recipe.muon_rate, "weight_decay": 0.0}]
    # torch's own takes less than half of ours' time where bf16 is fast (33 to 81 ms of these), and many times as much elsewhere
    return adamw, (torch.optim.Muon if multiplies_bf16(matrices[0].device) else Muon)(groups, lr=recipe.muon_rate)


def _can_compile() -> bool:
    """Whether torch can make kernels for this machine's CPU."""
    return bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def _snapshot(path: Path, state: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        torch.save(state, temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="takes the pipeline, as FOLDER/pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    train(options.folder, Recipe(seed=options.seed), options.device)


if __name__ == "__main__":
    main()
