"""The stages from text to an exported small model, as functions: tokenize, pretrain, adopt, elasticize, latency, search, extract, heal, quantise.

Each stage takes folders or the results of other stages, writes a folder, and returns an object that opens it. The commands of the
same names call these functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stretto.api.adopt import AdoptOptions, adopt_command, upcycling
from stretto.api.arguments import (
    Data,
    ModelLike,
    PathLike,
    held_out_path,
    listed_data,
    model_path,
    new_folder,
    run_folder,
)
from stretto.api.model import Model, SizeLike, load
from stretto.api.search import (
    SEARCH_FILE,
    QuantiseOptions,
    Search,
    SearchRecord,
    extract_command,
    kept_table,
    load_checkpoint,
    on_other_data,
    parse_limits,
    quantise_command,
    warn_if_far_off,
)
from stretto.api.train import (
    begun_run,
    check_teacher,
    claim_run,
    find_teacher,
    fit_memory,
    has_begun,
    held_out,
    kept_checkpoint,
    leaves_routers,
    model_to_go_on_with,
    new_heal,
    new_info,
    new_job,
    new_run,
    open_loader,
    own_tokenizer,
    put_in_place,
    require_adopted,
    same_folder,
    write_result,
)
from stretto.base.config import RecipeLike, Settings, overriding, read_recipe, validate_options
from stretto.base.errors import UserError, user_errors, user_errors_naming
from stretto.base.paths import (
    CHECKPOINT,
    LATENCY_FILE,
    checkpoint_folder,
    claimed,
    expanded,
    remove,
    require_apart,
    user_path,
    write_json,
)
from stretto.base.records import Elsewhere, Meter
from stretto.base.track import require_wandb, say
from stretto.evals.loss import EvalBatch
from stretto.evals.loss import evaluate as loss_of
from stretto.model.checkpoint import require_new_checkpoint, stores_integers
from stretto.model.elastic import extract as cut_out
from stretto.model.families import default_family
from stretto.model.parallel import DeviceLike, Ranks, device_name, in_memory, join, stored, stored_for_training
from stretto.model.spec import Subnet, named_subnets
from stretto.model.transformer import Transformer
from stretto.subnets.latency import LatencyTable, measure, usual_workloads, write_table
from stretto.subnets.search import SearchOptions
from stretto.subnets.search import search as search_subnets
from stretto.subnets.space import SearchSpace
from stretto.text import VOCAB_SIZE
from stretto.train import stages
from stretto.train.loop import Job
from stretto.train.prepare import TextOptions, require_outside, tokenise_data
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe
from stretto.train.run_folder import ADOPTED, RunInfo, read_info
from stretto.train.step import metered


@user_errors
def tokenize(
    data: Data,
    out: PathLike,
    *,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    tokenizer: PathLike | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Turn text into token shards in constant memory. Resumes when it is called again.

    Args:
        data: the path of one file or folder of text, or ``OWNER/NAME`` of a dataset on the Hugging Face hub; no text itself and no
            DataFrame. For a mixture, tokenise each source into a folder of its own with the same ``tokenizer``.
        out: data folder to write.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        tokenizer: tokenizer.json or its folder; trained on the text by default.
        vocab_size: vocabulary size of the tokenizer that is trained; `stretto.text.VOCAB_SIZE` by default.

    Returns:
        ``out``, which ``data`` of other functions takes.

    Raises:
        UserError: bad data, more than one source, a vocabulary size beside a tokenizer, or another process is writing to the folder.
    """
    if tokenizer is not None and vocab_size is not None:
        raise UserError(f"--vocab-size: {tokenizer} has a vocabulary already; leave --vocab-size or --tokenizer out")
    sources, folder = listed_data(data), user_path(out, "out")
    vocabulary = None if tokenizer is None else user_path(tokenizer, "tokenizer")
    text = TextOptions(held_out_path(val), val_fraction, text_field)
    tokenise_data(sources, folder, vocabulary, VOCAB_SIZE if vocab_size is None else vocab_size, text)
    return folder


@user_errors_naming(renamed={"from": "origin"})
def pretrain(
    recipe: RecipeLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    tokenizer: PathLike | None = None,
    origin: ModelLike | None = None,
    steps: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb: str | None = None,
) -> Model:
    """Pre-train an elastic network on text: every step trains the full network and sampled sub-networks (Once-for-all, 1908.09791).

    Args:
        recipe: a recipe of pre-training (``small``, ``demo``; docs/tutorials/own_text.md).
        data: training text; not needed with ``resume``. The path of a file or folder, ``PATH@WEIGHT`` in a mixture, or ``OWNER/NAME``
            of a dataset on the Hugging Face hub; several in a list. For text in memory write a file, for a DataFrame a Parquet file.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        tokenizer: tokenizer.json or its folder; trained on the data by default.
        origin: run or checkpoint whose network and tokenizer to continue from; the recipe's ``[model]`` is then not read.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``; begin where there is no run yet.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Returns:
        The trained model.

    Raises:
        UserError: bad data or recipe, or a folder that holds another run.
    """
    require_wandb(wandb)
    folder = run_folder(out, recipe, "pretrain")
    start = None if origin is None else model_path(origin)
    given, resume = None, has_begun(folder, resume)
    if start is not None or resume:
        given = model_to_go_on_with(folder, start)
    parsed = read_recipe(recipe, Recipe, overriding(settings, {"train.steps": steps}), given)
    default_family(parsed.network())  # raises an error before the training if no family can store the network
    ranks, named = join(device, parsed.train.ep), listed_data(data)
    text = TextOptions(held_out_path(val), val_fraction, text_field)
    if not resume:
        require_outside(folder, named, text)
    if given is not None and leaves_routers(parsed.model, parsed, folder, resume, ranks):
        parsed = parsed.with_fixed_routers()
    parsed = fit_memory(parsed, parsed.network(), ranks)
    vocabulary = None if tokenizer is None else user_path(tokenizer, "tokenizer")
    origin_folder = checkpoint_folder(start).resolve() if start is not None else None

    def begin() -> RunInfo:
        if not resume:
            return new_run(parsed, folder, named, vocabulary, origin_folder, text)
        begun = begun_run(folder, parsed, named, vocabulary, text)
        return same_folder(folder, begun, "--from", origin_folder, "parent")

    with ExitStack() as held:
        info = ranks.first(lambda: claim_run(folder, resume, held, begin))
        parent = info.parent
        begun = stored(parent) if parent is not None else None
        trained = stages.pretrain(parsed, new_job(folder, info, ranks, resume, wandb), begun)
        write_result(folder / CHECKPOINT, folder.name, info, trained, ranks, parsed.elastic.anchors, begun)
    return load(folder, device=device)


@user_errors_naming(further=AdoptOptions.model_fields)
def adopt(
    source: PathLike,
    out: PathLike | None = None,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    method: str = "split",
    shared: int | None = None,
    parent_flops: float | None = None,
    parent_tokens: float | None = None,
    **options: Any,
) -> Model:
    """Import a Hugging Face or GGUF checkpoint as a run that can be searched, extracted and served at every size.

    Weights are streamed, so the checkpoint may be larger than memory. Experts and layers are ranked on calibration text
    (REAP, 2510.13999; leave-one-out for layers).

    Args:
        source: a checkpoint folder, a run, a GGUF file, ``smollm2``, or a name on the Hugging Face hub.
        out: run folder to make; ``runs/`` and the name of the source by default.
        experts: number of experts that a dense network is turned into without changing its outputs (docs/ADOPT.md).
        top_k: number of those experts that a token uses.
        method: ``split`` cuts each feed-forward layer into experts, ``copy`` makes each expert a copy of it.
        shared: number of experts that every token uses, with ``split``.
        parent_flops: FLOPs of the source's own training, for the cost ledger; unknown by default.
        parent_tokens: number of tokens of the source's own training; unknown by default.
        options: ``dtype``, ``order``, ``layer_order``, ``calibration``, ``calibration_tokens``, ``text_field`` of `AdoptOptions`.

    Raises:
        UserError: no such source, one that is not supported, or a folder that holds something else.
    """
    cost = {"flops": _as_integer(parent_flops), "tokens": _as_integer(parent_tokens)}
    before = validate_options(Elsewhere, cost, {name: f"--parent-{name}" for name in cost})
    conversion = upcycling(experts, top_k, method, shared)
    parsed = validate_options(AdoptOptions, options | {"upcycling": conversion, "before": before})
    named = user_path(source, "source")
    folder = Path("runs") / named.name if out is None else user_path(out, "out")
    adopt_command(expanded(source, "source"), folder, parsed)  # as it is spelled: ./a/b is not a name on the hub
    return load(folder)


def _as_integer(number: float | None) -> int | float | None:
    """``6e21`` as an integer; any other value is left to the validation."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


@user_errors
def elasticize(
    source: ModelLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    recipe: RecipeLike = "elasticize",
    teacher: ModelLike | None = None,
    cache_logits: int | None = None,
    trainable: str | None = None,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    steps: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
) -> Model:
    """Train a checkpoint further so that its smaller sizes work too; by default the unchanged checkpoint is the teacher.

    Args:
        source: run or checkpoint.
        out: new run folder; None, or ``source`` itself: an adopted run is trained in place, and its original checkpoint stays in
            ``adopted/``.
        teacher: run or checkpoint to distil from.
        cache_logits: number of the teacher's log-probabilities per token to keep on disk, so that it need not stay in memory.
        trainable: ``all``, or ``routers`` for routers, norms and biases only.
        recipe: a recipe of continued training; ``elasticize`` by default.
        data: training text, as of `pretrain`; not needed with ``resume``.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``; begin where there is no run yet.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UserError: bad data or recipe, a teacher with another vocabulary, or a folder that holds another run.
    """
    keys = {"trainable": trainable, "cached_logits": cache_logits, "train.steps": steps}
    parsed = read_recipe(recipe, ElasticizeRecipe, overriding(settings, keys))
    folder = model_path(source) if out is None else user_path(out, "out")
    in_place = out is None or folder.resolve() == model_path(source).resolve()
    resume = has_begun(folder, resume, in_place)
    ranks, named = join(device, parsed.train.ep), listed_data(data)
    text = TextOptions(held_out_path(val), val_fraction, text_field)
    if not resume and not in_place:
        require_outside(folder, named, text)

    def begin() -> RunInfo:
        origin = kept_checkpoint(folder) if in_place else checkpoint_folder(model_path(source)).resolve()
        network = stored_for_training(origin)  # refuses a damaged checkpoint before text is tokenised
        config = network.config
        teacher_folder = None if teacher is None else check_teacher(config.vocab_size, model_path(teacher))
        is_fixed = leaves_routers(config, parsed, folder, resume, ranks)
        complete = parsed.for_network(config, network.presets, is_fixed)
        complete = fit_memory(complete, config, ranks)
        if resume:
            begun = begun_run(folder, complete, named, text=text)
            begun = same_folder(folder, begun, "--teacher", teacher_folder, "teacher")
            return begun if in_place else same_folder(folder, begun, "source", origin, "parent")
        tokens, parent = (folder / "elasticize", None) if in_place else (folder, origin)
        folders = {"parent": parent, "teacher": teacher_folder}
        return new_info(
            "elasticize", complete, tokens, named, own_tokenizer(origin), config.vocab_size, text, **folders
        )

    with ExitStack() as held:
        if in_place:
            ranks.first(lambda: require_adopted(folder))
        info = ranks.first(lambda: claim_run(folder, resume, held, begin, ADOPTED if in_place else CHECKPOINT))
        assert isinstance(info.recipe, ElasticizeRecipe)
        origin = info.parent or kept_checkpoint(folder)
        taught_by = stored(info.teacher) if info.teacher is not None else None
        network = stored(origin)
        trained = stages.elasticize(info.recipe, new_job(folder, info, ranks, resume), network, taught_by)
        result = folder / ("elasticized" if in_place else CHECKPOINT)
        anchors = info.recipe.elastic.anchors
        write_result(result, folder.name, info, trained, ranks, anchors, network, origin)
        if in_place:
            ranks.first(lambda: put_in_place(folder, result))
    return load(folder, device=device)


@user_errors
def latency(model: ModelLike, *, device: DeviceLike = "auto") -> LatencyTable:
    """Measure this machine's latency table for ``model`` and keep it in the folder of ``model``, for limits in milliseconds in `search`.

    Raises:
        UserError: ``model`` is neither a run nor a checkpoint, or its weights are integers: a table holds the times of float weights.
    """
    run = model_path(model)
    if stores_integers(folder := checkpoint_folder(run)):
        raise UserError(
            f"{folder}: its weights are integers, and latency tables are of float weights; measure the checkpoint that it was made from"
        )
    checkpoint = load_checkpoint(run, join(device))
    network, space = checkpoint.model, SearchSpace.of(checkpoint.model.config)
    presets = named_subnets(checkpoint.config, checkpoint.presets).values()
    fewest = min([space.experts[0], *(num for each in presets for num in each.experts)])
    experts, top_ks = sorted({fewest, *_ends(space.experts)}), _ends(space.top_k)
    table = measure(network, experts, top_ks, usual_workloads(network.config))
    write_table(run / LATENCY_FILE, table)
    say(
        f"{run / LATENCY_FILE}: {table.num_samples} measurements on {table.machine.device}; other processes disturbed {table.num_disturbed}"
    )
    if table.num_uncertain:
        say(
            f"{table.num_uncertain} networks have no undisturbed measurement; measure again when the machine is less busy"
        )
    for timing in table.timings:
        full_ms = table.predict_ms(network.config.full(), timing.workload)
        say(
            f"{timing.workload.label()}: {full_ms:.3g} ms per step at full size; at the sizes that were measured to test them, "
            f"predictions were at most {timing.held_out_error:.1%} off"
        )
    warn_if_far_off(run / LATENCY_FILE, table)
    return table


def _ends(values: tuple[int, ...]) -> tuple[int, ...]:
    """Smallest, middle and largest of ``values``; the latency table interpolates between them."""
    return tuple(sorted({values[0], values[len(values) // 2], values[-1]}))


@user_errors
def search(
    model: ModelLike,
    data: Data = (),
    *,
    max_total: float | None = None,
    max_active: float | None = None,
    max_latency_ms: float | None = None,
    heal_steps: int = 0,
    heal_recipe: RecipeLike = "heal",
    nested: bool = False,
    per_layer: bool = False,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    options: SearchOptions | None = None,
    device: DeviceLike = "auto",
) -> Search:
    """Find the sub-network of lowest held-out loss within limits (sensitivities, then NSGA-II where the space is too large).

    Args:
        model: a run.
        data: text to measure on, in the forms that `pretrain` takes; the run's own held-out text by default.
        max_total: share of the full network's parameters, 0 to 1 (memory).
        max_active: share of the active parameters, 0 to 1 (compute).
        max_latency_ms: milliseconds per decoding step; needs a table of `latency`.
        heal_steps: number of healing steps for each of the best few before the choice; 0: none.
        heal_recipe: a recipe of healing; ``heal_steps`` overrides its number of steps.
        nested: drop layers in the order of training only.
        per_layer: let the number of experts differ between layers.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        options: seed and sizes of the search.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UserError: ``model`` is not a run, or no sub-network meets the limits (the message names the nearest limits that can be met).
    """
    run, limits, named = model_path(model), parse_limits(max_total, max_active, max_latency_ms), listed_data(data)
    if not named and (val is not None or val_fraction is not None):
        raise UserError(
            f"{'--val' if val else '--val-fraction'}: needs --data; name the text to measure on, or leave it out"
        )
    if heal_steps < 0:
        raise UserError(f"--heal-steps {heal_steps}: must be 0 or more; 0 heals nothing")
    healing = _search_healing(heal_recipe, heal_steps) if heal_steps else None
    info, ranks = read_info(run), join(device)
    if isinstance(info.recipe, HealRecipe):
        raise UserError(
            f"{run}: a {info.stage} run, whose network has one size; name the folder of the pre-training run"
        )
    checkpoint = load_checkpoint(run, ranks)
    network, weights = checkpoint.model, checkpoint.lineage.weights_hash if checkpoint.lineage else ""
    if healing is not None and healing.train.seq_len > (most := checkpoint.config.max_positions):
        raise UserError(
            f"train.seq_len: {healing.train.seq_len} of {heal_recipe} exceeds the network's {most} positions"
        )
    if healing is not None and checkpoint.config.only_ranks:
        healing = healing.with_fixed_routers()
    with ExitStack() as held:
        ranks.first(
            lambda: held.enter_context(claimed(run / "search"))
        )  # tokens and healed candidates are written there
        if named:
            text = TextOptions(held_out_path(val), val_fraction, text_field)
            info = ranks.first(lambda: on_other_data(run, info, named, text, checkpoint))
        batches = held_out(info, info.train, ranks)
        table = kept_table(run, network, ranks, needed=max_latency_ms is not None)
        meter = Meter("search", device_name(ranks.device), ranks.world)
        space = SearchSpace.of(
            checkpoint.config,
            layers="nested" if nested else "free",
            widths="per_layer" if per_layer else "uniform",
        )
        with meter, metered(network, meter):
            result = search_subnets(
                network,
                batches,
                limits,
                space=space,
                options=options,
                presets=named_subnets(checkpoint.config, checkpoint.presets),
                table=table,
                heal=None if healing is None else _healer(healing, run, info, network, batches, ranks, meter),
            )
        record = SearchRecord(result=result, receipt=meter.receipt(), weights=weights)
        write_json(run / SEARCH_FILE, record.model_dump(mode="json"))
    return Search(result)


def _search_healing(recipe: RecipeLike, num_steps: int) -> HealRecipe:
    """The recipe of healing with ``num_steps`` steps. Raises `UserError`: a bad recipe, or one for several ranks."""
    keys = ("train.steps", "train.eval_every", "train.snapshot_every")
    healing = read_recipe(recipe, HealRecipe, [f"{key}={num_steps}" for key in keys])
    if healing.train.ep > 1:
        raise UserError(f"train.ep: {healing.train.ep}, and a search heals on one rank; set 1 in {recipe}")
    return healing


def _healer(
    healing: HealRecipe,
    run: Path,
    info: RunInfo,
    network: Transformer,
    batches: Sequence[EvalBatch],
    ranks: Ranks,
    meter: Meter,
) -> Callable[[Subnet], float]:
    """A function that heals a copy of a Subnet in a folder of its own and returns its held-out loss, nats per token. ``meter`` counts
    the cost. All candidates are healed in one data type, which ``auto`` chooses for the first, so that their losses compare."""
    numbers = itertools.count()
    assert info.data_hash is not None, "a run that can be searched has data"
    data_hash = info.data_hash

    def healed_nll(subnet: Subnet) -> float:
        nonlocal healing
        flops_before = meter.receipt().flops
        loader = open_loader(info, healing.train, ranks)
        folder = run / "search" / f"heal-{next(numbers):02d}"
        student = cut_out(network, subnet).float()  # `heal` trains in fp32, in any storage type of the checkpoint
        job = Job(folder, loader, (), data_hash, ranks)
        healed = stages.heal(healing, job, in_memory(student), in_memory(network))
        healing = healing.replace(train=healing.train.replace(dtype=healed.pace.dtype))
        ranks.first(lambda: remove(folder))  # its snapshot has weights and states of the optimiser
        # the search's meter has counted the teacher's passes already, because the teacher is the searched network
        spent, counted = healed.meter.receipt(), meter.receipt().flops - flops_before
        meter.add(flops=spent.flops - counted, tokens=spent.tokens)
        return loss_of(healed.model, healed.model.config.full(), batches).nll

    return healed_nll


@user_errors
def extract(
    model: ModelLike, subnet: SizeLike, out: PathLike | None = None, *, device: DeviceLike = "auto", force: bool = False
) -> Model:
    """Write one size of a network as an ordinary checkpoint. Refuses unless its logits agree with those of the masked network up to rounding.

    Args:
        model: run or checkpoint.
        subnet: the size (docs/GLOSSARY.md).
        out: checkpoint folder to write; beside the model's, with ``-extract`` added, by default.
        device: ``cpu``, ``cuda`` or ``auto``.
        force: replace what ``out`` holds.

    Raises:
        UserError: the model has no such size, ``out`` exists, or its logits differ by more than rounding.
    """
    folder = new_folder(model, "extract") if out is None else user_path(out, "out")
    extract_command(model_path(model), subnet, folder, device, force)
    return load(folder, device=device)


@user_errors
def heal(
    model: ModelLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    recipe: RecipeLike = "heal",
    teacher: ModelLike | None = None,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    steps: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    force: bool = False,
    device: DeviceLike = "auto",
) -> Model:
    """Train an extracted checkpoint for a short while, on text and towards the network that it was cut from.

    Args:
        model: the extracted checkpoint.
        out: checkpoint folder to write; beside the model's, with ``-heal`` added, by default.
        teacher: the network to distil from; the one it was cut from by default.
        recipe: a recipe of healing; ``heal`` by default.
        data: training text, as of `pretrain`; not needed with ``resume``.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot of ``{out}.run``; begin where there is none.
        force: replace the checkpoint ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UserError: bad data or recipe, ``out`` exists, or the teacher is not found.
    """
    out_folder = new_folder(model, "heal") if out is None else user_path(out, "out")
    parsed = read_recipe(recipe, HealRecipe, overriding(settings, {"train.steps": steps}))
    run = out_folder.parent / f"{out_folder.name}.run"
    resume = has_begun(run, resume)
    folder, teacher_place = checkpoint_folder(model_path(model)), None if teacher is None else model_path(teacher)
    teacher_folder = None if teacher_place is None else checkpoint_folder(teacher_place)
    for source in filter(None, (folder, teacher_folder)):
        require_apart(out_folder, source)
    require_new_checkpoint(out_folder, force or resume)
    student = stored(folder)  # refuses a damaged checkpoint before text is tokenised
    if stores_integers(folder):
        say(f"{folder}: its integer weights are dequantised for healing; quantise the healed checkpoint again")
    ranks, named = join(device, parsed.train.ep), listed_data(data)
    if leaves_routers(student.config, parsed, run, resume, ranks):
        parsed = parsed.with_fixed_routers()
    text = TextOptions(held_out_path(val), val_fraction, text_field)
    if not resume:
        require_outside(run, named, text)

    def begin() -> RunInfo:
        if not resume:
            taught_by = find_teacher(parsed, folder, student.config.vocab_size, teacher_place)
            return new_heal(parsed, run, folder, student.config, named, taught_by, text)
        begun = same_folder(run, begun_run(run, parsed, named, text=text), "source", folder, "parent")
        return same_folder(run, begun, "--teacher", teacher_folder if parsed.ce_weight < 1.0 else None, "teacher")

    with ExitStack() as held:
        info = ranks.first(lambda: claim_run(run, resume, held, begin, replaces=force and not resume))
        taught_by = stored(info.teacher) if info.teacher is not None else None
        trained = stages.heal(parsed, new_job(run, info, ranks, resume), student, taught_by)
        write_result(out_folder, out_folder.name, info, trained, ranks, student.presets, student)
    return load(out_folder, device=device)


@user_errors
def quantise(
    model: ModelLike,
    out: PathLike | None = None,
    *,
    dtype: str = "int8",
    method: str = "rtn",
    experts: str | None = None,
    attention: str | None = None,
    head: str | None = None,
    group: int = 32,
    zeros: bool = False,
    data: Data = (),
    calibration_tokens: int = 16_384,
    chat: bool = False,
    device: DeviceLike = "auto",
    force: bool = False,
) -> Model:
    """Write a checkpoint with integer weights. Each of its sizes has the same integers as that size quantised alone (docs/QUANTISE.md).

    Args:
        model: run or checkpoint whose weights are not integers.
        out: checkpoint folder to write; beside the model's, with the dtype added, by default.
        dtype: ``int8`` or ``int4``, of experts and attention; the head has ``int8`` unless it is named.
        method: ``rtn`` rounds to nearest; ``gptq`` makes up for errors on calibration text (2210.17323).
        experts: ``int8``, ``int4`` or ``none`` for all feed-forward weights.
        attention: the same for the projections of attention.
        head: the same for the output matrix; a head that is tied to the embedding becomes a matrix of its own.
        group: number of neighbouring inputs with one scale.
        zeros: give each group of 4 bits a zero as well. Such weights cannot be exported to Q4_0, and vLLM has no experts with zeros.
        data: calibration text, in the forms that `pretrain` takes; the training text of a run by default.
        calibration_tokens: number of tokens of that text for ``gptq``.
        chat: the records of ``data`` are conversations, in the forms that `sft` reads.
        device: ``cpu``, ``cuda`` or ``auto``.
        force: replace what ``out`` holds.

    Raises:
        UserError: a group that does not divide the inputs of a weight, no calibration text, or ``out`` exists.
    """
    given = locals()
    options = validate_options(QuantiseOptions, {name: given[name] for name in QuantiseOptions.model_fields})
    folder = new_folder(model, options.dtype) if out is None else user_path(out, "out")
    quantise_command(model_path(model), folder, options, listed_data(data), device, force)
    return load(folder, device=device)
