"""`stretto enhance` and `stretto paint` as users call them, on a random network and the exact renderer."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw

from stretto.api.pictures import open_verifier
from stretto.api.serve import ServeOptions, served_here
from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES, claimed
from stretto.base.records import Receipt, new_lineage, write_lineage
from stretto.base.track import read_metrics
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import write_checkpoint
from stretto.pictures.door import PATH
from stretto.pictures.renderer import Renderer
from stretto.tasks.shapes.draw import see, unmet
from stretto.tasks.shapes.fields import FIELDS, PLAIN, SYSTEM
from stretto.tasks.shapes.rules import read, unkept
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.api.conftest import HEALING, PRESETS, RECIPE, SERVED, refused
from tests.api.conftest import Run as Command
from tests.engine.engines import network
from tests.tasks.judges import judging
from tests.web import serving


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_NATIVE", "0")


@pytest.fixture(scope="module")
def roomy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `served_run`, with room for the instruction."""
    folder, config = tmp_path_factory.mktemp("runs") / "roomy", SERVED.replace(max_positions=4096)
    tokenizer = train_tokenizer(iter([RECIPE + HEALING]), config.vocab_size, chat_template=CHATML)
    tokenizer.save(folder / "tokenizer")
    write_checkpoint(
        folder / "checkpoint", network(3, config), config, tokenizer_dir=folder / "tokenizer", presets=PRESETS
    )
    (folder / "run.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_a_random_network_keeps_everything_and_writes_six_fields(stretto: Command, roomy_run: Path) -> None:
    request = "two red cubes left of a blue sphere"
    named = ("--model", roomy_run, "--writer", "model", "--subnet", "corner")
    done = stretto("enhance", request, *named, "--size", "512x256", "--json")
    assert done.code == 0, done
    told = json.loads(done.out)
    assert list(told["fields"]) == list(FIELDS) and all(told["fields"].values()) and told["writer"] == "model"
    assert unkept(read(request), told["prompt"]) == ()
    # the subject a random network writes is rubbish, but the grammar gave every other field a word of its aspect
    assert any(note.startswith("subject: replaced") for note in told["notes"])
    assert not any("not valid JSON" in note for note in told["notes"]) and "corner" in told["subnet"]


@pytest.mark.slow
def test_the_suffix_is_the_default_of_a_model_that_was_not_trained_to_write(
    stretto: Command, roomy_run: Path, tmp_path: Path
) -> None:
    request = "a red cube left of a blue sphere"
    written = stretto("enhance", request, "--json")
    assert json.loads(written.out)["writer"] == "suffix" and json.loads(written.out)["fields"] == {
        "subject": request,
        **PLAIN,
    }
    console = stretto("enhance", request, "--model", roomy_run)
    assert json.loads(written.out)["prompt"] in console.out.replace("\n", " ")
    assert "the request and the fixed suffix; --writer model" in console.out.replace("\n", " ")
    trained = tmp_path / "trained"
    shutil.copytree(roomy_run, trained)
    receipt = Receipt(stage="online", device="cpu")
    fields = {"name": "trained", "stage": "online", "total_params": 1, "active_params": 1, "receipt": receipt}
    write_lineage(trained / "checkpoint", new_lineage(**fields, config={"sources": {"a": {"kind": "shapes"}}}))
    assert json.loads(stretto("enhance", request, "--model", trained, "--json").out)["writer"] == "model"
    asked = ("enhance", request, "--model", trained, "--writer", "suffix", "--json")
    assert json.loads(stretto(*asked).out)["writer"] == "suffix"


@pytest.mark.slow
def test_a_server_says_whether_its_model_was_trained_to_write(stretto: Command, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text('{"data": [{"id": "other"}]}')
    with serving(partial(QuietHandler, directory=str(tmp_path))) as url:  # no /api/info: another kind of server
        assert json.loads(stretto("enhance", "a cat", "--server", url, "--json").out)["writer"] == "suffix"
        (tmp_path / "api").mkdir()
        (tmp_path / "api" / "info").write_text('{"is_enhancer": true}')
        refused(
            stretto("enhance", "a cat", "--server", url), "docs/PICTURES.md"
        )  # the model is asked; files answer no POST


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("", "--model", "x"), ("prompt", "empty")),
        (("a red blue cube", "--model", "x"), ("prompt", "red or blue")),
        (("Ein Haus und das Auto mit der Frau", "--model", "x"), ("prompt", "English")),
        (("a cat", "--writer", "model"), ("--model", "--server")),
        (("a cat", "--writer", "modl"), ("--writer modl", "did you mean 'model'", "suffix, model")),
        (("a cat", "--model", "x"), ("x", "config.json")),
        (("a cat", "--model", "x", "--server", "http://127.0.0.1:9"), ("not both",)),
        (("a cat", "--model", "x", "--size", "big"), ("--size", "1024x1024")),
        (("a cat", "--server", "http://127.0.0.1:9"), ("--server", "no answer")),
        (("a cat", "--server", "http://127.0.0.1:port"), ("--server", "not the address of an HTTP server")),
    ],
)
def test_bad_input(stretto: Command, told: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(stretto("enhance", *told), *words)


def test_a_server_of_another_kind(stretto: Command, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("<html>")
    with serving(partial(QuietHandler, directory=str(tmp_path))) as url:
        refused(stretto("enhance", "a cat", "--server", url), "--server", "lists no model")
        refused(stretto("paint", "a cat", "--verifier", f"{url}/v1"), "cannot list its models")


def test_a_picture_is_painted_and_shows_what_was_asked(stretto: Command, tmp_path: Path) -> None:
    out, request = tmp_path / "new" / "picture.png", "two red circles left of a blue square"
    done = stretto("paint", request, "--size", "96x64", "-o", out, "--seed", 4)
    assert done.code == 0 and f"{out}: {request}" in done.out, done
    with Image.open(out) as picture:
        assert picture.size == (96, 64) and unmet(read(request), see(picture)) == ()
    assert stretto("paint", f"{request}, 80x72 pixels", "-o", out).code == 0
    expanded = stretto("paint", request, "--writer", "suffix", "-o", tmp_path / "other.png")
    assert "the request and the fixed suffix" in expanded.out and "Consistent style." in expanded.out.replace("\n", " ")
    with Image.open(out) as picture:
        assert picture.size == (80, 72)


def test_painting_is_done_when_the_first_of_several_pictures_passes(stretto: Command, tmp_path: Path) -> None:
    done = stretto("paint", "a red circle", "--images", 3, "-o", tmp_path / "a.png")
    assert done.code == 0 and "done, 100 of 100" in f"{done}", done


def test_a_studio_that_cannot_begin(stretto: Command, tmp_path: Path) -> None:
    (tmp_path / "conversation.json").write_text("{}")
    refused(stretto("studio", "-o", tmp_path), "contains a conversation")
    refused(stretto("studio", "-o", tmp_path / "conversation.json"), "cannot be written")
    with claimed(tmp_path / "other"):
        refused(stretto("studio", "-o", tmp_path / "other"), "is running in it")
    refused(stretto("studio", "--verifier", "eyes"), "--verifier eyes", "not the address")
    refused(stretto("studio", "--verifier", "http://127.0.0.1:9/v1"), "cannot list its models")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"seen": "nothing of it", "score": 0}', ("after 2 pictures", "0 of 10, 'nothing of it'")),
        ('{"seen": "it", "score": 10}', ()),
        ("I cannot see pictures.", ("not checked", "not JSON with a score")),
    ],
)
def test_a_model_judges_what_is_neither_shapes_nor_words(
    stretto: Command, tmp_path: Path, said: str, told: tuple[str, ...]
) -> None:
    with judging(lambda body: said) as (url, asked):
        out = tmp_path / "picture.png"
        done = stretto(
            "paint", "a red circle in a room", "-o", out, "--size", "64x64", "--images", 2, "--verifier", url
        )
    text = " ".join(done.out.split())
    assert done.code == 0 and out.exists() and all(each in text for each in told), done
    assert ("not checked" in text) == ("see pictures" in said)
    assert len(asked) == 4 * (2 if '"score": 0' in said else 1)  # circle, red, room, in


def test_a_ball_of_another_backend_is_not_checked_as_a_circle() -> None:
    photo = Image.new("RGB", (128, 128), "forestgreen")
    ImageDraw.Draw(photo).ellipse((40, 40, 90, 90), "red")
    with judging(lambda body: '{"seen": "a ball", "score": 10}') as (url, asked):
        with open_verifier(url, "comfy:http://127.0.0.1:8188") as judge:
            verdict = judge.judge(read("a red ball"), photo)
        assert not verdict.faults and not verdict.unchecked and len(asked) == 2  # ball, red
        with open_verifier(url, "renderer") as judge:
            assert judge.judge(read("a red ball"), photo).faults and len(asked) == 2
    with open_verifier(None, "diffusers:folder") as judge:
        assert judge.judge(read("a red ball"), photo).unchecked == "not checked: A red ball"


@pytest.mark.slow
def test_a_request_is_written_out_before_it_is_painted(stretto: Command, roomy_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    done = stretto(
        "paint", "a green triangle", "--size", "64x64", "-o", out, "--model", roomy_run, "--subnet", "corner"
    )
    assert done.code == 0 and done.out.count(". ") >= 4, done
    with Image.open(out) as picture:
        assert unmet(read("a green triangle"), see(picture)) == ()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("",), ("prompt", "empty")),
        (("a red blue cube",), ("prompt", "red or blue")),
        (("a cat",), ("not a shape that can be drawn", "--backend diffusers:FOLDER or comfy:URL")),
        (("a cube", "--size", "0x4"), ("--size",)),
        (("a cube, 80x72 pixels", "--size", "64x64"), ("--size 64x64", "the prompt asks for 80x72")),
        (("a cube", "--backend", "rendrer"), ("--backend", "did you mean 'renderer'")),
        (("a cube", "--backend", "renderer:x"), ("--backend renderer:x: write renderer, without ':x'",)),
        (("a cube", "--backend", "comfy"), ("--backend comfy: needs an address; write comfy:http://127.0.0.1:8188",)),
        (("a cube", "--backend", "diffusers:"), ("--backend diffusers: needs a folder; write diffusers:FOLDER",)),
        (("a cube", "--lora", "x@much"), ("--lora", "NAME@0.8")),
        (("a cube", "--lora", "x@nan"), ("--lora", "NAME@0.8")),
        (("a cube", "--lora", "x"), ("renderer: lora: the renderer does not support it",)),
        (("a cube", "--negative", "blur"), ("renderer: negative: the renderer does not support it",)),
        (("a cube", "--seed", "9" * 20), ("--seed", "64 bits")),
        (("a cube \udcff",), ("prompt", "UTF-8")),
        (("a cube", "--backend", "diffusers:{folder}", "--device", "gpu"), ("--device gpu",)),
        (("a cube", "--control", "canny"), ("--control", "canny=reference.png")),
        (("a cube", "--control", "canny={folder}/none.png"), ("No such file",)),
        (("a cube", "--control", "canny={folder}/corrupt.png"), ("not a picture that can be read",)),
        (("猫", "--as-is", "--server", "http://127.0.0.1:9"), ("--as-is",)),
        (("Ein Haus und das Auto mit der Frau",), ("prompt", "English")),
        (("a cube", "--verifier", "eyes"), ("--verifier eyes", "not the address")),
        (("a cube", "--verifier", "http://127.0.0.1:port/v1"), ("cannot list its models",)),
        (("a cube", "--verifier", "eyes@http://127.0.0.1:port/v1"), ("--verifier", "Invalid port")),
        (("a cube", "--verifier", "http://127.0.0.1:9/v1"), ("cannot list its models",)),
        (("a cube", "--verifier", "http://127.0.0.1:9/v1", "--as-is"), ("--as-is",)),
    ],
)
def test_what_cannot_be_painted(
    stretto: Command, tmp_path: Path, told: tuple[str, ...], words: tuple[str, ...]
) -> None:
    (tmp_path / "corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    out = tmp_path / "picture.png"
    refused(stretto("paint", *(each.format(folder=tmp_path) for each in told), "-o", out), *words)
    assert not out.exists()


def test_a_picture_that_cannot_be_written_or_painted_is_told_in_a_line(
    stretto: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("it failed at node 3:\nno memory")

    monkeypatch.setattr(Renderer, "paint", fails)
    refused(stretto("paint", "a cube", "-o", tmp_path), "is a folder")  # before anything is painted
    refused(stretto("paint", "a cube", "-o", tmp_path / "a.txt"), "a.txt: must end in .png")
    refused(stretto("paint", "a cube", "-o", tmp_path / "a.png"), "painting failed: it failed at node 3: no memory")


def test_the_shipped_recipe_is_sound() -> None:
    recipe = read_recipe(RECIPES / "enhancer.toml", RlRecipe)
    assert recipe.sources["shapes"].kind == "shapes" and recipe.rewards["shapes"].diversity and recipe.loss.kl_weight


@pytest.mark.slow
def test_the_enhancer_is_trained_by_its_recipe(stretto: Command, roomy_run: Path, tmp_path: Path) -> None:
    few = ("train.steps=2", "train.prompts=1", "train.eval_prompts=2", "rollout.group=2", "rollout.max_tokens=12",
           "train.seq_len=2048", "runtime.isolate=none", "runtime.rewards.max=1", "loss.drop_uniform=false")  # fmt: skip
    told = ("online", RECIPES / "enhancer.toml", "--model", roomy_run, "--out", tmp_path / "run", "--device", "cpu")
    done = stretto(*told, *(f"--set={each}" for each in few))
    assert done.code == 0, done.err
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(rows) == 2 and all(
        0 <= row[f"reward/part/{part}"] <= 1 for row in rows for part in ("kept", "aspects", "diversity")
    )
    asked = ("enhance", "a red cube", "--model", tmp_path / "run", "--size", "64x64", "--json")
    assert json.loads(stretto(*asked).out)["writer"] == "model"  # the run's lineage has the recipe


def answers(run: Path, *contents: Any) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        with served_here(run, ServeOptions(max_batch=1, writer="model")) as (app, _):
            async with httpx.AsyncClient(base_url="http://localhost", transport=httpx.ASGITransport(app)) as client:
                bodies = [{"messages": [{"role": "user", "content": each}], "max_tokens": 5} for each in contents]
                bodies[0]["elastic"] = "corner"
                return [await client.post(PATH, json=body) for body in bodies]

    return asyncio.run(ask())


@pytest.mark.slow
def test_a_request_for_a_picture_is_written_out_and_anything_else_is_answered(roomy_run: Path) -> None:
    def asked(prompt: str, **fields: Any) -> str:
        return json.dumps({"prompt": prompt, "width": 512, "height": 256} | fields, ensure_ascii=False)

    request = 'a red cube and a sign that says "日夜"'
    written, plain, other, wrong, contradiction, long, french = answers(
        roomy_run,
        asked(request),
        "hello",
        asked(request, steps=3),
        asked("a cube", width="wide"),
        asked("a red blue cube"),
        asked("cube " * 2000),
        asked("un chat noir dans un café"),
    )
    assert written.json()["writer"] == "model" and unkept(read(request), written.json()["text"]) == ()
    assert written.json()["text"].count(". ") >= 4 and SYSTEM not in written.text
    for each in (plain, other, wrong):  # five tokens of a random network
        assert each.status_code == 200 and "cube" not in each.json()["text"]
    for each, said in ((contradiction, "red or blue"), (long, "write a shorter text"), (french, "English")):
        assert each.status_code == 400 and said in each.json()["error"]["message"]
