"""Against a strict double of ComfyUI's server, in a process of its own that is killed here and there."""

import io
import json
import threading
import time
from http.server import SimpleHTTPRequestHandler

import pytest
from PIL import Image

pytest.importorskip("comfyui_workflow_templates_json")

from stretto.base.errors import UserError
from stretto.pictures.backend import Control, Lora, PaintRequest
from stretto.pictures.comfy import Comfy, Patience, job_id
from tests.pictures.comfy_double import MODELS, DoubleProcess
from tests.web import serving

SOON = Patience(request_s=5.0, away_s=20.0, poll_s=0.1)


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    with DoubleProcess(tmp_path_factory.mktemp("double")) as process:
        yield process


def painter(process, query="", patience=SOON):
    return Comfy(process.url + query, patience)


def request(seed, **more):
    return PaintRequest("a red cube", 64, 64, seed, **more)


def test_one_request_is_one_picture_however_often_it_is_asked_for(double):
    comfy, told = painter(double), []
    first = comfy.paint(request(1), told.append)
    again = painter(double).paint(request(1))
    other = comfy.paint(request(2))
    assert first.size == (64, 64) and first.mode == "RGB"
    assert first.tobytes() == again.tobytes() != other.tobytes()
    saved = double.events("saved")
    assert saved.count(job_id(comfy.graph(request(1)))) == 1 and len(set(saved)) == len(saved)
    assert told and max(told) == 1.0


def test_a_control_is_uploaded_once_by_its_content(double):
    control = Control("canny", Image.new("RGB", (32, 32), "red"))
    comfy = painter(double, "?template=image_sdxl_simple")
    comfy.paint(request(1, controls=(control,)))
    comfy.paint(request(2, controls=(control,)))
    assert len(list((double.folder / "input").iterdir())) == 1


def test_what_cannot_be_is_refused_in_a_line_and_nothing_is_sent(double):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "PNG")
    torn = Image.open(io.BytesIO(buffer.getvalue()[:-40]))
    before = double.events("accepted") + double.events("refused")
    for query, asked, problem in (
        ("", request(3, controls=(Control("canny", torn),)), "control canny: the reference picture is damaged"),
        (
            "",
            request(3, loras=(Lora("inc"),)),
            r"lora inc: the server has no adapter of that name \(did you mean 'ink'",
        ),
        ("", PaintRequest("x", 1000, 64, 0), "width 1000 is not a multiple of 16; 992"),
        ("", PaintRequest(" ", 64, 64, 0), "prompt: it is empty"),
        ("?queue=0", request(3), "the queue is full: 0 requests wait, 0 are allowed"),
        ("?checkpoint=none", request(3), "checkpoint=none: the server has no checkpoint"),
        ("?template=nothing", request(3), "template=nothing: the templates' package has no template"),
    ):
        with pytest.raises(UserError, match=problem):
            painter(double, query).paint(asked)
    assert double.events("accepted") + double.events("refused") == before


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8188",
        "ftp://here",
        "http://here?tempalte=x",
        "http://here?queue=many",
        "http://here:port",
        "http://[::1",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UserError, match=r"--backend comfy:"):
        Comfy(url)


def test_nobody_there_is_told_at_once():
    with pytest.raises(UserError, match=r"not reachable \(ConnectError.*start ComfyUI there"):
        Comfy("http://127.0.0.1:9").paint(request(1))


def test_another_server_is_not_waited_for():
    no_comfy = r"not reachable \(/object_info answers 404 without JSON\); start ComfyUI there"
    with serving(SimpleHTTPRequestHandler) as url, pytest.raises(UserError, match=no_comfy):
        Comfy(url, Patience(5.0, 3.0, 0.1)).paint(request(1))


def test_a_server_without_checkpoints_and_one_whose_models_move(tmp_path):
    empty = {name: [] for name in MODELS} | {"metadata": {}}
    (tmp_path / "models.json").write_text(json.dumps(empty))
    with DoubleProcess(tmp_path) as double:
        comfy = painter(double)
        with pytest.raises(UserError, match="no checkpoint, and the models of no template; put a model into"):
            comfy.paint(request(1))
        (tmp_path / "models.json").write_text(json.dumps({**empty, "checkpoints": ["a.safetensors"]}))
        graph = comfy.graph(request(1))
        (tmp_path / "models.json").write_text(json.dumps({**empty, "checkpoints": ["b.safetensors"]}))
        with pytest.raises(
            UserError, match=r"refuses the graph: node \d+: Value not in list \(ckpt_name: a.safetensors\)"
        ):
            comfy.run(graph)
        (tmp_path / "models.json").write_text(
            json.dumps({**empty, "checkpoints": ["XL/a.safetensors", "b.safetensors"]})
        )
        assert comfy.run(graph).size == (64, 64)
        assert len(double.events("refused")) == 2 and len(double.events("saved")) == 1


def test_an_adapter_for_another_model_is_refused(tmp_path):
    about = {"ink.safetensors": {"modelspec.architecture": "stable-diffusion-v1/lora"}}
    about |= {"sd_xl_base_1.0.safetensors": {"modelspec.architecture": "stable-diffusion-xl-v1-base"}}
    (tmp_path / "models.json").write_text(json.dumps({**MODELS, "loras": ["ink.safetensors"], "metadata": about}))
    with DoubleProcess(tmp_path) as double:
        with pytest.raises(
            UserError, match=r"lora ink.safetensors: this adapter is for stable-diffusion-v1, the model is stable-diff"
        ):
            painter(double, "?template=image_sdxl_simple").paint(request(1, loras=(Lora("ink"),)))
        assert double.events("accepted") == []


def test_a_truncated_file_does_not_look_like_a_server_that_is_away(tmp_path):
    about = {"metadata": {"sd_xl_base_1.0.safetensors": "truncated"}}
    (tmp_path / "models.json").write_text(json.dumps({**MODELS, **about}))
    with DoubleProcess(tmp_path) as double:
        comfy = painter(double, "?template=image_sdxl_simple", Patience(request_s=5.0, away_s=0.0, poll_s=0.1))
        assert comfy.paint(request(1)).size == (64, 64)


@pytest.mark.slow
def test_silent_sockets_and_lost_replies_change_nothing(tmp_path):
    with DoubleProcess(tmp_path, "--mute", "--lose-replies", "2") as double:
        comfy = painter(double)
        for seed in range(4):
            comfy.paint(request(seed))
        assert len(double.events("accepted")) == len(set(double.events("saved"))) == 4


def test_a_server_that_knows_no_ids_of_ours_is_refused(tmp_path):
    refused = pytest.raises(UserError, match="ignores the ids of requests")
    with DoubleProcess(tmp_path, "--own-ids", "--step-s", "0.05") as double, refused:
        painter(double).paint(request(1))


def test_a_failure_on_the_server_says_where(double):
    comfy = painter(double, "?template=image_sdxl_simple")
    graph = comfy.graph(request(5, controls=(Control("canny", Image.new("RGB", (16, 16), "blue")),)))
    for path in (double.folder / "input").iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(RuntimeError, match="it failed at node control-1-image: UnidentifiedImageError"):
        comfy.run(graph)


@pytest.mark.parametrize("moment", ["while it paints", "before it could say so"])
@pytest.mark.slow
def test_a_killed_server_loses_nothing_and_paints_nothing_twice(tmp_path, moment):
    with DoubleProcess(tmp_path, "--step-s", "0.05") as double:
        found = []
        thread = threading.Thread(target=lambda: found.append(painter(double).paint(request(1))))
        thread.start()
        event = "accepted" if moment == "while it paints" else "saved"
        while not double.events(event):
            time.sleep(0.005)
        double.kill()
        time.sleep(0.3)
        double.start()
        thread.join(30)
        assert len(found) == 1 and len(double.events("saved")) == 1


@pytest.mark.slow
def test_who_stays_away_is_given_up_and_can_be_asked_again(tmp_path):
    with DoubleProcess(tmp_path, "--step-s", "0.05") as double:
        comfy = painter(double, patience=Patience(5.0, 0.3, 0.1))
        graph = comfy.graph(request(1))
        threading.Timer(0.4, double.kill).start()
        with pytest.raises(RuntimeError, match="run the same command again to resume"):
            comfy.run(graph)
        double.start()
        assert comfy.run(graph).size == (64, 64)
        assert len(double.events("saved")) == 1
