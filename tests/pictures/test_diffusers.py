"""The backend of the diffusers library, on a tiny pipeline without training: real files, real adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from stretto.base.errors import UserError
from stretto.pictures.agent import painted
from stretto.pictures.backend import Control, Lora, PaintRequest
from stretto.pictures.diffusers import Diffusers
from stretto.pictures.verify import Verdict
from stretto.tasks.shapes.ledger import Ledger, Unkept
from stretto.tasks.shapes.rules import read
from tests.pictures.tiny_pipeline import build


def pipeline(dim: int):
    made = build(dim)
    torch.nn.init.normal_(made.transformer.final_linear.weight, std=0.1)
    torch.nn.init.normal_(made.transformer.adaLN_modulation[-1].weight, std=0.1)
    torch.nn.init.normal_(made.transformer.adaLN_modulation[-1].bias, std=0.5)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diffusers")
    pipeline(64).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def backend(folder: Path) -> Diffusers:
    return Diffusers(folder, "cpu")


def adapter(dim: int, place: Path) -> Path:
    made = pipeline(dim)
    made.transformer.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v", "linear_fc2"], init_lora_weights=False)
    )
    made.save_lora_weights(place, transformer_lora_layers=get_peft_model_state_dict(made.transformer))
    return place


def asked(seed: int = 0, **more) -> PaintRequest:
    return PaintRequest("A red circle.", 32, 32, seed, **{"steps": 3, **more})


def pixels(backend: Diffusers, request: PaintRequest) -> np.ndarray:
    return np.asarray(backend.paint(request), dtype=int)


def test_a_request_is_a_picture_and_the_same_one_again(backend: Diffusers) -> None:
    told: list[float] = []
    picture = backend.paint(asked(), told.append)
    assert picture.size == (32, 32) and picture.mode == "RGB" and told == [1 / 3, 2 / 3, 1.0]
    assert (pixels(backend, asked()) == np.asarray(picture)).all()
    for other in (asked(1), asked(steps=4), asked(guidance=1.0), asked(negative="Two blue squares.")):
        assert (pixels(backend, other) != np.asarray(picture)).any()


def test_an_edit_changes_what_the_mask_says_and_nothing_else(backend: Diffusers) -> None:
    base, mask = Image.new("RGB", (32, 32), "white"), Image.new("L", (32, 32), 0)
    mask.paste(255, (0, 0, 13, 32))
    made = pixels(backend, asked(base=base, mask=mask))
    assert (made[:, 13:] == 255).all() and (made[:, :13] != 255).any()
    assert (made != pixels(backend, asked())).any()


class Half:
    """Finds what lies on the left right, and something missing once."""

    num = 0

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        self.num += 1
        return Verdict((Unkept("object", "no square"),) if self.num == 1 else (), right=((0.0, 0.0, 0.4, 1.0),))


def test_what_is_right_stays_and_the_rest_is_painted_again(backend: Diffusers) -> None:
    ledger = read("a red circle")
    first = pixels(backend, asked())
    made = painted(ledger, asked(), backend, Half(), 4)
    shown = np.asarray(made.picture, dtype=int)
    assert made.num_images == 2 and (shown[:, :16] == first[:, :16]).all()  # whole tokens of 8 pixels
    assert (shown[:, 16:] != first[:, 16:]).any()


def test_adapters_come_and_go(backend: Diffusers, tmp_path: Path) -> None:
    plain, lora = pixels(backend, asked()), adapter(64, tmp_path / "lora")
    file = next(lora.iterdir())
    strong = pixels(backend, asked(loras=(Lora(str(lora), 1.0),)))
    assert (strong != plain).any()
    assert (pixels(backend, asked(loras=(Lora(str(file), 1.0),))) == strong).all()
    assert (pixels(backend, asked(loras=(Lora(str(lora), 0.0),))) == plain).all()
    assert (pixels(backend, asked()) == plain).all()


def test_what_cannot_be_is_refused_in_a_line(backend: Diffusers, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").write_text("no adapter")
    foreign = adapter(96, tmp_path / "foreign")
    for request, problem in (
        (asked(loras=(Lora("nowhere.safetensors"),)), "lora nowhere.safetensors: file not found"),
        (asked(loras=(Lora(str(tmp_path / "notes.safetensors")),)), "the adapter does not fit this model"),
        (asked(loras=(Lora(str(foreign)),)), "the adapter does not fit this model .*size mismatch"),
        (
            asked(controls=(Control("canny", Image.new("RGB", (8, 8))),)),
            "control canny: ErnieImagePipeline supports no ControlNet",
        ),
        (PaintRequest("x", 30, 32, 0), "width 30 is not a multiple of 8; 32 is the nearest"),
    ):
        with pytest.raises(UserError, match=problem):
            backend.paint(request)
    assert backend.paint(asked()).size == (32, 32)
    with pytest.raises(UserError, match=r"model_index.json: file not found; name the folder"):
        Diffusers(tmp_path)
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    weights = torn / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(UserError, match=r"torn: not loadable .*; check that the folder is complete"):
        Diffusers(torn)


def test_a_pipeline_without_a_number_of_steps_paints(backend: Diffusers, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {name: each for name, each in backend._takes.items() if name != "num_inference_steps"}
    monkeypatch.setattr(backend, "_takes", takes)
    assert backend.paint(asked(steps=None)).size == (32, 32)
