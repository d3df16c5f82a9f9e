"""Study of elastic pre-training: what it costs the full network, and what every size gives, each beside its control.

    python -m bench.study OUT --tokens 2e5 --eval-rows 32             small version, on text of this Python's library
    python -m bench.study OUT --data FOLDER --network 8M --tokens 8e6 --seeds 0 1 2 3 --minutes 170      run again to continue
    python -m bench.study OUT … --mutant no-anchors                  after that: without training of smaller sizes
    python -m bench.study OUT … --arms elastic ordinary scratch-half  only these arms for now
    python -m bench.study OUT … --tokens 3e7 --rates-of FILE         rates that the search of a shorter study chose, by its record
    python -m bench.study OUT … --controls-of FILE                   another schedule of the smaller sizes, beside the controls of a record
    python -m bench.study OUT … --record FILE                        keep the results, without the networks, in FILE, and go on from it
    python -m bench.study FILE --report [--picture FILE.png]         print them again, from an empty clone

Arms, each trained with every seed:

elastic      ours: anchors trained from half of the steps on, jointly with the full network (`bench/study.toml`)
single       ours without joint passes: each pass trains one size, without a teacher, with the tokens of the elastic network (``single``)
             and with its FLOPs (``single+``)
grown        one size a pass; smaller sizes are trained in all passes at the first step, and in the shares of `bench/study.toml` from half of
             the steps on (``grown``, ``grown+``)
ernie        the sampler that ERNIE 5.0 published, with the tokens of the elastic network (``ernie``) and with its FLOPs (``ernie+``)
emo          an ordinary network whose documents each use a pool of experts (EMO, 2605.06663)
ordinary     an ordinary network, with the tokens of the elastic one (``ordinary``) and with its FLOPs (``ordinary+``)
scratch-*    the shape of each size alone, with the same tokens
heal-*       each size extracted from ``elastic``, and cut from ``ordinary`` and ``emo`` (experts: the better of removal and REAP; layers:
             error of the logits without the layer), healed with 6 % of its scratch FLOPs
experts-*    nothing is trained: losses of each network with fewer experts, and all layers and experts per token
criteria     nothing is trained: losses of the ordinary network with half of its experts, kept by several criteria
continued    the ordinary network, made elastic afterwards with the FLOPs by which ``elastic`` is dearer; its rate is searched, too
marginal-*   the shape of each size alone, with the FLOPs that the size adds to those of ``ordinary``: its passes and its healing

`elastic` and `ordinary+` begin with the steps that they share with `ordinary` of the same rate, from one of its snapshots: the same bits,
and the same FLOPs in the tables, for less time. They start when that snapshot is there, not when the ordinary run has ended.

The first seed searches the learning rate of every trained arm at a quarter of the tokens. The candidate nearest to the minimum of a parabola
through their losses is chosen; while it is the lowest or the highest candidate, the search goes on beyond it. It does not go on where only
the lowest measured loss lies at an end: the best rate may then lie beyond, which the table of the search shows. The other seeds are
reported; each row of the tables has the seeds that have its arms. One half of the held-out rows chooses rates, the other half is reported.
Exit code 1: an aim is missed, or an arm is not done. With the mutant, exit code 1: a reported seed lacks half or corner, or one
of the two is not `MUTANT_GAP` worse than trained alone, so that the study would not notice untrained sizes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.measure import finish, refusing
from bench.common.rate_search import (
    parsed,
    recorded_search,
    search,
    search_run,
    search_table,
    searched_before,
    searching_parser,
)
from bench.common.study import Results, Run, carry_out, is_record, read_fields, read_results, unfinished, write_record
from bench.common.study_picture import Row, draw
from bench.common.study_runs import (
    CONTINUED_RATE,
    Trunk,
    fewer_experts,
    half_of_experts,
    heal_size,
    held_out_halves,
    make_elastic,
    shared_share,
    train,
)
from bench.common.study_tables import MAXIMUM, ONE_SIZE, SIZES, marginal_flops, mutant_misses, print_tables
from stretto.base.config import read_recipe
from stretto.base.track import wide_console
from stretto.data.demo_text import demo_documents
from stretto.model.spec import SubnetChoice, extracted_config
from stretto.train.prepare import learn_tokenizer, prepare_data, tokenise_documents
from stretto.train.recipe import ElasticConfig, Recipe
from stretto.train.run_folder import RunInfo

RECIPE = Path(__file__).with_suffix(".toml")
NETWORKS: Mapping[str, Sequence[str]] = {
    "0.5M": ("model.hidden_size=32", "model.head_dim=8", "model.expert_intermediate_size=24"),
    "2M": (),
    "8M": ("model.hidden_size=128", "model.head_dim=32", "model.num_layers=10", "model.expert_intermediate_size=72"),
    "30M": ("model.hidden_size=256", "model.head_dim=64", "model.num_layers=12", "model.expert_intermediate_size=128"),
}
"""Changes to the recipe's network, by its number of parameters."""
PARTS = {"large": 1.0, "half": 2.0, "corner": 7.0}
"""Parts of the passes with a trained size: the smallest one shares least with the full network."""
RATES = (1.0, 2.0, 4.0)
"""First candidates of the search without --rates: multiples of the recipe's learning rate."""
SEARCH_SHARE = 0.25
"""Tokens of a run of the search, as a share of the reported runs' tokens."""
HEAL_SHARE = 0.06
"""FLOPs of healing, as a share of the scratch control's."""
BRANCHES = ("elastic", "ordinary+")
"""Arms whose first steps are those of the ordinary network with the same seed and rate, and are not trained again."""
TRAINED = (*MAXIMUM, *ONE_SIZE, *(f"scratch-{size}" for size in SIZES))
SEARCHED = (*TRAINED, "continued")
"""Arms whose rates are searched."""
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "single": {"joint": False, "anchor_ce_weight": 1.0},
    "grown": {
        "joint": False, "anchor_ce_weight": 1.0, "starts_at": 0.0, "ramp_fraction": 0.0, "early_factor": 2.0, "early_until": 0.5,
        "anchor_share": 0.4, "depth_share": 0.05, "top_k_share": 0.05, "width_share": 0.05, "rank_layers_at": (), "rank_experts_at": (),
    },
    "ernie": {
        "sampler": "ernie", "joint": False, "starts_at": 0.0, "ramp_fraction": 0.1, "early_factor": 1.0, "rank_layers_at": (),
        "rank_experts_at": (),
    },
}  # fmt: skip
"""What other schedules of the smaller sizes change in the recipe's [elastic], by arm."""
LONGER = ("ordinary", *SCHEDULES)
"""Arms that are trained once more with the FLOPs of ``elastic``, under their names with a ``+``."""
ARMS = (
    *MAXIMUM,
    *ONE_SIZE,
    *(f"{arm}+" for arm in LONGER),
    "scratch",
    "continued",
    "heal",
    "experts",
    "criteria",
    "marginal",
)
"""Values of --arms. Each selects the arms whose names begin with it."""
HEALED = ("heal-elastic", "heal-ordinary", "heal-emo")
CONTROLS = (
    "ordinary-", "emo-", "scratch-", "heal-ordinary-", "heal-emo-", "experts-ordinary-", "experts-emo-", "criteria-",
)  # fmt: skip
"""Prefixes of the names of runs that train no smaller size and whose number of steps does not depend on the FLOPs of a run that does."""
PARTS_OF_ARMS = tuple(f"{arm}-{size}" for arm in ("scratch", *HEALED, "marginal") for size in SIZES)
"""Further values of --arms: the arms of one size."""


@refusing()
def main() -> None:
    _study(_parse())


def _study(options: argparse.Namespace) -> None:
    if is_record(options.out):
        arms, results = read_record(options.out)
    else:
        arms = study = open_study(options)
        recorded = searched_before(options.rates_of, study.seeds[0], study.rates) if options.rates_of else {}
        if options.controls_of:
            recorded |= read_controls(options.controls_of, study)
        if options.record:
            recorded |= read_own_record(options.record, study)
        if options.report:
            found: Results = read_results(study.out)
        else:
            found = carry_out(study.runs, study.out, options.jobs, options.minutes, recorded)
        results = {**recorded, **found}
        if options.record:
            write_record(
                options.record, {**identity(study), "seeds": list(study.seeds), "rates": list(study.rates)}, results
            )
    wide_console().print(search_table(SEARCHED, arms.rates, arms.seeds[0], results))
    if options.picture:
        draw(rows_of(arms, results)[0], list(SIZES), options.picture)
    finish(report(arms, results))


def _parse() -> argparse.Namespace:
    parser = searching_parser(__doc__, RATES, ARMS, eval_rows=256, picture="loss of every size", parts=PARTS_OF_ARMS)
    parser.add_argument(
        "--data", type=Path, help="data folder of `stretto tokenize`, or text; default: this Python's library"
    )
    parser.add_argument("--network", choices=NETWORKS, default="2M", help="number of parameters")
    parser.add_argument("--tokens", type=float, default=2e5, help="training tokens of a reported run")
    parser.add_argument(
        "--rates-of",
        type=Path,
        metavar="FILE",
        help="record of a shorter study, whose search chooses the rates of this one",
    )
    parser.add_argument(
        "--controls-of",
        type=Path,
        metavar="FILE",
        help="record of a study with another schedule of the smaller sizes ([elastic]): runs in it that train none are not repeated",
    )
    parser.add_argument("--mutant", choices=("no-anchors",), help="an elastic network that trains no smaller size")
    return parsed(parser)


@dataclass(frozen=True, slots=True)
class Arms:
    """Names of the runs, and what the search among them chose."""

    seeds: tuple[int, ...]
    mutant: str | None
    rates: tuple[float, ...]

    @property
    def reported(self) -> tuple[int, ...]:
        return self.seeds[1:]

    def name(self, arm: str, seed: int) -> str:
        mutant = f"-{self.mutant}" if self.mutant and "elastic" in arm else ""
        return f"{arm}{mutant}-{seed}"

    def rate(self, arm: str, results: Results) -> float | None:
        """The rate that the search chose; None: the search of ``arm`` is not done."""
        return search(arm, self.rates, results)[1]


@dataclass(frozen=True, slots=True)
class Study(Arms):
    """Plan of the runs as a function of the results so far."""

    out: Path
    info: RunInfo
    recipe: Recipe
    arms: tuple[str, ...]
    """Of `ARMS` and `PARTS_OF_ARMS`: what is trained now."""

    def wants(self, *arms: str) -> bool:
        return all(arm in self.arms or arm.split("-")[0] in self.arms for arm in arms)

    def recipe_of(self, arm: str, rate: float, seed: int, share: float = 1.0) -> Recipe:
        """Recipe of a trained arm; ``share``: number of steps over that of the study's recipe."""
        recipe = self.recipe
        steps = max(1, round(share * recipe.train.steps))
        train = recipe.train.replace(steps=steps, seed=seed, eval_every=steps)
        if arm == "ordinary":  # others begin with one of its snapshots
            # by steps alone: in a long run those by time would push out the ones that others begin with
            train = train.replace(snapshot_every=max(1, steps // 20), keep_snapshots=16, snapshot_minutes=1e6)
        optim = recipe.optim.replace(lr=recipe.optim.lr * rate)
        elastic = recipe.elastic
        if arm.startswith("scratch-"):
            choice = elastic.anchors[arm.removeprefix("scratch-")]
            network = recipe.network()
            off = ElasticConfig(sampler="off", anchor_share=0.0)
            return recipe.replace(
                model=extracted_config(network, choice.of(network)), elastic=off, train=train, optim=optim
            )
        if arm.startswith("ordinary") or arm == "emo" or (arm == "elastic" and self.mutant == "no-anchors"):
            elastic = ElasticConfig(sampler="off", anchors=elastic.anchors, anchor_share=0.0)
        else:
            elastic = elastic.replace(**SCHEDULES.get(arm.removesuffix("+"), {}))
        return recipe.replace(elastic=elastic, train=train, optim=optim)

    def runs(self, results: Results) -> list[Run]:
        """Every run of the chosen arms whose settings are known."""
        runs, first = [], self.seeds[0]
        for arm in TRAINED:
            # the longer run of this arm needs no run of as many tokens
            if not (self.wants(arm) or (arm in ONE_SIZE and self.wants(f"{arm}+"))):
                continue
            for candidate in search(arm, self.rates, results)[0]:
                recipe = self.recipe_of(arm, candidate, first, SEARCH_SHARE)
                ordinary = search_run("ordinary", candidate)
                is_planned = candidate in search("ordinary", self.rates, results)[0]
                trunk = self._trunk(arm, ordinary, SEARCH_SHARE, results) if is_planned else None
                runs.append(self._training(search_run(arm, candidate), arm, recipe, trunk))
        runs += self._search_of_continued(results)
        for seed in self.reported:
            for arm in filter(self.wants, TRAINED):
                if (rate := self.rate(arm, results)) is not None:
                    recipe = self.recipe_of(arm, rate, seed)
                    is_equal = rate == self.rate("ordinary", results)
                    trunk = self._trunk(arm, self.name("ordinary", seed), 1.0, results) if is_equal else None
                    runs.append(self._training(self.name(arm, seed), arm, recipe, trunk))
            for run in self._dependent(results, seed):
                others = () if run.starts_with else run.needs  # `_trunk` has decided about the former
                if self.wants(*map(_arm, (run.name, *others))):
                    runs.append(run)
        return runs

    def _training(self, name: str, arm: str, recipe: Recipe, trunk: Trunk | None = None) -> Run:
        return Run(
            name, partial(train, self.info, recipe, arm == "emo", trunk), needs=(trunk.run.name,) if trunk else (),
            starts_with=trunk.last_snapshot if trunk else None, resumes=True, keeps_snapshots=arm == "ordinary",
            lr=recipe.optim.lr,
        )  # fmt: skip

    def _trunk(self, arm: str, ordinary: str, share: float, results: Results) -> Trunk | None:
        """What a run of ``arm`` shares with the run ``ordinary``, which has the same seed and rate and ``share`` of the study's steps;
        None: nothing, or its folder is lost."""
        is_there = (self.out / ordinary).is_dir() if ordinary in results else self.wants("ordinary")
        if arm not in BRANCHES or self.mutant or not is_there:
            return None
        own, settings = (self.recipe_of(each, 1.0, self.seeds[0], share) for each in (arm, "ordinary"))
        return Trunk(self.out / ordinary, settings.train, shared_share(own))

    def _search_of_continued(self, results: Results) -> list[Run]:
        """Runs that search the rate of ``continued``, from the best network and for the FLOPs of the other searches."""
        elastic, ordinary = self.rate("elastic", results), self.rate("ordinary", results)
        if self.mutant or not self.wants("continued", "ordinary") or elastic is None or ordinary is None:
            return []
        sources = search_run("elastic", elastic), search_run("ordinary", ordinary)
        return [
            self._continued(search_run("continued", rate), rate, self.seeds[0], *sources, results)
            for rate in search("continued", self.rates, results)[0]
        ]

    def _continued(self, name: str, rate: float, seed: int, elastic: str, ordinary: str, results: Results) -> Run:
        recipe = self.recipe_of("elastic", rate, seed)
        flops = results[elastic]["flops"] - results[ordinary]["flops"]
        work = partial(make_elastic, self.info, recipe, self.out / ordinary, flops)
        return Run(name, work, needs=(ordinary,), lr=recipe.optim.lr * CONTINUED_RATE)

    def _dependent(self, results: Results, seed: int) -> list[Run]:
        """Runs that need FLOPs or weights of others with the same seed."""
        elastic, ordinary = (results.get(self.name(arm, seed)) for arm in ("elastic", "ordinary"))
        runs = []
        for arm in LONGER:
            rate, longer = self.rate(arm, results), f"{arm}+"
            if rate is None or elastic is None:
                continue
            # the search of these arms tells how many FLOPs a token takes, so that the longer run needs no run of as many tokens
            done = results.get(search_run(arm, rate) if arm in ONE_SIZE else self.name(arm, seed))
            if done is None:
                continue
            flops = done["flops"] * elastic["tokens"] / done["tokens"]
            recipe = self.recipe_of(longer, rate, seed, elastic["flops"] / flops)
            trunk = self._trunk(longer, self.name(arm, seed), 1.0, results)
            runs.append(self._training(self.name(longer, seed), longer, recipe, trunk))
        if elastic and ordinary and not self.mutant and (own := self.rate("continued", results)) is not None:
            names = [self.name(arm, seed) for arm in ("continued", "elastic", "ordinary")]
            runs.append(self._continued(names[0], own, seed, names[1], names[2], results))
        for arm in MAXIMUM:
            source = self.name(arm, seed)
            work = partial(fewer_experts, self.info, self.recipe_of(arm, 1.0, seed), self.out / source)
            runs.append(Run(self.name(f"experts-{arm}", seed), work, needs=(source,)))
        source = self.name("ordinary", seed)
        work = partial(half_of_experts, self.info, self.recipe_of("ordinary", 1.0, seed), self.out / source)
        runs.append(Run(self.name("criteria", seed), work, needs=(source,)))
        for size in SIZES:
            scratch = results.get(self.name(f"scratch-{size}", seed))
            if scratch is None:
                continue
            for parent in ("elastic", "ordinary", "emo"):
                source = self.name(parent, seed)
                work = partial(
                    heal_size, self.info, self.recipe_of(parent, 1.0, seed), self.out / source, size,
                    HEAL_SHARE * scratch["flops"], seed + 100,
                )  # fmt: skip
                runs.append(Run(self.name(f"heal-{parent}-{size}", seed), work, needs=(source,)))
            healed = results.get(self.name(f"heal-elastic-{size}", seed))
            alone_rate = self.rate(f"scratch-{size}", results)
            if elastic and ordinary and healed and alone_rate:
                share = marginal_flops(elastic, ordinary, healed) / scratch["flops"]
                recipe = self.recipe_of(f"scratch-{size}", alone_rate, seed, share)
                runs.append(self._training(self.name(f"marginal-{size}", seed), f"scratch-{size}", recipe))
        return runs


def _arm(run: str) -> str:
    """The arm in the name of a ``run`` with a reported seed."""
    return run.rpartition("-")[0]


def open_study(options: argparse.Namespace) -> Study:
    out = options.out.resolve()
    recipe = read_recipe(RECIPE, Recipe, [*NETWORKS[options.network], *options.settings])
    network = recipe.model
    anchors = {
        name: SubnetChoice(
            layers=math.floor(layers * network.num_layers), experts=round(part * network.num_experts),
            top_k=round(part * network.top_k),
        )
        for name, (layers, part) in SIZES.items()
    }  # fmt: skip
    steps = max(1, round(options.tokens / (recipe.train.rows * recipe.train.seq_len)))
    recipe = recipe.replace(
        elastic=recipe.elastic.replace(anchors=anchors, anchor_weights=PARTS),
        train=recipe.train.replace(steps=steps, eval_rows=options.eval_rows),
    )
    data = options.data or own_text(out, recipe)
    mixture, tokenizer, data_hash = prepare_data(out, [str(data)], None, recipe.model.vocab_size)
    info = RunInfo(stage="pretrain", recipe=recipe, data=mixture, data_hash=data_hash, tokenizer=tokenizer)
    held_out_halves(info, recipe.train)  # refuses too few rows
    return Study(tuple(options.seeds), options.mutant, tuple(options.rates), out, info, recipe, tuple(options.arms))


RECORDED = ("seeds", "rates", "mutant", "runs")
"""Fields of a record that `Arms` and `report` need."""


def identity(study: Study) -> dict[str, Any]:
    """What identifies the runs of a record; each result also has the commit and the machine that it comes from."""
    return {"mutant": study.mutant, "data_hash": study.info.data_hash, "recipe": study.recipe}


def read_own_record(path: Path, study: Study) -> dict[str, dict[str, Any]]:
    """Results in the record ``path`` of the same study, perhaps with other reported seeds; none if there is no file."""
    return recorded_search(path, identity(study), study.seeds[0])


def read_controls(path: Path, study: Study) -> dict[str, dict[str, Any]]:
    """Results of the runs that train no smaller size, in the record ``path`` of a study that may differ in how those are trained. Raises
    UserError: it differs in more."""
    read_fields(path, RECORDED)  # refuses a file that does not exist
    found = recorded_search(path, identity(study), study.seeds[0], _is_of_smaller_sizes)
    return {name: result for name, result in found.items() if name.removeprefix("search-").startswith(CONTROLS)}


def _is_of_smaller_sizes(key: str) -> bool:
    return key.startswith("elastic.") and not key.startswith("elastic.anchors.")


def read_record(path: Path) -> tuple[Arms, Results]:
    """Arms and results in the record ``path``."""
    record = read_fields(path, RECORDED)
    return Arms(tuple(record["seeds"]), record["mutant"], tuple(record["rates"])), record["runs"]


def own_text(out: Path, recipe: Recipe) -> Path:
    """Data folder with the text of this Python's library, tokenised for ``recipe``."""
    folder = out / "data"
    if not (folder / "data.json").is_file():
        tokenizer = learn_tokenizer(demo_documents(), recipe.model.vocab_size)
        tokenise_documents({"train": demo_documents()}, folder, tokenizer)
    return folder


def rows_of(study: Arms, results: Results) -> tuple[list[Row], list[str]]:
    """Results of the reported seeds, and the names of the runs that are missing."""
    arms = [*MAXIMUM, *ONE_SIZE, *(f"{arm}+" for arm in LONGER), *PARTS_OF_ARMS]
    arms += [*(f"experts-{arm}" for arm in MAXIMUM), "criteria", *(["continued"] if not study.mutant else [])]
    rows: list[Row] = [
        {arm: found for arm in arms if (found := results.get(study.name(arm, seed))) is not None}
        for seed in study.reported
    ]
    names = [study.name(arm, seed) for seed in study.reported for arm in arms]
    return rows, [name for name in names if name not in results]


def report(study: Arms, results: Results) -> list[str]:
    """Print each comparison over the reported seeds that have its arms; return what is missing and the aims that are missed."""
    rows, missing = rows_of(study, results)
    missed = print_tables(rows)
    return (
        mutant_misses(study.mutant, rows) if study.mutant else [*unfinished(missing, isinstance(study, Study)), *missed]
    )


if __name__ == "__main__":
    main()
