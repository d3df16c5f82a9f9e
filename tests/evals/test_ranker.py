"""The local judge: what it reads, that its head finds planted damages, and that layout, length and company change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.base.errors import UserError
from stretto.evals import ranker
from stretto.evals.ranker import (
    JudgeRecord,
    LocalJudge,
    Reader,
    open_judge,
    open_reader,
    read_books,
    train_head,
    windows,
)
from stretto.text.passages import Passage, bulleted, sentences
from tests.evals.judges import judge, network

Made = tuple[Path, JudgeRecord, Reader, list[Passage]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("judge")
    return folder / "judge", *judge(network(folder), folder / "judge")


@pytest.fixture
def local(made: Made) -> LocalJudge:
    return open_judge(made[0], dtype=torch.float32)


def planted(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of whole texts, and of two damages: one moves the states, the other the surprise by less than texts differ in it."""
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randn(num, ranker.PIECES + 1, 20, generator=draw)
    whole[..., -4] += 3 * torch.randn(num, 1, generator=draw)
    worse = whole[None].repeat(2, 1, 1, 1)
    worse[0, ..., 0] += 3.0
    worse[1, ..., -4] += 0.5
    worse[0, ..., -4] -= 5.0  # what is damaged most surprises least, as loops do
    return whole, worse + 0.05 * torch.randn(worse.shape, generator=draw)


def test_a_head_finds_what_any_text_shows_and_what_only_pairs_do() -> None:
    head = train_head(*planted(120, 0))
    whole, worse = planted(60, 1)
    own = [(head(whole) > head(each)).float().mean().item() for each in worse]
    any_ = [(head(whole)[:, None] > head(each)).float().mean().item() for each in worse]
    assert own[0] > 0.95 and own[1] > 0.9 and any_[0] > 0.95 > 0.75 > any_[1]
    assert (head.logits(worse[0])[:, 0] > 0).float().mean() > 0.95  # it says which damage it was


def test_states_alone_tell_where_nothing_surprises() -> None:
    whole, worse = planted(120, 0)
    whole[..., -4:], worse[..., -4:] = 0.0, 0.0
    head = train_head(whole, worse)
    assert (head(whole) > head(worse[0])).float().mean() > 0.95


@pytest.mark.slow
def test_what_is_read_does_not_depend_on_what_else_is_read(made: Made) -> None:
    _, _, reader, found = made
    reader = open_reader(reader.folder, dtype=torch.float32)
    asked = [(each.prompt, each.text) for each in found[:5]]
    together = reader.read(asked)
    alone = torch.cat([reader.read([each]) for each in asked])
    assert together.shape == (5, ranker.PIECES + 1, 2 * 32 + 4)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)  # fp32 sums in another order
    assert (reader.read([("", asked[0][1])])[..., -2] == 0).all()  # no prompt explains nothing


def surprise(reader: Reader, prompt: str, text: str) -> torch.Tensor:
    """−log p of its tokens, times how many a character has: the slow way."""
    before, own = (reader.tokenizer.encode(each) for each in (prompt, f" {text}"))
    ids = [reader.tokenizer.eos_id, *before[-ranker.PROMPT :], *own]
    logp_TV = reader.model.logits(torch.tensor([ids])).log_softmax(-1)[0]
    told = -logp_TV[-len(own) - 1 : -1].gather(-1, torch.tensor(own)[:, None])[:, 0]
    return told * len(own) / (1 + len(text))


def test_surprise_is_minus_log_p(made: Made) -> None:
    reader, one = open_reader(made[2].folder, dtype=torch.float32), made[3][0]
    found = reader.read([(one.prompt, one.text)])[0]
    assert found[-1, -4].item() == pytest.approx(surprise(reader, one.prompt, one.text)[-1].item(), rel=1e-4)


def test_order_is_told_against_the_same_other_orders_whatever_it_is(made: Made) -> None:
    reader, one = open_reader(made[2].folder, dtype=torch.float32), made[3][0]
    moved = " ".join(reversed(sentences(one.text)))
    others = ranker._reorders(one.text)
    assert others == ranker._reorders(moved) and len({one.text, moved, *others}) > 2
    found = reader.read([(one.prompt, one.text), (one.prompt, moved), (one.prompt, sentences(one.text)[0])])[:, 0, -1]
    mean = torch.stack([surprise(reader, one.prompt, each).mean() for each in others]).mean()
    want = [(mean - surprise(reader, one.prompt, each).mean()).item() for each in (one.text, moved)]
    assert found.tolist() == pytest.approx([*want, 0.0], abs=1e-5)


def test_layout_and_the_order_of_two_change_nothing(local: LocalJudge, made: Made) -> None:
    one, other = made[3][:2]
    told = local.scores([(one.prompt, one.text), (one.prompt, bulleted(one.text)), (one.prompt, f"**{one.text}**\n\n")])
    assert told == pytest.approx([told[0]] * 3, abs=1e-6)
    assert local.first_wins(one.prompt, one.text, bulleted(one.text)) == 0.5
    first, second = (local.first_wins(one.prompt, *pair) for pair in ((one.text, other.text), (other.text, one.text)))
    assert first == 1 - second
    share, empty = local.shares_of(local.scores([(one.prompt, one.text), (one.prompt, " \n")]))
    assert 0 <= share <= 1 and empty == 0


@pytest.mark.slow
def test_a_long_answer_is_as_good_as_its_worst_window(local: LocalJudge, made: Made) -> None:
    one = made[3][0]
    long = " ".join([one.text] * 40)
    parts = windows(long, made[2].tokenizer)
    assert len(parts) == ranker._MAX_WINDOWS and parts[0][0] is None and long.endswith(parts[-1][1])
    assert all(len(made[2].tokenizer.encode(f" {part}")) <= ranker.WINDOW for _, part in parts)
    assert all(sentences(part) and part.endswith(".") for _, part in parts)
    each = [local.scores([(before or one.prompt, part)])[0] for before, part in parts]
    assert local.scores([(one.prompt, long)])[0] == pytest.approx(min(each), abs=1e-3)


def test_a_sentence_longer_than_a_window_is_read_to_its_end(local: LocalJudge, made: Made) -> None:
    one, reader = made[3][0], made[2]
    start = " ".join(one.text.replace(".", ",") for _ in range(3))
    parts = windows(start, reader.tokenizer)
    assert len(parts) > 1 and " ".join(part for _, part in parts) == start.strip()
    assert max(len(reader.tokenizer.encode(f" {part}")) for _, part in parts) < 1.2 * ranker.WINDOW
    asked = [(one.prompt, start), (one.prompt, f"{start} {'clock ' * 400}")]
    assert local.scores(asked)[0] != local.scores(asked)[1]
    assert len(windows("x" * 20_000, reader.tokenizer)) > 2


def test_a_head_that_is_not_whole_is_refused(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made[0], tmp_path / "judge")
    state = load_file(tmp_path / "judge" / ranker.HEAD_FILE)
    state.pop("bias_K")
    save_file(state, tmp_path / "judge" / ranker.HEAD_FILE)
    with pytest.raises(UserError, match=r"head\.safetensors: not readable: .*bias_K.*; train the judge again"):
        open_judge(tmp_path / "judge")


def test_a_prompt_in_an_unknown_script_is_refused_and_an_answer_in_one_is_worth_nothing(
    local: LocalJudge, made: Made
) -> None:
    with pytest.raises(
        UserError, match=r"^judge reward-[0-9a-f]{8}: a prompt in the script CJK, on which it was not trained"
    ):
        local.scores([("写一个关于河的故事。", made[3][0].text)])
    texts = ["从前有一个老人住在山里。", f"{made[3][0].text} 从前"]
    assert np.isfinite(local.scores([(made[3][0].prompt, text) for text in texts])).tolist() == [False, True]


@pytest.mark.slow
def test_judges_have_names_of_their_own_and_other_weights_are_refused(tmp_path: Path, made: Made) -> None:
    assert (
        made[1].name.startswith("reward-") and made[1].name != judge(network(tmp_path), tmp_path / "other", 6)[0].name
    )
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(
        weights.read_bytes()[:-1] + b"\x00" if weights.read_bytes()[-1] else weights.read_bytes()[:-1] + b"\x01"
    )
    with pytest.raises(UserError, match=r"judge\.json: network: .* has changed; train the judge again"):
        open_judge(tmp_path / "other")
    with pytest.raises(UserError, match="no such file; `stretto judge train"):
        open_judge(tmp_path / "nowhere")


def test_too_few_positions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 64 positions, but a judge needs"):
        open_reader(network(tmp_path, 64)).read([("a", "b")])


def test_books_without_authors(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "Once upon a time."}\n')
    with pytest.raises(UserError, match="--data: no record has the fields 'text' and 'author'"):
        read_books([path])
