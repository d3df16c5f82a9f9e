"""Let transformers load checkpoints and write a few lines: the proof that other software reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stretto.base.config import Config, validate
from stretto.base.paths import read_json, write_json
from stretto.base.track import progress

SAMPLES_FILE = "samples.json"
PROMPTS = ("def read_", "Question: ")
NUM_NEW_TOKENS = 48


class Sample(Config):
    """What a size wrote."""

    size: str
    prompt: str
    text: str
    """Greedy continuation of the prompt."""


def write_samples(run: Path, sizes: Mapping[str, Path], prompts: tuple[str, ...] = PROMPTS) -> list[Sample]:
    """Load each checkpoint with transformers and continue each prompt greedily; kept in the run folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # late: seconds to import
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough
    samples = []
    with progress("write", len(sizes) * len(prompts)) as advance:
        for size, folder in sizes.items():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder)
            for prompt in prompts:
                inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
                ids = model.generate(  # type: ignore[misc]
                    inputs.input_ids,
                    attention_mask=inputs.attention_mask,
                    max_new_tokens=NUM_NEW_TOKENS,
                    do_sample=False,
                    repetition_penalty=1.1,
                    pad_token_id=tokenizer.eos_token_id,
                )
                text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                samples.append(Sample(size=size, prompt=prompt, text=text))
                advance(1)
    write_json(run / SAMPLES_FILE, [sample.model_dump() for sample in samples])
    return samples


def read_samples(run: Path) -> list[Sample]:
    """Samples written before; none where none were."""
    path = run / SAMPLES_FILE
    return [validate(Sample, row, str(path)) for row in read_json(path)] if path.is_file() else []
