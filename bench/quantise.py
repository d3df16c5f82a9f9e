"""Loss of integer weights at every preset, beside the bf16 weights of the same run, and equality of slices.

    python -m bench.quantise RUN [--head int4] [--attention int8] [--calibration-tokens 16384]
    python -m bench.quantise RUN --suite gym [--limit 100]
    python -m bench.quantise RUN --speed [--threads 1] [--rounds 3]
    python -m bench.quantise RUN --memory

Quantises the checkpoint of RUN (`stretto demo` writes one) in every way, and measures the held-out rows of the run. The difference to bf16 is
taken token by token, so its interval is much narrower than that of a loss. Intervals are over documents, not over tokens, because the
differences within a document are correlated. Aims: int8 at most +0.005 nats per token, int4 with GPTQ at most
+0.05, at every preset; every tensor of an extracted preset equals the quantised tensor of the extracted preset to the bit (rounding to
nearest), or the extracted values (GPTQ). A row of losses is measured with dequantised weights in fp32; the row "in the engine" below it, with
the compiled kernels, which also quantise tokens to 8 bits. The aims hold for both.

With ``--suite``: scores of the weights at every preset, and paired differences to bf16, by `stretto.compare`; by GPTQ if the suite is an RL
recipe, whose demonstrations of other problems then calibrate. `bench/quantise.toml` describes a network with three skills at three
sizes, and is its suite:

    stretto sft bench/quantise.toml -o RUN
    python -m bench.quantise RUN/sft --suite bench/quantise.toml --limit 300

With ``--speed``: processor time of a decoding step of the full network, with weights rounded to nearest, in turns; medians of the rounds.
`bench.decode_speed --integers` compares the speed with llama.cpp's.
With ``--memory``: peak memory of a process that opens the checkpoint and answers a prompt of 512 tokens, without that of an empty process,
beside the bytes of weights that `stretto serve --subnet auto` plans with; of a RUN with integer weights alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from bench.common.measure import bench_parser, finish, half_width, random_prompts, refusing, table
from stretto.api.evaluate import compare
from stretto.api.search import QuantiseOptions, extract_command, quantise_command
from stretto.api.serve import fitting_subnet
from stretto.api.train import held_out
from stretto.base.config import read_recipe, validate
from stretto.base.paths import checkpoint_folder
from stretto.base.track import wide_console
from stretto.engine.engine import Engine
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.evals.loss import EvalBatch
from stretto.flow.prompts import SourceTables
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_checkpoint, read_integers, read_presets, stores_integers
from stretto.model.elastic import extract, slice_integers
from stretto.model.parallel import join
from stretto.model.spec import Subnet, named_subnets
from stretto.model.transformer import Transformer
from stretto.ops.int_weights import IntWeight
from stretto.ops.logprob import IGNORED, head_loss
from stretto.ops.native import load
from stretto.post.quantise import part_of_weight, round_to_nearest, schemes_of, untie
from stretto.train.run_folder import read_info

AIMS = {("int8", "rtn"): 0.005, ("int8", "gptq"): 0.005, ("int4", "rtn"): None, ("int4", "gptq"): 0.05}
"""Largest difference to bf16, in nats per token; None: no aim."""


@refusing()
def main() -> None:
    options = _parse()
    if options.speed:
        speed(options.run, options.threads, options.rounds)
    elif options.memory:
        memory(options.run, options.dtypes)
    elif options.suite:
        scores(options.run, options.dtypes, options.suite, options.limit)
    else:
        finish(compare_losses(options))


def _parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"])
    parser.add_argument("--attention", help="dtype of attention, if it is another")
    parser.add_argument("--head", default="int8")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--suite", help="a suite of `stretto eval`: scores in place of losses")
    parser.add_argument("--limit", type=int, default=100, help="problems per domain of the suite")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def compare_losses(chosen: argparse.Namespace) -> list[str]:
    """Print what integer weights cost, in nats per token; return the aims that are missed and the slices that are not equal."""
    info = read_info(chosen.run)
    batches = held_out(info, info.train, join("cpu"))
    source = checkpoint_folder(chosen.run)
    network = read_checkpoint(source, dtype=torch.bfloat16)
    subnets = named_subnets(network.config, network.presets)
    base, documents_N = losses(network.model.float(), subnets, batches), documents_of(batches)
    rows = table("Loss of integer weights above bf16, nats per token", "weights", "bytes", *subnets, "aim", "slices")
    rows.add_row("bf16", size_of(source, 0.5), *(f"{float(values.mean()):.4f}" for values in base.values()), "", "")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for (dtype, method), aim in AIMS.items():
            if dtype not in chosen.dtypes or method not in chosen.methods:
                continue
            parts = {"attention": chosen.attention, "head": chosen.head, "group": chosen.group}
            fields = {"dtype": dtype, "method": method, "calibration_tokens": chosen.calibration_tokens, **parts}
            options, out = validate(QuantiseOptions, fields, "bench.quantise"), Path(folder) / f"{dtype}-{method}"
            quantise_command(chosen.run, out, options)
            unequal = [name for name, each in subnets.items() if not slices_are_equal(chosen.run, out, each, options)]
            failures += [f"{dtype} {method}: the slice {name} is not that of the quantised network" for name in unequal]
            slices = f"not {unequal}" if unequal else "equal"
            for place, found in {
                "": losses(read_checkpoint(out, dtype=torch.float32).model, subnets, batches),
                " in the engine": engine_losses(out, subnets, batches),
            }.items():
                more = {name: found[name] - base[name] for name in subnets}
                failures += _add_row(rows, f"{dtype} {method}{place}", size_of(out), more, documents_N, aim, slices)
    wide_console().print(rows)
    num_documents = len(documents_N.unique())
    print(
        f"{len(documents_N):,} held-out tokens of {chosen.run} in {num_documents:,} documents; intervals are 95 %, over documents"
    )
    return failures


def _add_row(
    rows: Table,
    weights: str,
    size: str,
    more: Mapping[str, Tensor],
    documents_N: Tensor,
    aim: float | None,
    slices: str,
) -> list[str]:
    """Add the means of the differences ``more`` [tokens] by preset; return those above ``aim``. ``documents_N``: as `documents_of`."""
    means = {name: float(each.mean()) for name, each in more.items()}
    cells = [f"{mean:+.4f} ± {half_over_documents(more[name], documents_N):.4f}" for name, mean in means.items()]
    rows.add_row(weights, size, *cells, "" if aim is None else f"≤ +{aim}", slices)
    return [
        f"{weights} {name}: {mean:+.4f}, the aim is {aim}"
        for name, mean in means.items()
        if aim is not None and mean > aim
    ]


def speed(run: Path, threads: int, rounds: int) -> None:
    """Print processor milliseconds per decoding step by batch size and weights."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(checkpoint_folder(run), dtype=torch.float32)
    model, settings = checkpoint.model, EngineConfig(num_pages=400, page_size=16, max_batch=16)
    untie(model)
    engines = {}
    for name, dtype in {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "int8": torch.float32,
        "int4": torch.float32,
    }.items():
        integers = {}
        if name.startswith("int"):
            plan = QuantiseOptions.model_validate({"dtype": name}).plan()
            integers = round_to_nearest(model.state_dict(), schemes_of(model.config, checkpoint.family, plan))
        weights = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
        engines[name] = Engine(weights, None, settings, library=load(), integers=integers)
    numbers = itertools.count()

    def processor_s(engine: Engine, batch: int, num_tokens: int) -> float:
        sampling = Sampling(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
        for prompt in random_prompts(batch, 16, model.config.vocab_size, next(numbers)):
            engine.add(Request(str(next(numbers)), tuple(prompt), sampling, Phases(model.config.full())))
        start = time.process_time()
        while engine.has_work:
            engine.step()
        return time.process_time() - start

    rows = table(f"Processor milliseconds per decoding step, {threads} threads", "batch", *engines)
    for batch in (1, 4, 16):
        found: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():  # a call's fixed cost and its prompt cancel
                found[name].append((processor_s(engine, batch, 9) - processor_s(engine, batch, 1)) / 8)
        rows.add_row(str(batch), *(f"{1e3 * median(values):.2f}" for values in found.values()))
    wide_console().print(rows)


@torch.no_grad()
def losses(model: Transformer, subnets: Mapping[str, Subnet], batches: Sequence[EvalBatch]) -> dict[str, Tensor]:
    """Negative log-likelihood of every held-out token, by preset."""
    found = {}
    for name, subnet in subnets.items():
        values = []
        for batch in batches:
            is_target_N = batch.targets_BT.flatten() != IGNORED
            hidden_ND = model(batch.ids_BT, subnet, batch.ctx).hidden_BTD.flatten(0, 1)[is_target_N]
            values.append(head_loss(hidden_ND, model.head_VD, batch.targets_BT.flatten()[is_target_N])[1].double())
        found[name] = torch.cat(values)
    return found


def documents_of(batches: Sequence[EvalBatch]) -> Tensor:
    """Number of the document of every held-out token, in the order of `losses`. The parts of a document in two rows count as two."""
    found, num_rows = [], 0
    for batch in batches:
        documents_BT = batch.ctx.documents_BT
        assert documents_BT is not None, "rows without documents"
        rows_B1 = torch.arange(num_rows, num_rows + len(documents_BT))[:, None]
        numbers_BT = rows_B1 * documents_BT.shape[1] + documents_BT  # a row has at most one document for each token
        found.append(numbers_BT[batch.targets_BT != IGNORED])
        num_rows += len(documents_BT)
    return torch.cat(found)


def half_over_documents(values_N: Tensor, documents_N: Tensor) -> float:
    """Half of the 95 % confidence interval of the mean of ``values_N`` [tokens], where documents and not tokens are independent.

    The interval of a ratio of means, linearised: that of the documents' sums of deviations from the mean over tokens.
    """
    place_N = documents_N.unique(return_inverse=True)[1]
    num_documents = int(place_N.max()) + 1
    sums_D = torch.zeros(num_documents, dtype=torch.double).index_add_(
        0, place_N, (values_N - values_N.mean()).double()
    )
    return half_width((sums_D * num_documents / len(values_N)).tolist())


def engine_losses(folder: Path, subnets: Mapping[str, Subnet], batches: Sequence[EvalBatch]) -> dict[str, Tensor]:
    """The same from an engine with the integers of ``folder``, whose kernels quantise tokens to 8 bits. Each document is a prompt."""
    documents = [document for batch in batches for document in _documents(batch)]
    longest = 1 + max(len(ids) for ids, _ in documents)
    opened = open_engine(folder, EngineConfig(max_batch=16, max_len=longest, prefix_cache=False), with_tokenizer=False)
    assert opened.engine.integers, f"{folder}: no kernels for its integers"
    sampling, found = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=True), {}
    for name, subnet in subnets.items():
        asked = [Request(str(place), tuple(ids), sampling, Phases(subnet)) for place, (ids, _) in enumerate(documents)]
        values = []
        for done, (_, is_target) in zip(opened.engine.generate(asked), documents, strict=True):
            assert done.error is None and done.prompt_logprobs is not None, done
            values.append(-torch.from_numpy(done.prompt_logprobs).double()[is_target])
        found[name] = torch.cat(values)
    return found


def _documents(batch: EvalBatch) -> Iterator[tuple[list[int], Tensor]]:
    """Token ids of each document with the target of its last token, and for each token but that target, whether it has one."""
    documents_BT = batch.ctx.documents_BT
    assert documents_BT is not None, "rows without documents"
    for ids_T, targets_T, documents_T in zip(batch.ids_BT, batch.targets_BT, documents_BT, strict=True):
        for number in documents_T[documents_T >= 0].unique().tolist():
            is_own_T = documents_T == number
            ids, targets = ids_T[is_own_T], targets_T[is_own_T]
            ends = [] if targets[-1] == IGNORED else [int(targets[-1])]
            is_target = (targets != IGNORED)[: len(ids) - 1 + len(ends)]
            if is_target.any():
                yield [*ids.tolist(), *ends], is_target


def scores(run: Path, dtypes: Sequence[str], suite: str, limit: int) -> None:
    """Print scores of bf16 and integer weights at every preset, with paired differences to bf16."""
    with tempfile.TemporaryDirectory() as folder:
        conversations = Path(folder) / "conversations.jsonl"
        if Path(suite).is_file():
            write_demonstrations(read_recipe(suite, RlRecipe), conversations)
        models = {"bf16": checkpoint_folder(run)}
        for dtype in dtypes:
            models[dtype] = Path(folder) / dtype
            quantise_command(run, models[dtype], QuantiseOptions.model_validate({"dtype": dtype}))
            if conversations.is_file():
                options = QuantiseOptions.model_validate({"dtype": dtype, "method": "gptq", "chat": True})
                models[f"{dtype} gptq"] = Path(folder) / f"{dtype}-gptq"
                quantise_command(run, models[f"{dtype} gptq"], options, [str(conversations)])
        for preset in ("", *(f":{name}" for name in read_presets(checkpoint_folder(run)) if name != "full")):
            out = Path(folder) / f"compared{preset.replace(':', '-')}"
            sizes = [f"{model}{preset}" for model in models.values()]
            print(f"{preset.removeprefix(':') or 'full'}\n{compare(sizes, out, suites=[suite], limit=limit)}")


def write_demonstrations(recipe: RlRecipe, file: Path, num_problems: int = 200) -> None:
    """Write conversations that solve the first problems of each source of ``recipe``, which evaluations do not use."""
    with (
        file.open("w", encoding="utf-8") as lines,
        SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources,
    ):
        for source, item in itertools.product(sources.values(), range(num_problems)):
            problem = source.problem(item)
            lines.write(json.dumps({"messages": [*problem.messages, *source.demonstration(problem)]}) + "\n")


PEAK = """
import re, sys
from pathlib import Path
import bench.quantise as quantise

def peak_mb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3

before = peak_mb()
quantise.answer(Path(sys.argv[1]))
print(peak_mb() - before)
"""
"""Program that prints the memory that opening a checkpoint and answering a prompt add to a process."""


def answer(folder: Path) -> None:
    """Answer a prompt of 512 tokens with one token."""
    settings = EngineConfig(max_len=1024, num_pages=64, max_step_tokens=512)
    opened = open_engine(folder, settings, with_tokenizer=False)
    prompt = random_prompts(1, 512, opened.engine.network.vocab_size)[0]
    opened.engine.generate([Request("0", tuple(prompt), Sampling(max_tokens=1), Phases(opened.engine.network.full()))])


def memory(run: Path, dtypes: Sequence[str]) -> None:
    """Print peak memory beside the size of the weight files."""
    rows = table("Peak memory of an engine", "weights", "files", "peak", "peak / files", "planned weights")
    with tempfile.TemporaryDirectory() as folder:
        models = {"as they are": checkpoint_folder(run)}
        for dtype in [] if stores_integers(models["as they are"]) else dtypes:
            models[dtype] = Path(folder) / dtype
            quantise_command(run, models[dtype], QuantiseOptions.model_validate({"dtype": dtype}))
        for name, model in models.items():
            planned = fitting_subnet(model, None, None, torch.device("cpu"), torch.float32, EngineConfig()).weight_bytes
            command = [sys.executable, "-c", PEAK, str(model)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peak = float(done.stdout.split()[-1])
            ratio = f"{peak / float(size_of(model).split()[0]):.2f}x"
            rows.add_row(name, size_of(model), f"{peak:.0f} MB", ratio, f"{planned / 1e6:.0f} MB")
    wide_console().print(rows)


def slices_are_equal(run: Path, quantised: Path, subnet: Subnet, options: QuantiseOptions) -> bool:
    """Whether `stretto extract` of the quantised checkpoint gives the integers of the quantised extract (rounding to nearest), or those
    that were quantised with the whole network (GPTQ)."""
    with tempfile.TemporaryDirectory() as folder:
        extract_command(quantised, subnet, Path(folder) / "sliced")
        sliced, whole = read_integers(Path(folder) / "sliced"), read_integers(quantised)
    if options.method == "gptq":
        config = read_checkpoint(quantised).config
        return _equal(sliced, slice_integers(config, subnet, whole))
    smaller = extract(read_checkpoint(checkpoint_folder(run)).model, subnet)
    untie(smaller)
    plan = options.plan()
    schemes = {name: plan[part_of_weight(name)] for name in sliced}
    return _equal(sliced, round_to_nearest(smaller.state_dict(), schemes))


def _equal(one: Mapping[str, IntWeight], other: Mapping[str, IntWeight]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(weight.codes, other[name].codes) and torch.equal(weight.scales, other[name].scales)
        for name, weight in one.items()
    )


def size_of(folder: Path, factor: float = 1.0) -> str:
    """Size of the weight files."""
    num_bytes = factor * sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    return f"{num_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
