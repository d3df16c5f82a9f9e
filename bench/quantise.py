"""Loss of integer weights at every preset, beside the bf16 weights of the same run, and equality of slices.

    python -m bench.quantise RUN [--head int4] [--calibration-tokens 16384]
    python -m bench.quantise RUN --speed [--threads 1] [--rounds 3]

Quantises the checkpoint of RUN (`stretto demo` writes one) in every way, and measures the held-out rows of the run. The difference to bf16 is
taken token by token, so its interval is much narrower than that of a loss. Aims: int8 at most +0.005 nats per token, int4 with GPTQ at most
+0.05, at every preset; every tensor of an extracted preset equals the quantised tensor of the extracted preset to the bit (rounding to
nearest), or the extracted values (GPTQ). Losses are measured with dequantised weights in fp32.

With ``--speed``: processor time of a decoding step of the full network, with weights rounded to nearest, in turns; medians of the rounds.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.common.measure import bench_parser, finish, random_prompts, table, wide_console
from stretto.api.search import QuantiseOptions, extract_command, quantise_command
from stretto.api.train import held_out
from stretto.base.paths import checkpoint_folder
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import read_checkpoint, read_integers
from stretto.model.elastic import extract, slice_integers
from stretto.model.parallel import join
from stretto.model.spec import Subnet, named_subnets
from stretto.model.transformer import Transformer
from stretto.ops.int_weights import IntWeight
from stretto.ops.logprob import IGNORED, head_loss
from stretto.ops.native import load
from stretto.post.quantise import round_to_nearest, schemes_of, untie
from stretto.train.run_folder import read_info

AIMS = {("int8", "rtn"): 0.005, ("int8", "gptq"): 0.005, ("int4", "rtn"): None, ("int4", "gptq"): 0.05}
"""Largest difference to bf16, in nats per token; None: no aim."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["int8", "int4"])
    parser.add_argument("--head", default="int8")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.speed:
        speed(arguments.run, arguments.threads, arguments.rounds)
        return
    info = read_info(arguments.run)
    batches = held_out(info, info.train, join("cpu"))
    source = checkpoint_folder(arguments.run)
    network = read_checkpoint(source, dtype=torch.bfloat16)
    subnets = named_subnets(network.config, network.presets)
    base = losses(network.model.float(), subnets, batches)
    rows = table("Loss of integer weights above bf16, nats per token", "weights", "bytes", *subnets, "aim", "slices")
    shares = {name: f"{float(values.mean()):.4f}" for name, values in base.items()}
    rows.add_row("bf16", size_of(source, 0.5), *shares.values(), "", "")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for (dtype, method), aim in [each for each in AIMS.items() if each[0][0] in arguments.dtypes]:
            fields = {"dtype": dtype, "method": method, "head": arguments.head, "group": arguments.group}
            options = QuantiseOptions(**fields, calibration_tokens=arguments.calibration_tokens)
            out = Path(folder) / f"{dtype}-{method}"
            quantise_command(arguments.run, out, options)
            found = losses(read_checkpoint(out, dtype=torch.float32).model, subnets, batches)
            differences = {name: found[name] - base[name] for name in subnets}
            cells = [f"{float(each.mean()):+.4f} ± {_half_width(each):.4f}" for each in differences.values()]
            unequal = [
                name for name, subnet in subnets.items() if not slices_are_equal(arguments.run, out, subnet, options)
            ]
            text = "" if aim is None else f"≤ +{aim}"
            rows.add_row(f"{dtype} {method}", size_of(out), *cells, text, "equal" if not unequal else f"not {unequal}")
            failures += [f"{dtype} {method}: the slice {name} is not that of the quantised network" for name in unequal]
            if aim is not None:
                failures += [
                    f"{dtype} {method} {name}: {float(each.mean()):+.4f}, the aim is {aim}"
                    for name, each in differences.items()
                    if float(each.mean()) > aim
                ]
    num_tokens = len(next(iter(base.values())))
    wide_console().print(rows)
    print(f"{num_tokens:,} held-out tokens of {arguments.run}; intervals are 95 % of the mean of paired differences")
    finish(failures)


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
    schemes = {name: plan["head"] if name == "head.weight" else plan["experts"] for name in sliced}
    return _equal(sliced, round_to_nearest(smaller.state_dict(), schemes))


def _equal(one: Mapping[str, IntWeight], other: Mapping[str, IntWeight]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(weight.codes, other[name].codes) and torch.equal(weight.scales, other[name].scales)
        for name, weight in one.items()
    )


def _half_width(differences: Tensor) -> float:
    """Half of the 95 % confidence interval of the mean over tokens."""
    return 1.96 * float(differences.std()) / len(differences) ** 0.5


def size_of(folder: Path, factor: float = 1.0) -> str:
    """Size of the weight files."""
    num_bytes = factor * sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    return f"{num_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
