"""The supervised start: prompts and turns as an agent loop has them, a loss on the model's own tokens, and a checkpoint that serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.common.plain_loop import run_synchronously
from stretto.base.errors import UserError
from stretto.data.loader import Batch
from stretto.data.pack import IGNORED
from stretto.flow.agent import AgentRole
from stretto.flow.clients import Clients
from stretto.flow.prompts import SUPERVISED, Prompts, plan_prompts
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole, open_rollout_engine
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe, SourceConfig, StartConfig
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch
from stretto.model.checkpoint import read_checkpoint
from stretto.model.parallel import Ranks, join
from stretto.model.transformer import initial_state
from stretto.post.sft import Demonstrations, Example, example, examples, fill_rows, learn_tokenizer, micro_batches, sft
from stretto.runtime.store import FolderStore
from stretto.tasks.registry import open_source
from stretto.tasks.session import recorded, schemas
from stretto.tasks.task import Problem, TaskSource
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from stretto.train.recipe import TrainConfig
from tests.flow import agents
from tests.tasks.counting import Counters, calling


def recipe(**train: Any) -> RlRecipe:
    model = {
        "vocab_size": 280, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "num_experts": 4, "top_k": 2, "expert_intermediate_size": 16,
    }  # fmt: skip
    args = {"operation": "complement", "length": 3, "graded": True}
    return RlRecipe.model_validate({
        "start": {"model": model, "optim": {"lr": 5e-3}, "steps": 30, "rows": 4, "noise": 0.3},
        "sources": {"flip": {"kind": "strings", "args": args}},
        "rollout": {"group": 4, "max_tokens": 10},
        "optim": {"lr": 1e-3},
        "train": {"steps": 2, "prompts": 2, "seq_len": 64, "micro_rows": 4, "eval_prompts": 4, **train},
        "staleness": 0,
    })  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> dict[str, TaskSource]:
    return {name: open_source(name, source) for name, source in recipe().sources.items()}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return plan_prompts(recipe(), {"flip": None}, {})


@pytest.fixture(scope="module")
def tokenizer(sources: dict[str, TaskSource], prompts: Prompts) -> Tokenizer:
    return learn_tokenizer(sources, prompts, 280)


@pytest.mark.parametrize("has_template", [True, False])
def test_an_example_is_the_agents_prompt_and_a_turn_that_ends(
    sources: dict[str, TaskSource], tokenizer: Tokenizer, has_template: bool
) -> None:
    if not has_template:
        tokenizer = Tokenizer(tokenizer.rust, tokenizer.eos_token)
    dialogue, problem = Dialogue(tokenizer), sources["flip"].problem(5)
    made = example(dialogue, problem, sources["flip"].demonstration(problem))
    prompt = dialogue.prompt(problem.messages)
    assert np.array_equal(made.tokens[: len(prompt)], prompt)
    assert made.is_learnt.tolist() == [False] * len(prompt) + [True] * (len(made.tokens) - len(prompt))
    assert made.tokens[-1] in dialogue.stop_ids
    assert dialogue.text(made.tokens[len(prompt) :]) == problem.gold


def test_a_plain_turn_of_the_user_is_not_learnt(sources: dict[str, TaskSource], tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer.rust, tokenizer.eos_token)
    turns = [
        {"role": "assistant", "content": "call"},
        {"role": "user", "content": "7"},
        {"role": "assistant", "content": "15"},
    ]
    made = example(Dialogue(plain), sources["flip"].problem(0), turns)
    written = [plain.decode([token]) for token in made.tokens[made.is_learnt]]
    assert "".join(written) == f"call{plain.eos_token}15{plain.eos_token}"
    assert "\n7\n" in plain.decode(made.tokens.tolist())


def test_a_long_result_is_learnt_as_it_will_be_shown(sources: dict[str, TaskSource], tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "first " + "x" * 10**6 + " last"},
        {"role": "assistant", "content": "15"},
    ]
    made = example(Dialogue(tokenizer, tool_chars=200), sources["flip"].problem(0), turns)
    text = tokenizer.decode(made.tokens.tolist())
    assert len(text) < 500 and "first x" in text and "characters left out" in text and "x last" in text


def test_a_share_of_answers_is_anothers(sources: dict[str, TaskSource], prompts: Prompts, tokenizer: Tokenizer) -> None:
    def answers(noise: float) -> list[list[int]]:
        found = islice(examples(sources, prompts, tokenizer, noise), 200)
        return [one.tokens.tolist() for one in found]

    clean, noisy, again = answers(0.0), answers(0.3), answers(0.3)
    share = np.mean([one != other for one, other in zip(clean, noisy, strict=True)])
    assert 0.2 < share < 0.4 and noisy == again


def test_prompts_are_learnt_where_a_start_says_so(
    sources: dict[str, TaskSource], prompts: Prompts, tokenizer: Tokenizer
) -> None:
    answers, all_of_it = (list(islice(examples(sources, prompts, tokenizer, 0.0, told), 20)) for told in (False, True))
    for one, other in zip(answers, all_of_it, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert not one.is_learnt.all() and other.is_learnt.all()


def test_rows_hold_every_example_once_and_learn_only_what_is_written(
    sources: dict[str, TaskSource], prompts: Prompts, tokenizer: Tokenizer
) -> None:
    made = list(islice(examples(sources, prompts, tokenizer, 0.0), 60))
    steps = list(fill_rows(iter(made), 2, 64))
    flat = [each for rows in steps for row in rows for each in row]
    assert len(steps) > 3 and flat == made[: len(flat)] and len(made) - len(flat) < 12
    assert all(len(rows) == 2 and sum(len(each.tokens) - 1 for each in row) <= 64 for rows in steps for row in rows)
    batches = list(micro_batches(steps[0], 1, join("cpu")))
    learnt = [token for batch in batches for token in batch.targets_BT[batch.targets_BT != IGNORED].tolist()]
    assert learnt == [t for row in steps[0] for each in row for t in each.tokens[each.is_learnt].tolist()]
    assert sum(batch.global_target_tokens for batch in batches) == len(learnt)


def test_ranks_share_rows_that_they_do_not_divide_as_the_plan_does() -> None:
    rows = [[Example(np.arange(size), np.ones(size, np.bool_))] for size in (9, 5, 7)]
    (whole,) = micro_batches(rows, 3, Ranks(0, 1, torch.device("cpu")))
    for world in (2, 4):
        shares = []
        for rank in range(world):
            ranks = Ranks(rank, world, torch.device("cpu"))
            (batch,) = micro_batches(rows, 3, ranks)
            own = whole.tokens_BT[ranks.rows(3)]
            assert len(batch.tokens_BT) == max(1, len(own)) and batch.tokens_BT.shape[1] == 8
            assert batch.global_target_tokens == 18 and batch.num_target_tokens == int(
                (batch.targets_BT != IGNORED).sum()
            )
            assert len(own) or (batch.documents_BT == -1).all(), "a row of padding where a rank has none"
            shares.append(batch.tokens_BT[: len(own)])
        assert np.array_equal(np.concatenate(shares), whole.tokens_BT)


@pytest.mark.parametrize("num_taken", [0, 1, 4, 13])
def test_demonstrations_resume_without_the_examples_of_earlier_steps(
    num_taken: int, sources: dict[str, TaskSource], prompts: Prompts, tokenizer: Tokenizer
) -> None:
    train = TrainConfig(steps=1, rows=4, seq_len=64, micro_batches=2)
    generated: list[int] = []

    def stream(first: int) -> Iterator[Example]:
        for number, one in enumerate(examples(sources, prompts, tokenizer, 0.3, first=first), first):
            generated.append(number)
            yield one

    def same(one: Batch, other: Batch) -> bool:
        return all(np.array_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(Batch))

    whole, resumed, old = (Demonstrations(stream, train, join("cpu")) for _ in range(3))
    for _ in range(num_taken):
        whole.next()
    generated.clear()
    resumed.restore(json.loads(json.dumps(whole.state())))
    first = whole.state()["first_example"]
    assert (first > 0) == (num_taken > 2) and all(number >= first for number in generated)
    old.restore({"taken": num_taken})  # as an earlier version wrote it
    for _ in range(5):
        assert same(batch := whole.next(), resumed.next()) and same(batch, old.next())
        assert whole.state() == resumed.state() == old.state()


def test_an_example_that_no_row_can_hold_is_refused() -> None:
    long = Example(np.zeros(10, np.int64), np.ones(10, np.bool_))
    with pytest.raises(UserError, match=r"train.seq_len: 8 is less than the 9"):
        next(fill_rows(iter([long]), 2, 8))


def test_a_recipe_without_a_start_is_refused(sources: dict[str, TaskSource], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start: missing"):
        sft(recipe().replace(start=None), sources, tmp_path / "start")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, TaskSource], tokenizer: Tokenizer) -> Path:
    return sft(recipe(), sources, tmp_path_factory.mktemp("sft") / "start", tokenizer=tokenizer, ranks=join("cpu"))


def test_the_start_is_a_checkpoint_that_has_learnt_the_form(start: Path, sources: dict[str, TaskSource]) -> None:
    checkpoint, tokenizer = read_checkpoint(start), load_tokenizer(start)
    assert checkpoint.lineage is not None and checkpoint.lineage.stage == "sft"
    dialogue, problem = Dialogue(tokenizer), sources["flip"].problem(3)
    made = example(dialogue, problem, sources["flip"].demonstration(problem))
    with torch.no_grad():
        logp = checkpoint.model.logits(torch.from_numpy(made.tokens)[None, :-1])[0].log_softmax(-1)
    picked = logp.gather(-1, torch.from_numpy(made.tokens)[1:, None])[:, 0]
    assert picked[torch.from_numpy(made.is_learnt[1:])].mean() > -2.5  # untrained: −ln 280 = −5.6


def test_a_start_without_a_network_trains_an_existing_one_further(
    start: Path, sources: dict[str, TaskSource], tmp_path: Path
) -> None:
    plan = recipe()
    assert plan.start is not None
    further = plan.replace(start=plan.start.replace(model=None))
    with pytest.raises(UserError, match=r"start\.model: missing"):
        sft(further, sources, tmp_path / "none", ranks=join("cpu"))
    with pytest.raises(UserError, match=r"start\.model: describes a new network"):
        sft(plan, sources, tmp_path / "two", origin=start, ranks=join("cpu"))
    made = read_checkpoint(sft(further, sources, tmp_path / "more", origin=start, ranks=join("cpu")))
    before = read_checkpoint(start)
    assert made.lineage is not None and made.lineage.parents == (before.lineage,) and made.config == before.config
    assert load_tokenizer(made.folder).fingerprint() == load_tokenizer(start).fingerprint()
    dialogue, problem = Dialogue(load_tokenizer(start)), sources["flip"].problem(3)
    told = torch.from_numpy(example(dialogue, problem, sources["flip"].demonstration(problem)).tokens)
    with torch.no_grad():
        was, now = (
            -each.model.logits(told[None, :-1])[0].log_softmax(-1).gather(-1, told[1:, None]) for each in (before, made)
        )
    written = slice(len(dialogue.prompt(problem.messages)) - 1, None)
    assert now[written].mean() < was[written].mean() < 2.5  # goes on where the other ended


@pytest.mark.slow
def test_a_start_computes_in_the_dtype_that_it_is_told(sources: dict[str, TaskSource], tmp_path: Path) -> None:
    plain, weights = recipe(), {}
    assert plain.start is not None
    for dtype in ("float32", "bfloat16"):
        told = StartConfig.model_validate({**plain.start.model_dump(), "steps": 1, "dtype": dtype})
        made = sft(plain.replace(start=told), sources, tmp_path / dtype, ranks=join("cpu"))
        weights[dtype] = torch.cat([each.flatten() for each in read_checkpoint(made).model.state_dict().values()])
    # the first step of AdamW moves each weight by the rate, up or down: few gradients change their sign by rounding
    apart = (weights["float32"] - weights["bfloat16"]).abs() > 1e-3
    assert 0 < apart.float().mean() < 0.1


def test_a_start_keeps_the_sizes_alive_that_it_is_told(sources: dict[str, TaskSource], tmp_path: Path) -> None:
    plain = recipe()
    assert plain.start is not None
    told = plain.start.replace(steps=2, optim=plain.start.optim.replace(weight_decay=0.0))
    elastic = {
        "anchors": {"corner": {"experts": 2, "top_k": 1}},
        "anchor_share": 1.0,
        "width_share": 0.0,
        "depth_share": 0.0,
    }
    chosen = plain.replace(
        start=StartConfig.model_validate({**told.model_dump(), "elastic": {**elastic, "top_k_share": 0.0}})
    )
    found = read_checkpoint(sft(chosen, sources, tmp_path / "start", ranks=join("cpu")))
    assert found.presets["corner"].experts == 2
    assert found.config.widths == (4, 2), "the corner has balance biases of its own"
    untrained = dict(initial_state(found.config, plain.train.seed))
    moved = {
        (name, expert)
        for name, tensor in found.model.state_dict().items()
        if tensor.dim() == 3 and len(tensor) == 4
        for expert in range(4)
        if not torch.equal(tensor[expert], untrained[name][expert])
    }
    assert len({expert for _, expert in moved}) == 2, "every step trained the corner alone"


def test_the_synchronous_loop_samples_trains_and_activates(start: Path, tmp_path: Path) -> None:
    """All roles, real ones, one after the other."""
    plan = recipe()
    prompts = plan_prompts(plan, {"flip": None}, {})

    def open_sources() -> dict[str, TaskSource]:
        return {name: open_source(name, source) for name, source in plan.sources.items()}

    def run(folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
        engine = EngineRole(partial(open_rollout_engine, plan, start, "cpu"), waits=True)
        reward = RewardRole(open_sources)
        agent = AgentRole(
            plan, FolderStore(folder), load_tokenizer(start), open_sources, lambda caller: Clients((engine,), reward)
        )
        trainer = TrainerRole(plan, folder, start, ranks=join("cpu"))
        try:
            reports = asyncio.run(run_synchronously(plan, prompts.task, agent, [engine], trainer))
        finally:
            engine.close()
        trainer.copy_weights()
        version = asyncio.run(trainer.publish())
        assert version is not None
        return reports, fetch(version)

    reports, weights = run(tmp_path / "one")
    assert [report.step for report in reports] == [1, 2]
    assert all(report.num_samples == 8 for report in reports)
    assert "routes/flips" in reports[0].scalars
    for report in reports:
        # the engine has activated the weights of the step before; two implementations of one network in fp32
        assert report.scalars["mismatch/same_share"] == 1.0 and report.scalars["staleness/max"] == 0.0
        assert report.scalars["mismatch/same_k3_mean"] < 1e-6
        assert report.scalars.get("routes/flips", 0.0) == 0.0 and report.scalars["reward/uniform_groups"] == 0.0
    assert any(
        not torch.equal(tensor, read_checkpoint(start).model.state_dict()[name]) for name, tensor in weights.items()
    )


@pytest.mark.slow
def test_the_tokenizer_knows_the_tools_that_every_prompt_offers() -> None:
    source = SourceConfig(kind="search", args={"documents": 6, "hops": [1]})
    opened = {"s": open_source("s", source)}
    told = recipe().replace(sources={"s": source})
    tokenizer = learn_tokenizer(opened, plan_prompts(told, {"s": None}, {}), 600)
    problem = opened["s"].problem(0)
    offered = json.dumps(schemas(opened["s"], problem)[0])
    assert len(tokenizer.encode(offered)) < len(offered) / 3
    call = opened["s"].demonstration(problem)[0]["tool_calls"][0]["function"]
    assert len(tokenizer.encode(json.dumps({**call, "arguments": {}}))) < 16


def test_a_demonstration_of_many_turns_is_what_the_agent_loop_makes_of_it(tmp_path: Path) -> None:
    """Calls, their results and a user who speaks in between: the same tokens, and a loss on the model's turns alone."""

    class Talking(Counters):
        def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
            well, user, done = (
                {"role": role, "content": text}
                for role, text in (
                    ("assistant", "well"),
                    ("user", f"{problem.payload['start'] + 5}?"),
                    ("assistant", "done"),
                )
            )
            return recorded(self.open(problem), (calling(4, 1), well, user, calling(2), done))

    source, made = Talking(), agents.tokenizer()
    plan = plan_prompts(recipe(), {"flip": None}, {})
    one = next(examples({"flip": source}, plan, made, 0.0))
    problem = source.problem(plan.task(SUPERVISED).item)
    ends = np.flatnonzero(np.diff(np.r_[False, one.is_learnt, False]))
    turns = [one.tokens[start:end] for start, end in ends.reshape(-1, 2)]
    assert len(turns) == 4 and all([turn[-1] in Dialogue(made).stop_ids for turn in turns])
    limits = {**agents.LONG, "max_len": 2500, "max_turns": 6}
    loop = agents.agent(tmp_path, [agents.Spoken(turns)], source=source, **limits)
    task = replace(agents.ONE, item=problem.item, max_tokens=1500)
    (done,) = asyncio.run(loop._within_lease(task, 0)).trajectories
    assert agents.tokens_of(done) == one.tokens.tolist()
    assert [segment.is_sampled for segment in done.segments] == [False, True] * 4
    assert (
        np.concatenate([np.full(len(each.tokens), each.is_sampled) for each in done.segments]).tolist()
        == one.is_learnt.tolist()
    )
