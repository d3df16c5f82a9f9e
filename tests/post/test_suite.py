"""Evaluations by a random network, of problems whose answers it now and then gets right."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import write_json
from stretto.base.trajectory import Outcome, Verdict
from stretto.data.conversations import ConversationForm
from stretto.engine.engine import Engine
from stretto.evals.scores import pass_at_k, pass_hat_k
from stretto.flow import prompts
from stretto.flow.clients import RewardRequest
from stretto.flow.prompts import SourceTables
from stretto.harness.suites import harness_names
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import SubnetChoice
from stretto.post import suite_samples
from stretto.post.suite import RESULT_FILE, Evaluation, evaluate, read_evaluation, write_right_answers
from stretto.post.suite_samples import SAMPLES_FILE, Domain, Sample
from stretto.post.suites import EvalOptions, SuiteConfig, opened_sources, parse_suites
from stretto.tasks.registry import open_source
from tests.engine.engines import CONFIG, network
from tests.flow.agents import tokenizer

OWN = '''
import time
from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Problem, Score, TaskSource

class Args(Config):
    size: int = 40
    broken: int = 0
    turns: bool = False
    long: int = -1
    hangs: bool = False
    path: str = ""

class Own(TaskSource):
    """Right is what has an even number of letters, and any at all."""
    args_kind = Args

    @property
    def num_items(self):
        return self.args.size

    def problem(self, item):
        words = "the cat sat " * (200 if item == self.args.long else 1)
        return Problem(item, ({"role": "user", "content": f"{words}{item % 10}"},), "dogs" if item % 3 else "cats")

    def score(self, problem, answer):
        if self.args.hangs:
            time.sleep(40)
        if self.args.broken and problem.item % self.args.broken == 0 and answer.text not in ("", " \\n", "dogs", "cats"):
            if "no such answer" not in answer.text:
                raise OSError("the judge is out")
        text = answer.text.strip()
        return Score.of("no such" not in text and bool(text) and len(text) % 2 == 0 and (text not in ("dogs", "cats") or text == problem.gold))

    def reply(self, problem, messages):
        return "again" if self.args.turns and len(messages) < 3 else None

class Open(Own):
    """The same, better or worse."""
    is_verifiable = False
'''


CALLS = """
from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import SessionSource
from stretto.tasks.task import Answer, Problem, Score, Session, Tool

class Room(Session):
    def __init__(self, problem):
        self.door, self.problem = None, problem
        self.own = (Tool("leave", "", {"type": "object"}, self.leave), Tool("open", "", {"type": "object"}, self.open))
    tools = property(lambda self: self.own)
    def leave(self, arguments):
        return ToolResult("left", Outcome.OK, 0.0)
    def open(self, arguments):
        self.door = arguments.get("door")
        return ToolResult(f"opened {self.door}", Outcome.OK, 0.0)
    def reply(self, messages):
        return None
    def score(self, answer):
        return Score.of(self.door == self.problem.item % 4)

def opens(door):
    call = {"function": {"name": "open", "arguments": {"door": door}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool"}, {"role": "assistant", "content": "there"}

class Rooms(SessionSource):
    is_verifiable = True
    num_items = 8
    def problem(self, item):
        return Problem(item, ({"role": "user", "content": f"door {item % 4}"},), "there")
    def open(self, problem, seed=None):
        return Room(problem)
    def validate(self, num=8, limit_s=None):
        for item in range(self.num_items):
            assert self.score(self.problem(item), Answer("there", opens(item % 4))).ok
    def baselines(self, problem):
        leave = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "leave", "arguments": {}}}]}
        return {"always leave": (leave, {"role": "tool"}, {"role": "assistant", "content": "bye"}), "always open 2": opens(2)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer().save(folder / "tokenizer")
    write_checkpoint(
        folder / "checkpoint", network(), CONFIG, tokenizer_dir=folder / "tokenizer",
        presets={"small": SubnetChoice(layers=CONFIG.num_layers - 1)},
    )  # fmt: skip
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"{path}:Own"


def suite(own: str, **args: Any) -> dict[str, SuiteConfig]:
    told = {"max_tokens": 6, "problems": 12, "max_turns": args.pop("max_turns", 1)}
    return {"mine": SuiteConfig(sources={"even": {"kind": own, "args": args}}, **told)}


OPTIONS = EvalOptions(samples=3, max_batch=8)


def run(model: Path, suites: dict[str, SuiteConfig], out: Path, **changes: Any) -> Evaluation:
    subnet = changes.pop("subnet", None)
    return evaluate(model, suites, out, OPTIONS.replace(**changes), name="tiny", subnet=subnet)


def read(out: Path) -> dict[Any, Sample]:
    lines = (out / SAMPLES_FILE).read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=Sample) for line in lines]
    return {(one.domain, one.item, one.number): msgspec.structs.replace(one, seconds=0.0) for one in samples}


def untimed(found: Evaluation) -> Evaluation:
    return replace(found, cost=replace(found.cost, seconds=0.0))


@pytest.fixture(scope="module")
def whole(model: Path, own: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation. Not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(model, suite(own), out)
    return out


def test_scores_are_those_of_the_samples(whole: Path) -> None:
    found, samples = read_evaluation(whole), read(whole)
    result = found.domains["even"]
    assert result.items == list(range(28, 40))  # the last ones
    right_PS = np.array(
        [[samples["even", item, number].outcome is Outcome.OK for number in range(3)] for item in result.items], float
    )
    assert 0 < right_PS.mean() < 1
    assert [len(one.text.strip()) % 2 == 0 and bool(one.text.strip()) for one in samples.values()] == [
        one.outcome is Outcome.OK for one in samples.values()
    ]
    assert result.score.value == pytest.approx(right_PS.mean())
    assert result.score.low < result.score.value < result.score.high
    assert result.pass_at[3].value == pytest.approx(pass_at_k(right_PS, 3).mean())
    assert result.pass_hat[3].value == pytest.approx(pass_hat_k(right_PS, 3).mean())
    assert result.pass_hat[3].value < result.score.value < result.pass_at[3].value
    assert result.values == pytest.approx(right_PS.mean(1))
    assert list(result.majority_at) == [3]
    assert found.mean == result.score
    assert found.cost.num_sampled == sum(one.num_sampled for one in samples.values())
    assert found.cost.active_params < found.cost.total_params
    assert result.entropy > 3  # of 320 tokens, near random: up to ln 320 = 5.8
    assert sum(result.finishes.values()) == 36


def test_what_knows_nothing_is_scored_too(whole: Path) -> None:
    found = read_evaluation(whole).domains["even"].baselines
    assert (found["empty"].value, found["constant"].value) == (0, 0)
    # two of three problems have the gold answer "dogs"
    assert found["frequent"].value == pytest.approx(np.mean([item % 3 > 0 for item in range(28, 40)]))
    assert 0 < found["another"].value < 1


@pytest.mark.slow
def test_orders_of_one_problem_are_its_samples(model: Path, tmp_path: Path) -> None:
    lines = [{"question": f"{at}?", "options": ["b", "d", "f"], "answer": at % 3} for at in range(9)]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    args = {"path": str(tmp_path / "q.jsonl"), "rotations": 3, "format": "plain"}
    suites = {"mcq": SuiteConfig(sources={"mcq": {"kind": "choice", "args": args}}, problems=6, max_tokens=1)}
    found = run(model, suites, tmp_path / "out").domains["mcq"]
    assert found.items == [3, 4, 5, 6, 7, 8]  # problems, of nine answers each
    samples = read(tmp_path / "out")
    assert sorted({item for _, item, _ in samples}) == list(range(9, 27))
    assert list(found.pass_at) == [1, 2, 4, 8, 9]
    assert {kind: found.baselines[kind].value for kind in found.baselines if kind.startswith("always")} == {
        f"always {letter}": pytest.approx(1 / 3) for letter in "ABC"
    }
    right = sum(one.outcome is Outcome.OK for one in samples.values())
    assert 0 < found.num_off_format <= len(samples) - right
    source = open_source("mcq", SourceConfig(kind="choice", args=args))
    places = [source.read(source.problem(item), one.text).place for (_, item, _), one in samples.items()]
    assert found.num_off_format == places.count("")
    read_places = [place for place in places if place]
    assert {place: each.chosen for place, each in found.places.items() if each.chosen} == pytest.approx(
        {place: read_places.count(place) / len(read_places) for place in set(read_places)}
    )
    assert found.flops == pytest.approx(
        read_evaluation(tmp_path / "out").cost.flops_per_token
        * np.mean([one.num_prompt + one.num_sampled for one in samples.values()])
    )


def test_one_model_alone_is_not_judged_by_comparison(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Write."}\n{"prompt": "Write more."}\n')
    args = {"path": str(tmp_path / "p.jsonl"), "judge": "scripted", "by": "group"}
    suites = {"w": SuiteConfig(sources={"stories": {"kind": "judged", "args": args}}, problems=2, max_tokens=4)}
    with pytest.raises(UserError, match=r"sources\.stories: compares answers.*no opponent"):
        run(model, suites, tmp_path / "out")
    assert not (tmp_path / "out" / RESULT_FILE).exists()


def test_a_source_names_policies_that_know_nothing(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CALLS)
    suites = {"s": SuiteConfig(sources={"rooms": {"kind": f"{tmp_path}/own.py:Rooms"}}, problems=4, max_tokens=4)}
    found = run(model, suites, tmp_path / "out").domains["rooms"].baselines
    assert {kind: found[kind].value for kind in ("empty", "calls", "always leave", "always open 2")} == {
        "empty": 0.0, "calls": 0.0, "always leave": 0.0, "always open 2": 0.25
    }  # fmt: skip


class Killed(Exception):  # noqa: N818
    """A test's own."""


def test_an_evaluation_that_was_killed_goes_on(
    model: Path, own: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keep, left = tmp_path / "out", suite_samples.Sampler._keep, iter(range(7))

    def killed(self: Any, sample: Sample) -> None:
        if next(left, None) is None:
            raise Killed
        keep(self, sample)

    monkeypatch.setattr(suite_samples.Sampler, "_keep", killed)
    with pytest.raises(Killed):
        run(model, suite(own), out)
    monkeypatch.undo()
    assert len(read(out)) == 7
    with (out / SAMPLES_FILE).open("ab") as file:
        file.write(b'{"domain": "even", "it')  # torn
    before = set(read_lines(out)[:7])
    found = run(model, suite(own), out)
    assert before <= set(read_lines(out))
    assert read(out) == read(whole)
    assert untimed(found) == untimed(read_evaluation(whole))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_evaluation_whose_engine_dies_ends_and_goes_on(
    model: Path, own: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left = Engine.step, iter(range(9))

    def dying(self: Engine) -> Any:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96 MiB.")
        return step(self)

    monkeypatch.setattr(Engine, "step", dying)
    with pytest.raises(
        UserError, match=r"out of memory.*; finished samples are kept: repeat the command, with a lower --max-"
    ):
        run(model, suite(own), tmp_path / "out")
    monkeypatch.undo()
    assert 0 < len(read(tmp_path / "out")) < len(read(whole))
    run(model, suite(own), tmp_path / "out")
    assert read(tmp_path / "out") == read(whole)


def read_lines(out: Path) -> list[bytes]:
    return (out / SAMPLES_FILE).read_bytes().splitlines()


def test_a_finished_one_is_not_done_again(model: Path, own: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_samples, "EngineRole", None)
    assert run(model, suite(own), whole) == read_evaluation(whole)


def test_another_evaluation_is_refused(model: Path, own: str, whole: Path) -> None:
    for changes in (
        {"samples": 2},
        {"seed": 1},
        {"limit": 3},
        {"temperature": 0.5},
        {"subnet": CONFIG.subnet(depth=2)},
    ):
        with pytest.raises(UserError, match=f"{next(iter(changes))}|problems"):
            run(model, suite(own), whole, **changes)
    said = r"suites\.mine\.problems \(--limit\): was .* when this evaluation started, is 3 now; .*, or choose another folder with --out$"
    with pytest.raises(UserError, match=said):
        run(model, suite(own), whole, limit=3)
    with pytest.raises(UserError, match=r"--samples 3: suite mine decodes greedily \(temperature 0\)"):
        run(model, suite(own), whole, temperature=0.0)


def test_the_default_is_one_sample_for_greedy_decoding(model: Path, own: str, tmp_path: Path) -> None:
    suites = suite(own) | {"greedy": suite(own)["mine"].replace(temperature=0.0, problems=2)}
    suites["greedy"] = suites["greedy"].replace(sources={"odd": suites["mine"].sources["even"]})
    suites["mine"] = suites["mine"].replace(problems=2)
    found = run(model, suites, tmp_path / "out", samples=None)
    assert {name: sum(each.finishes.values()) for name, each in found.domains.items()} == {"even": 8, "odd": 2}
    assert found.asked["suites"]["greedy"]["samples"] == 1 and found.asked["prompt"] == "chat template"


def test_suites_with_published_figures_decode_greedily() -> None:
    found = parse_suites(["gym,code,math=a.jsonl,aime=a.jsonl,mcq=a.jsonl,gpqa=a.csv,mmlu_pro=a.jsonl,writing,tools"])
    assert {name for name, each in found.items() if each.temperature > 0} == {"writing", "tools"}


def test_a_smaller_size_answers_otherwise_and_costs_less(model: Path, own: str, whole: Path, tmp_path: Path) -> None:
    found = run(model, suite(own), tmp_path / "out", subnet=CONFIG.subnet(depth=2))
    assert found.cost.flops_per_token < read_evaluation(whole).cost.flops_per_token
    texts = [[one.text for one in read(out).values()] for out in (whole, tmp_path / "out")]
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_greedy_samples_repeat(model: Path, own: str, tmp_path: Path) -> None:
    found = [run(model, suite(own), tmp_path / str(seed), samples=1, temperature=0.0, seed=seed) for seed in (0, 1)]
    assert found[0].domains["even"].values == found[1].domains["even"].values
    assert found[0].domains["even"].diversity == {}


def test_a_judge_that_fails_is_no_wrong_answer(model: Path, own: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"sources\.even: \d of 36 samples could not be scored.*the judge is out"
    ) as caught:
        run(model, suite(own, broken=39), tmp_path / "out")  # the last: others are done by then
    assert "finished samples are kept" in str(caught.value)
    assert not (tmp_path / "out" / RESULT_FILE).exists()
    assert 0 < len(read(tmp_path / "out")) < 36


def test_a_task_whose_check_never_ends_is_named(
    model: Path, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_CHECK_S", 0.5)
    usual = suite_samples.Sampler._recipe

    def hasty(sampling: suite_samples.Sampler, suite: SuiteConfig) -> RlRecipe:
        recipe = usual(sampling, suite)
        return recipe.replace(runtime=recipe.runtime.replace(rewards=recipe.runtime.rewards.replace(deadline_s=0.5)))

    monkeypatch.setattr(suite_samples.Sampler, "_recipe", hasty)
    with pytest.raises(UserError, match=r"sources\.even: item 0: score\(\) has not returned after 0\.5 s"):
        run(model, suite(own, hangs=True), tmp_path / "out")
    assert not (tmp_path / "out" / SAMPLES_FILE).exists()


def sums() -> Domain:
    """Four problems of arithmetic, with two others for baselines."""
    (source,) = SourceTables({"sums": SourceConfig(kind="arithmetic")}, SandboxConfig())().values()
    return Domain("s", source, 1, range(4), range(4, 6), {item: source.problem(item) for item in range(4)}, {})


def test_a_baseline_is_tried_again_and_what_it_lacks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """One answer is scored at the second attempt, another one never."""
    domain, tried = sums(), Counter[int]()

    class Rewards:
        async def score(self, request: RewardRequest) -> Verdict:
            tried[request.item] += 1
            if request.item == 3 or (request.item == 2 and tried[2] == 1):
                return Verdict(0.0, Outcome.INFRA, 0.0, detail="the judge is out")
            return Verdict(0.0, Outcome.WRONG, 0.0)

    found = asyncio.run(suite_samples.score_baselines("sums", domain, domain.source, cast("Any", Rewards()), 0))
    assert np.isnan(found["empty"]).tolist() == [False, False, False, True]
    assert "baseline empty: 1 of 4 answers could not be scored: the judge is out" in capsys.readouterr().out


def test_a_baseline_of_which_no_answer_can_be_scored_is_not_tried_again() -> None:
    """The judge is down, and each try may take its whole time limit."""
    domain, tried = sums(), Counter[str]()

    class Rewards:
        async def score(self, request: RewardRequest) -> Verdict:
            tried[request.text] += 1
            return Verdict(0.0, Outcome.INFRA, 0.0, detail="the judge is out")

    assert not asyncio.run(suite_samples.score_baselines("sums", domain, domain.source, cast("Any", Rewards()), 0))
    assert tried[""] == tried["0"] == 4 and domain.num_unscored == sum(tried.values())


def test_an_evaluation_with_an_incomplete_baseline_is_continued(
    model: Path, own: str, whole: Path, tmp_path: Path
) -> None:
    """The judge fails on one answer of the baseline ``constant``, and works again in the second evaluation."""
    usual = suite_samples.RewardRole.score

    async def failing(self: suite_samples.RewardRole, request: RewardRequest) -> Verdict:
        if (request.item, request.text) == (39, "0"):
            return Verdict(0.0, Outcome.INFRA, 0.0, detail="the judge is out")
        return await usual(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite_samples.RewardRole, "score", failing)
        partial = run(model, suite(own), tmp_path).domains["even"]
    assert (partial.num_infra, partial.num_unscored) == (0, 1)
    found = run(model, suite(own), tmp_path).domains["even"]
    assert found.num_unscored == 0
    assert found.baselines == read_evaluation(whole).domains["even"].baselines != partial.baselines


@pytest.mark.slow
def test_few_failures_are_told(
    model: Path, own: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_samples, "MOST_INFRA", 0.1)
    found = run(model, suite(own, broken=39), tmp_path / "out").domains["even"]
    judged = read_evaluation(whole).domains["even"]
    assert found.num_infra == 3
    assert found.values == [*judged.values[:-1], None]
    assert found.score.value == pytest.approx(np.mean(judged.values[:-1]))
    asked: list[Any] = []
    role = suite_samples.EngineRole
    monkeypatch.setattr(
        suite_samples, "EngineRole", lambda *given, **named: asked.append(given) or role(*given, **named)
    )
    assert run(model, suite(own, broken=39), tmp_path / "out").domains["even"].num_infra == 3 and asked  # again


def test_all_turns_of_an_open_ended_answer_are_kept(model: Path, own: str, tmp_path: Path) -> None:
    asked = suite(own.replace(":Own", ":Open"), turns=True, max_turns=2)["mine"].replace(max_tokens=80)
    run(model, {"mine": asked}, tmp_path)
    found = read(tmp_path).values()
    assert {one.num_turns for one in found} == {1, 2}  # some end no turn
    assert all(len(one.turns) == 2 and one.turns[1] == one.text for one in found if one.num_turns == 2)
    assert not any(one.turns for one in found if one.num_turns == 1)


def test_further_turns_are_the_agents(model: Path, own: str, tmp_path: Path) -> None:
    run(model, suite(own, turns=True, max_turns=2), tmp_path / "out", limit=4)
    turns = {one.num_turns for one in read(tmp_path / "out").values()}
    assert max(turns) == 2 or all(one.finish == "length" for one in read(tmp_path / "out").values())


def test_what_the_network_cannot_read_it_does_not_solve(model: Path, own: str, tmp_path: Path) -> None:
    found = run(model, suite(own, long=39), tmp_path / "out", limit=2)
    even, answered = found.domains["even"], [one for one in read(tmp_path / "out").values() if one.num_sampled]
    assert even.finishes["prompt"] == len(answered) == 3
    assert even.values[1] == 0
    # only generated answers have a cost and measures
    assert found.cost.num_prompt == sum(one.num_prompt for one in answered)
    num_tokens = [one.num_prompt + one.num_sampled for one in answered]
    assert even.flops == pytest.approx(found.cost.flops_per_token * sum(num_tokens) / 6)
    assert even.entropy == pytest.approx(np.mean([one.entropy for one in answered]))
    assert even.num_off_format == 0  # `Own` asks for no marker


def test_of_prompts_that_do_not_fit_nothing_is_measured(model: Path, tmp_path: Path) -> None:
    lines = [{"question": "the cat sat " * 200, "options": ["b", "d"], "answer": 0}] * 2
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    args = {"path": str(tmp_path / "q.jsonl"), "format": "plain"}
    suites = {"mcq": SuiteConfig(sources={"mcq": {"kind": "choice", "args": args}}, problems=2, max_tokens=1)}
    found = run(model, suites, tmp_path / "out", samples=3)
    result, cost = found.domains["mcq"], found.cost
    assert result.finishes == {"prompt": sum(result.finishes.values())}
    assert (result.entropy, result.flops, result.num_off_format, result.diversity) == (None, 0.0, 0, {})
    assert (cost.num_prompt, cost.flops_per_token) == (0, 0.0)


def test_what_is_better_or_worse_has_no_pass_at_k(model: Path, tmp_path: Path) -> None:
    judged = {"kind": "judged", "args": {"judge": "scripted"}}
    suites = {"writing": SuiteConfig(sources={"stories": judged}, problems=3, max_tokens=12)}
    found = run(model, suites, tmp_path / "out").domains["stories"]
    rewards = [one.reward for one in read(tmp_path / "out").values()]
    assert found.is_graded
    assert found.score.value == pytest.approx(np.mean(rewards))
    assert len(set(rewards)) > 1
    assert (found.pass_at, found.majority_at) == ({}, {})
    assert found.baselines["empty"].value == 0 < found.baselines["another"].value


def test_an_evaluation_that_asked_for_a_network_of_similarity_resumes(
    model: Path, own: str, whole: Path, tmp_path: Path
) -> None:
    """Evaluations of earlier versions have the key ``embed``."""
    (tmp_path / "out").mkdir()
    for name in (SAMPLES_FILE, "asked.json"):
        (tmp_path / "out" / name).write_bytes((whole / name).read_bytes())
    asked = json.loads((whole / "asked.json").read_text())
    (tmp_path / "out" / "asked.json").write_text(json.dumps(asked | {"embed": str(model)}))
    assert untimed(run(model, suite(own), tmp_path / "out")) == untimed(read_evaluation(whole))


def test_suites_by_name(tmp_path: Path) -> None:
    found = parse_suites(["gym,math=some.jsonl", "tools"])
    assert list(found) == ["gym", "math", "tools"]
    assert found["math"].sources["math"].args["path"] == "some.jsonl"
    path = tmp_path / "mine.toml"
    path.write_text('[a.sources.x]\nkind = "strings"\nargs = { operation = "sort" }\n[b.sources.y]\nkind = "tools"\n')
    assert list(parse_suites([str(path)])) == ["a", "b"]


def test_suites_may_be_longer_than_the_name_of_a_file() -> None:
    found = parse_suites(["gym," * 80 + "tools", f"math={'x' * 300}.jsonl"])
    assert list(found) == ["gym", "tools", "math"]


def test_the_path_of_a_suite_may_have_commas_and_equals_signs(tmp_path: Path) -> None:
    path = tmp_path / "lr=1e-3,steps=9" / "mine.toml"
    path.parent.mkdir()
    path.write_text("[a.sources.x]\nkind = 'arithmetic'\n")
    assert list(parse_suites([str(path), "gym,tools"])) == ["a", "gym", "tools"]
    assert harness_names([str(path), "tau,gym"]) == (["tau"], [str(path), "gym"])


def test_a_recipe_is_a_suite(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    found = parse_suites([str(root / "stretto/recipes/rl_gym.toml")])["rl_gym"]
    assert (list(found.sources), found.problems, found.max_tokens) == (["backward"], 64, 16)
    tree = read_recipe(root / "stretto/recipes/rl_gym.toml", RlRecipe).model_dump(mode="json")
    write_json(tmp_path / "rl_gym.json", tree)
    assert parse_suites([str(tmp_path / "rl_gym.json")]) == {"rl_gym": found}


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("gim", "no such suite; did you mean 'gym'|gim"),
        ("math", "--suite math: needs its data: math=PATH, JSONL, CSV or Parquet in the layout of GSM8K"),
        ("nothing.toml", "nothing.toml: cannot be read"),
        ("gym,gym", None),
        ("math=a.jsonl,math=b.jsonl", "two suites are called math; rename one"),
    ],
)
def test_suites_that_are_none(named: str, words: str | None) -> None:
    if words is None:
        assert list(parse_suites([named])) == ["gym"]
        return
    with pytest.raises(UserError, match=words):
        parse_suites([named])


def test_a_judge_may_be_named_later(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[a.sources.x]\nkind = "judged"\n')  # the judge of --judge
    assert parse_suites([str(tmp_path / "mine.toml")])["a"].sources["x"].args == {}


def test_a_source_that_cannot_be_opened_is_named_with_its_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[a.sources.x]\nkind = "math"\nargs = { path = "absent.jsonl" }\n')
    suites = parse_suites([str(tmp_path / "mine.toml")])
    with pytest.raises(UserError, match=r"^suite a: .*absent\.jsonl"), opened_sources(suites):
        pass


def test_tables_that_are_no_suite(tmp_path: Path) -> None:
    for text, words in (
        ('[a]\nproblem = 3\n[a.sources.x]\nkind = "strings"\n', "a: problem: unknown key"),
        ("a = 3\n", r"mine.toml: a: must be a table, is 3"),
        ('[a.sources.x]\nkind="strings"\n[b.sources.x]\nkind="strings"\n', "x: two sources have this name"),
        (
            '[a.sources.x]\nkind="strings"\nargs={ operation="sort", lenght=3 }\n',
            r"mine.toml: a: sources.x.args: lenght: unknown key \(did you mean 'length'\?\)",
        ),
        ('[a.sources.x]\nkind="strinks"\n', "mine.toml: a: sources.x: kind: no kind 'strinks'"),
        ("[", "not valid TOML"),
        ("", "contains no suite"),
    ):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(UserError, match=words):
            parse_suites([str(tmp_path / "mine.toml")])


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that is out is asked again after 0.3 s in all: here at once."""
    role = suite_samples.AgentRole
    monkeypatch.setattr(
        suite_samples, "AgentRole", lambda *given, **named: role(*given, pauses_s=(0.001, 0.001), **named)
    )


def test_right_answers_become_conversations(model: Path, own: str, tmp_path: Path) -> None:
    run(model, suite(own), tmp_path / "out", samples=8)
    right = {(one.item, one.text) for one in read(tmp_path / "out").values() if one.outcome is Outcome.OK}
    path = tmp_path / "right.jsonl"
    assert write_right_answers(tmp_path / "out", path) == len(right) > 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == [f"the cat sat {item % 10}" for item, _ in sorted(right)]
    assert [row["messages"][1] for row in rows] == [{"role": "assistant", "content": text} for _, text in sorted(right)]
    # they are what SFT reads
    for row in rows:
        document = ConversationForm().document(row, "here")
        assert (
            document.domain == "even"
            and row["messages"][1]["content"] in json.loads(document.text)["messages"][1]["content"]
        )


def test_of_several_turns_or_nothing_right_there_are_no_conversations(model: Path, own: str, tmp_path: Path) -> None:
    run(model, suite(own, turns=True, max_turns=2), tmp_path / "turns")
    with pytest.raises(UserError, match="up to 2 turns"):
        write_right_answers(tmp_path / "turns", tmp_path / "right.jsonl")
    with pytest.raises(UserError, match="no such file"):
        write_right_answers(tmp_path / "nowhere", tmp_path / "right.jsonl")
    assert not (tmp_path / "right.jsonl").exists()
