"""The records of abi.h, field by field."""

from __future__ import annotations

import ctypes

POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class ShapeRecord(ctypes.Structure):
    _fields_ = (
        _fields(_INT, "num_layers hidden num_heads num_kv_heads head_dim rotary_half vocab page_size")
        + _fields(_INT, "num_moe_layers route_slots route_bytes softmax normalize is_bfloat16")
        + _fields(_FLOAT, "eps scaling")
        + _fields(ctypes.c_int64, "num_pages")
        + _fields(POINTER, "cosine sine embedding norm head keys values routes")
    )


class LayerRecord(ctypes.Structure):
    _fields_ = (
        _fields(POINTER, "attention_norm qkv qkv_bias out q_norm k_norm mlp_norm gate_up down")
        + _fields(POINTER, "router shared_gate_up shared_down bias rank")
        + _fields(_INT, "num_experts inner shared_inner moe_row")
    )


class ChoiceRecord(ctypes.Structure):
    _fields_ = _fields(_INT, "active num_experts top_k branch")


class StepRecord(ctypes.Structure):
    _fields_ = _fields(_INT, "num_tokens num_logits num_threads write_routes") + _fields(
        POINTER, "token position table subnet pages choices logit_tokens logits"
    )


class DraftRecord(ctypes.Structure):
    _fields_ = _fields(_INT, "num_rows num_steps num_threads num_ends") + _fields(
        POINTER, "token position table subnet most end ends pages choices temperature seed drafted probabilities"
    )


class ChooseRecord(ctypes.Structure):
    _fields_ = _fields(_INT, "num_sequences vocab num_threads num_drafts") + _fields(
        POINTER, "logits num_drafted position drafted draft temperature seed num_kept chosen logprob"
    )


_RECORDS = (ShapeRecord, LayerRecord, ChoiceRecord, StepRecord, DraftRecord, ChooseRecord)


def check_layout(library: ctypes.CDLL) -> None:
    """Compare with what the compiler made of abi.h."""
    sizes = (_INT * len(_RECORDS))()
    library.stretto_sizes(sizes)
    ours = [ctypes.sizeof(kind) for kind in _RECORDS]
    assert list(sizes) == ours, f"records of the compiled library {list(sizes)}, here {ours}"
