"""Engines with integer weights: the kernels against the network in torch with tokens quantised in the same way.

Shape letters: N tokens, D inputs, F outputs, K experts per token.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.engine import Engine
from stretto.engine.loading import open_engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.engine.runner import MAX_NATIVE_TOKENS
from stretto.model.checkpoint import integer_forms, read_checkpoint, read_integers, write_checkpoint
from stretto.model.quantised import SCALES
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice
from stretto.model.transformer import Context, Transformer
from stretto.model.weight_files import TensorFiles
from stretto.ops.grouped import Experts, swiglu
from stretto.ops.int_weights import IntScheme, IntWeight
from stretto.ops.native import Library, Panels
from stretto.ops.operators import Operators, Routes, Weight
from stretto.post.quantise import round_to_nearest, schemes_of
from tests.engine.engines import network
from tests.model.checkpoints import edit_tensors

CONFIG = ModelConfig(
    vocab_size=288, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=6, top_k=2,
    expert_intermediate_size=32, num_shared_experts=1, dense_layers=(0,), dense_intermediate_size=96, widths=(6, 3),
    max_positions=64, qk_norm=True,
)  # fmt: skip
CORNER = SubnetChoice(layers=3, experts=3, top_k=1)
SUBNETS = (CONFIG.full(), CORNER.of(CONFIG), CONFIG.subnet(experts=4, top_k=2))
PLANS = {
    "int8": {part: IntScheme(8) for part in ("experts", "attention", "head")},
    "int4, head int8": {"experts": IntScheme(4), "attention": IntScheme(4), "head": IntScheme(8)},
    "experts int4 with zeros": {"experts": IntScheme(4, zeros=True)},
}


def rounded(plan: dict[str, IntScheme]) -> tuple[Transformer, dict[str, IntWeight]]:
    """A network with the values of its integer weights, and the integers."""
    model = network(config=CONFIG)
    integers = round_to_nearest(model.state_dict(), schemes_of(CONFIG, "glm4_moe", plan))
    state = model.state_dict()
    for name, weight in integers.items():
        state[name].copy_(weight.dequantise())
    return model, integers


class QuantisedTokens(Operators):
    """Operators that quantise the tokens of products with given weights to 8 bits in groups of 32."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._ids = {id(weight) for weight in weights}

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        return super().linear(self._quantised(x_ND, weight), weight, bias_F)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        y_ND = torch.zeros_like(x_ND)
        inputs_ND = self._quantised(x_ND, weights.gate_up_EFD)
        for token, (chosen_K, gates_K) in enumerate(zip(routes.chosen_NK, routes.gates_NK, strict=True)):
            for expert, gate in sorted(zip(chosen_K.tolist(), gates_K.tolist(), strict=True)):
                hidden_I = swiglu(weights.gate_up_EFD[expert] @ inputs_ND[token])
                y_ND[token] += gate * (weights.down_EDI[expert] @ self._quantised(hidden_I, weights.down_EDI))
        return y_ND

    def head(self, weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x_ND: self._quantised(x_ND, weight_VD) @ weight_VD.mT

    def _quantised(self, x_ND: Tensor, weight: Weight) -> Tensor:
        if id(weight) not in self._ids:
            return x_ND
        groups = x_ND.unflatten(-1, (-1, 32))
        largest = groups.abs().amax(-1, keepdim=True)
        return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2)


def engine(model: Transformer, library: Library, **options: Any) -> Engine:
    settings = EngineConfig(num_pages=60, page_size=4, max_batch=8, max_step_tokens=24, fast_prefill=False)
    return Engine(copy.deepcopy(model), None, settings, library=library, **options)


def asked(num_tokens: int = 8) -> list[Request]:
    generator = np.random.default_rng(5)
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
    return [
        Request(str(place), tuple(generator.integers(0, 288, 11).tolist()), sampling, Phases(SUBNETS[place % 3]))
        for place in range(6)
    ]


def logprobs(model: Transformer, request: Request, done: Completion, subnet: Subnet, operators: Operators) -> Tensor:
    """Log-probabilities of the tokens of ``done``, of each place of its completion, by one pass in torch."""
    ids_BT = torch.tensor([[*request.prompt, *done.tokens]])
    with torch.no_grad():
        ctx = replace(Context.plain(ids_BT), operators=operators)
        hidden_BTD = model(ids_BT, subnet, ctx).hidden_BTD
        logits_TV = operators.head(model.head_VD)(hidden_BTD[0])
    rows_TV = logits_TV[len(request.prompt) - 1 : -1].log_softmax(-1)
    return rows_TV.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_the_kernels_multiply_quantised_tokens_by_integers(library: Library, plan: dict[str, IntScheme]) -> None:
    model, integers = rounded(plan)
    subject = engine(model, library, integers=integers)
    assert subject.stats().kernels["weights"].endswith("in native steps")
    parameters = dict(model.named_parameters())
    operators = QuantisedTokens([model.head_VD if name == "head.weight" else parameters[name] for name in integers])
    requests = asked()
    far = []
    for request, done in zip(requests, subject.generate(requests), strict=True):
        subnet = request.phases.answer
        found = torch.tensor(done.logprobs)
        meant = logprobs(model, request, done, subnet, operators)
        # fp32 sums in another order may move a token's value over the middle between two codes
        assert (found - meant).abs().max() < 5e-3, (found, meant)
        far.append(float((found - logprobs(model, request, done, subnet, Operators())).abs().max()))
    assert max(far) > 5e-3, "quantised tokens differ from others by more than the tolerance"


def test_the_second_matrix_of_shared_experts_may_be_the_only_integers(library: Library) -> None:
    model, integers = rounded(PLANS["int8"])
    integers = {name: weight for name, weight in integers.items() if name.endswith("shared.down.weight")}
    subject = engine(model, library, integers=integers)
    assert integers and subject.stats().kernels["weights"] == "int8 in native steps"
    requests = asked(4)
    for request, done in zip(requests, subject.generate(requests), strict=True):
        meant = logprobs(model, request, done, request.phases.answer, Operators())
        assert (torch.tensor(done.logprobs) - meant).abs().max() < 0.05


def test_a_result_does_not_depend_on_the_batch(library: Library) -> None:
    model, integers = rounded(PLANS["int4, head int8"])
    together = engine(model, library, integers=integers).generate(asked())
    for request, other in zip(asked(), together, strict=True):
        alone = engine(model, library, integers=integers).generate([request])[0]
        assert alone.tokens == other.tokens and np.array_equal(alone.logprobs, other.logprobs)


def test_weights_of_an_engine_with_integers_are_not_replaced(library: Library) -> None:
    model, integers = rounded(PLANS["int8"])
    subject = engine(model, library, integers=integers)
    with pytest.raises(UserError, match="integer weights, which are not replaced"):
        subject.load_weights(1, model.state_dict())


def test_a_quantised_folder_is_opened_with_its_integers(library: Library, tmp_path: Path) -> None:
    model, integers = rounded(PLANS["int4, head int8"])
    write_checkpoint(tmp_path / "c", model, CONFIG, integers=integers, presets={"corner": CORNER})
    settings = EngineConfig(num_pages=60, page_size=4, fast_prefill=False)
    opened, small = (
        open_engine(tmp_path / "c", settings, with_tokenizer=False, library=library, cut=cut)
        for cut in (None, CORNER.of(CONFIG))
    )
    assert opened.engine.stats().kernels["weights"] == "int4 and int8 in native steps"
    request = asked()[1]
    assert request.phases.answer == CORNER.of(CONFIG)
    one = opened.engine.generate([request])[0]
    two = small.engine.generate([replace(request, phases=Phases(small.engine.network.full()))])[0]
    assert one.tokens == two.tokens and np.array_equal(one.logprobs, two.logprobs), "a cut has the same integers"
    held = {name for name, parameter in opened.engine.model.named_parameters() if parameter.is_meta}
    assert held == integers.keys(), "the kernels multiply by integers only"
    torch_only = open_engine(
        tmp_path / "c", settings, with_tokenizer=False, library=Library(None, "left out by this test")
    )
    assert torch_only.engine.stats().kernels["weights"] == "int4 and int8, dequantised"


def test_scales_in_other_types_give_the_values_that_are_stored(library: Library, tmp_path: Path) -> None:
    """Scales in bf16, as other software stores them for a model in bf16, are mostly numbers in fp16 too; in fp32 they are not."""
    model, integers = rounded(PLANS["int4, head int8"])
    settings = EngineConfig(num_pages=60, page_size=4, fast_prefill=False)

    def answers(
        dtype: torch.dtype, library: Library, change: Callable[[Tensor], Tensor], of: str = ""
    ) -> tuple[str, list[Completion]]:
        def store(tensors: dict[str, Tensor]) -> None:
            scales = {name: tensors[name].bfloat16().float() for name in tensors if name.endswith(SCALES)}
            scales |= {name: change(scale) for name, scale in scales.items() if of in name}
            tensors |= {name: scale.to(dtype) for name, scale in scales.items()}

        folder = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
        write_checkpoint(folder, model, CONFIG, integers=integers)
        edit_tensors(folder / "model.safetensors", store)
        engine = open_engine(folder, settings, with_tokenizer=False, library=library).engine
        return engine.stats().kernels["weights"], engine.generate(asked())

    def same(scale: Tensor) -> Tensor:
        return scale

    def tiny(scale: Tensor) -> Tensor:
        """fp16 rounds the first scale."""
        return scale.flatten().index_fill(0, torch.tensor([0]), 1.0078125 * 2**-20).view(scale.shape)

    kernels, meant = answers(torch.float16, library, same)
    assert kernels == "int4 and int8 in native steps"
    kernels, found = answers(torch.bfloat16, library, same)
    assert kernels == "int4 and int8 in native steps"
    for one, other in zip(meant, found, strict=True):
        assert one.tokens == other.tokens and np.array_equal(one.logprobs, other.logprobs)
    torch_only = Library(None, "left out by this test")
    for dtype, change in ((torch.float32, lambda scale: scale * 1.0001), (torch.bfloat16, tiny)):
        kernels, found = answers(dtype, library, change)
        assert kernels == "int4 and int8, dequantised"
        for one, other in zip(answers(dtype, torch_only, change)[1], found, strict=True):
            assert (torch.tensor(one.logprobs) - torch.tensor(other.logprobs)).abs().max() < 1e-4
    # of a stack of experts, one scale of one expert
    kernels, _ = answers(torch.bfloat16, library, tiny, of="layers.1.mlp.experts.0.down_proj")
    assert kernels == "int4 and int8 in native steps, 1 of 23 weights dequantised"


def test_no_more_than_one_weight_is_read_before_it_is_repacked(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, integers = rounded(PLANS["int4, head int8"])
    write_checkpoint(tmp_path / "c", model, CONFIG, integers=integers)
    read: list[weakref.ref[Tensor]] = []
    repack = Panels.of

    def watched(weight: IntWeight) -> Panels:
        assert not [each for each in read if each() is not None], "codes of an earlier weight are still in memory"
        read.append(weakref.ref(weight.codes))
        return repack(weight)

    monkeypatch.setattr(Panels, "of", staticmethod(watched))
    settings = EngineConfig(num_pages=8, page_size=4)
    for cut in (None, CORNER.of(CONFIG)):
        opened = open_engine(tmp_path / "c", settings, with_tokenizer=False, library=library, cut=cut)
        assert len(read) == len(opened.engine.integers) > 10
        read.clear()


def test_forms_of_integers_are_read_from_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, integers = rounded(PLANS["experts int4 with zeros"])
    write_checkpoint(tmp_path / "c", model, CONFIG, integers=integers)
    whole = read_integers(tmp_path / "c")
    monkeypatch.setattr(TensorFiles, "raw", None)
    forms = integer_forms(tmp_path / "c")
    assert forms.keys() == whole.keys() == integers.keys()
    for name, form in forms.items():
        meant = whole[name]
        assert form.codes.is_meta and (form.bits, form.group) == (meant.bits, meant.group)
        assert (form.codes.shape, form.scales.shape, form.scales.dtype) == (
            meant.codes.shape,
            meant.scales.shape,
            meant.scales.dtype,
        )
        assert form.zeros is not None and meant.zeros is not None and form.zeros.shape == meant.zeros.shape


def test_integers_compute_long_prompts_too(library: Library) -> None:
    """Also with ``fast_prefill``: the engine needs no values of these weights."""
    model, integers = rounded(PLANS["int8"])
    empty = {
        name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items() if name in integers
    }
    model.load_state_dict(empty, strict=False, assign=True)
    settings = EngineConfig(num_pages=60, page_size=4, max_step_tokens=200)
    sampling = Sampling(max_tokens=3, temperature=0.0)
    requests = [
        Request(str(first), tuple(range(first, first + 60)), sampling, Phases(CONFIG.full())) for first in range(3)
    ]
    assert sum(len(request.prompt) for request in requests) > MAX_NATIVE_TOKENS
    fast, slow = (
        Engine(model, None, settings.replace(fast_prefill=fast), library=library, integers=integers).generate(requests)
        for fast in (True, False)
    )
    for one, other in zip(fast, slow, strict=True):
        assert one.error is None and one.tokens == other.tokens and np.array_equal(one.logprobs, other.logprobs)


def test_memory_counts_integers_not_values(library: Library, tmp_path: Path) -> None:
    model, integers = rounded(PLANS["int8"])
    write_checkpoint(tmp_path / "c", model, CONFIG, integers=integers)
    as_values = int(1.1 * sum(tensor.nbytes for tensor in model.state_dict().values()))
    settings = EngineConfig(num_pages=8, page_size=4)
    options = {"memory_bytes": as_values, "with_tokenizer": False}
    assert open_engine(tmp_path / "c", settings, library=library, **options).engine.integers
    with pytest.raises(UserError, match="exceed the"):
        open_engine(tmp_path / "c", settings, library=Library(None, "left out by this test"), **options)


def test_weights_without_kernels_are_dequantised(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network(config=CONFIG)
    schemes = schemes_of(CONFIG, "glm4_moe", {"experts": IntScheme(8, group=16), "attention": IntScheme(8)})
    integers = round_to_nearest(model.state_dict(), schemes)
    write_checkpoint(tmp_path / "c", model, CONFIG, integers=integers)
    whole = read_checkpoint(tmp_path / "c").model
    subject = engine(whole, library, integers=integers)
    assert subject.stats().kernels["weights"] == "int8 in native steps, 14 of 22 weights dequantised"
    assert caplog.text.count("14 of 22 integer weights are dequantised, which is slower") == 1
    done = subject.generate(asked(2))
    assert all(each.error is None and len(each.tokens) == 2 for each in done)
