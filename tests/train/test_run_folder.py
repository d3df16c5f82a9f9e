"""The record of a run."""

from pathlib import Path

from stretto.data.loader import Mixture, Part
from stretto.train.run_folder import RunInfo, read_info, write_info


def test_a_renamed_run_finds_its_own_files_and_those_of_others(tmp_path: Path) -> None:
    def info(run: Path) -> RunInfo:
        parts = (Part(name="own", path=run / "data/00"), Part(name="other", path=tmp_path / "runs/data"))
        data = Mixture(parts=parts, val=run / "data/val")
        return RunInfo(stage="pretrain", data=data, tokenizer=run / "data/tokenizer", parent=tmp_path / "checkpoint")

    write_info(tmp_path / "run", info(tmp_path / "run"))
    assert read_info(tmp_path / "run") == info(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert read_info(tmp_path / "renamed") == info(tmp_path / "renamed")
