"""What drawing and masking Subnets costs: step time with the elastic sampler over the sampler `off`.

    python -m bench.elastic_overhead [--steps N] [--threads N]

The draws are those of a pre-training run (widths by row, depth, top-k by layer), but depth and top-k are drawn from a
range of one, so that both sides execute the same matrix products and what is left is the overhead. The teacher's
forward of an anchor is work of its own and stands in a row of its own. One model, steps in turns; the overhead is the
median over rounds of a step's time over that of the `off` step beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count

import torch
from rich.table import Table

from bench.common.measure import Sample, Step, measure, ratio, wide_console
from bench.train_speed import OPTIM, Shape, shapes
from stretto.base.track import progress
from stretto.model.parallel import join
from stretto.model.transformer import Context, Transformer, build
from stretto.optim.build import build_optimizers
from stretto.train.recipe import ElasticConfig
from stretto.train.sampler import Sampler
from stretto.train.step import Distil, MicroBatch, optimisation_step, row_widths

ANCHOR_SHARE = ElasticConfig.model_fields["anchor_share"].default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="small")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each; medians are shown")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = shapes()[options.shape]
    config = shape.config.replace(widths=(shape.config.num_experts, shape.config.num_experts // 2), num_branches=2)
    shape = Shape(config, shape.rows, shape.length)
    model, elastic = (
        build(config, seed=0),
        ElasticConfig(
            anchor_share=0.0,
            depth_share=0.5,
            top_k_share=0.5,
            width_share=0.5,
            min_depth=config.num_layers,
            min_top_k=config.top_k,
        ),
    )  # every step draws, and half the rows are narrowed: more than any recipe would
    off = elastic.replace(sampler="off")
    new_step = _steps(model, shape)
    steps = {
        "off": new_step(off, None),
        "elastic": new_step(elastic, None),
        "anchor": new_step(off, Distil(model, config.full(), 0.5)),
    }
    with progress("interleaved", 3 * (2 + options.steps)) as advance:
        samples = measure(steps, options.steps, advance)
    _show(samples)


def _steps(model: Transformer, shape: Shape) -> Callable[[ElasticConfig, Distil | None], Step]:
    """Makes steps that share a model, its optimiser and a batch of packed documents."""
    config, ranks = shape.config, join("cpu")
    optimizers, dtype = build_optimizers(OPTIM, model), torch.float32
    ids_BT = torch.randint(config.vocab_size, (shape.rows, shape.length))
    documents_BT = (torch.arange(shape.length) * 2 // shape.length).expand_as(ids_BT)
    positions_BT = (torch.arange(shape.length) % (shape.length // 2)).expand_as(ids_BT)

    def new_step(elastic: ElasticConfig, distil: Distil | None) -> Step:
        sampler = Sampler(config, elastic, shape.rows, micro_batches=1, num_steps=1000, seed=0)
        numbers = count()

        def step() -> float:
            (plan,) = sampler.draw(next(numbers))
            widths = row_widths(plan.widths, slice(0, shape.rows), ranks.device)
            ctx = Context(positions_BT, documents_BT, widths)
            batch = MicroBatch(plan.kind, ids_BT, ids_BT, ctx, plan.subnet, ids_BT.numel(), distil)
            result = optimisation_step(
                model, optimizers, [batch], ranks, clip_norm=OPTIM.clip_norm, balance_rate=1e-3, dtype=dtype
            )
            return result.nll

        return step

    return new_step


def _show(samples: dict[str, list[Sample]]) -> None:
    table = Table(title=f"step time over the sampler off, {torch.get_num_threads()} threads")
    for heading in ("", "wall", "processor", "quiet rounds"):
        table.add_column(heading, justify="right" if heading else "left")

    def row(label: str, key: str, share: float) -> None:
        found = ratio(samples, key, "off")
        shown = "none quiet" if found.wall is None else f"{share * (found.wall - 1):+.1%}"
        table.add_row(label, shown, f"{share * (found.processor - 1):+.1%}", f"{found.num_quiet} of {found.num_rounds}")

    row("elastic: drawing and masking", "elastic", 1.0)
    row("an anchor step: teacher's forward and KL", "anchor", 1.0)
    row(f"the same, at a share of {ANCHOR_SHARE:.0%} of steps", "anchor", ANCHOR_SHARE)
    wide_console().print(table)


if __name__ == "__main__":
    main()
