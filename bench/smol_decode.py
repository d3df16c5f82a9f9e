"""A real chat model, adopted: is it the same, and how fast does it decode? SmolLM2-135M-Instruct out of its package.

    python -m bench.smol_decode [--run FOLDER] [--text FILE] [--peer llama.cpp=PYTHON] [--peer vllm=PYTHON] [--rounds N]

First, in fp32, against transformers on the package's own file, which it reads by itself: bits per byte of a text, and the greedy
answers to ten prompts, token by token. Anything but equality ends this with 1; ``--spoil`` turns one norm of ours by 1 %, which
must end it so. Then decoding speed as `bench.decode_speed` measures it, at batch 1 and 8 in fp32 and bf16: ours, transformers,
llama.cpp on a GGUF that we wrote from the adopted folder, and on the same quantised to Q8_0 (fewer bytes, other numbers: a
control, not a peer of equal precision), and vLLM. Takes some minutes on two cores; ``--rounds 20 --tokens 129`` for a long
run; ``--prompt 512 --tokens 1`` for the time to the first token.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console

from bench import decode_speed
from bench.common.measure import random_prompts, table, wide_console
from bench.common.networks import gguf_path
from bench.common.workers import Worker, WorkerFailed
from bench.peers.protocol import Options
from stretto.api.adopt import AdoptOptions, adopt_command
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress
from stretto.data.demo_text import CHAT_PROMPTS, demo_documents
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.checkpoint import read_checkpoint, read_config
from stretto.model.gguf import write_gguf
from stretto.model.gguf_read import packaged
from stretto.model.parallel import device_name
from stretto.text.chat import named_tokens, render
from stretto.text.tokenizer import Tokenizer, load_tokenizer

WINDOW = 1024
"""Tokens that are seen at a time."""
EVERY = 40
"""Of the demo's documents, one in so many: some of each domain."""
MOST_BITS = 1e-5
"""Two implementations in fp32 differ by rounding: some 1e-6 of a text's bits."""
BATCHES = (1, 8)
Q8 = "llama.cpp, Q8_0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", type=Path, help="the adopted run or checkpoint; default: adopted here, into a temporary folder"
    )
    parser.add_argument("--text", type=Path, help="text to count bits on; default: some of the demo's documents")
    parser.add_argument("--bytes", type=int, default=20_000, help="of that text")
    parser.add_argument("--answer", type=int, default=32, help="most tokens of an answer that is compared")
    parser.add_argument("--spoil", action="store_true", help="turn a norm of ours by 1 %%: the comparison must fail")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="time only")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="compare only")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="an engine's own environment"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="leave the other peers out")
    parser.add_argument("--batch", type=int, action="append", default=[], help="default: 1 and 8")
    parser.add_argument("--dtype", action="append", default=[], choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=65, help="tokens made for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads to choose from; default: 1 and all")
    parser.set_defaults(device="cpu", compile=False)
    options = parser.parse_args()
    console = wide_console()
    console.print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder = checkpoint_folder(options.run or adopted(Path(temporary) / "smol"))
        is_same = not options.compare or compare(folder, options, console)
        if options.speed:
            for dtype in options.dtype or ("float32", "bfloat16"):
                measure_speed(folder, Path(temporary) / dtype, dtype, options, console)
    sys.exit(not is_same)


def adopted(run: Path) -> Path:
    """The packaged model, adopted into ``run`` as it is."""
    adopt_command("smollm2", run, AdoptOptions(order="none"))
    return run


def compare(folder: Path, options: argparse.Namespace, console: Console) -> bool:
    """Print bits per byte and how many answers are equal; whether all is equal."""
    from transformers import AutoModelForCausalLM

    file = packaged("smollm2")
    if file is None:
        raise UserError("smollm2: no such packaged model")
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    ours = read_checkpoint(folder, dtype=torch.float32).model.eval()
    tokenizer = load_tokenizer(folder)
    if options.spoil:
        ours.norm.weight.data.mul_(1.01)
    text = (
        options.text.read_bytes()[: options.bytes].decode(errors="ignore") if options.text else demo_text(options.bytes)
    )
    ids = tokenizer.encode(text)
    bits = {"ours": 0.0, "transformers": 0.0}
    widest = 0.0
    with progress("bits per byte", len(ids)) as advance:
        for start in range(0, len(ids) - 1, WINDOW):
            window_BT = torch.tensor([ids[start : start + WINDOW + 1]])
            inputs_BT, targets_T = window_BT[:, :-1], window_BT[0, 1:]
            logits = {"ours": ours.logits(inputs_BT)[0], "transformers": theirs(inputs_BT).logits[0]}
            widest = max(widest, float((logits["ours"] - logits["transformers"]).abs().max()))
            for name, logits_TV in logits.items():
                bits[name] += float(
                    torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="sum")
                ) / math.log(2)
            advance(len(targets_T))
    num_bytes = len(tokenizer.decode(ids[1:]).encode())
    per_byte = {name: total / num_bytes for name, total in bits.items()}
    is_close = abs(per_byte["ours"] / per_byte["transformers"] - 1) <= MOST_BITS
    shown = table(f"{len(ids):,} tokens, {num_bytes:,} bytes, fp32", "", "bits per byte")
    for name, value in per_byte.items():
        shown.add_row(name, f"{value:.6f}")
    console.print(shown)
    console.print(f"largest difference of a logit: {widest:.1e}")
    prompts = [chat_ids(tokenizer, prompt) for prompt in CHAT_PROMPTS]
    answers = greedy_answers(folder, prompts, options.answer, spoil=options.spoil)
    num_same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids_BT = torch.tensor([prompt])
        made_BT = theirs.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=options.answer,
            do_sample=False,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.eos_id,
        )
        num_same += made_BT[0, len(prompt) :].tolist() == answer
    console.print(f"greedy answers equal to transformers': {num_same} of {len(prompts)}")
    for prompt, answer in islice(zip(CHAT_PROMPTS, answers, strict=True), 3):
        console.print(
            f"  {prompt!r}: {tokenizer.decode(answer, skip_special_tokens=True)!r}", soft_wrap=True, markup=False
        )
    return is_close and num_same == len(prompts)


def demo_text(num_bytes: int) -> str:
    """Some documents of every domain of the demo's text."""
    texts, total = [], 0
    for document in islice(demo_documents(), 0, None, EVERY):
        texts.append(document.text[: num_bytes // 10])
        total += len(texts[-1])
        if total >= num_bytes:
            break
    return "\n".join(texts)[:num_bytes]


def chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A first turn of a chat, with the template's own system prompt."""
    assert tokenizer.chat_template is not None
    messages = [{"role": "user", "content": prompt}]
    text = render(tokenizer.chat_template, messages, add_generation_prompt=True, variables=named_tokens(tokenizer))
    return tokenizer.encode_rendered(text)


def greedy_answers(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, *, spoil: bool) -> list[list[int]]:
    """What our engine answers, all prompts at once, ends included as transformers returns them."""
    opened = open_engine(folder, EngineConfig(max_batch=len(prompts), max_len=max(map(len, prompts)) + num_tokens))
    if spoil:
        opened.engine.runner.model.norm.weight.data.mul_(1.01)
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens)
    asked = [Request(str(i), tuple(prompt), sampling, Phases(opened.config.full())) for i, prompt in enumerate(prompts)]
    return [list(done.tokens) for done in opened.engine.generate(asked)]


def measure_speed(source: Path, folder: Path, dtype: str, options: argparse.Namespace, console: Console) -> None:
    """Every engine on the same weights in ``dtype``, in turns."""
    batches = options.batch or BATCHES
    told = decode_speed.prepare(
        source, folder, argparse.Namespace(**{**vars(options), "batch": list(batches), "dtype": dtype})
    )
    with ExitStack() as stack:
        workers = decode_speed.start(stack, source, told, options, console)
        if "llama.cpp" in workers:
            worker = quantised(stack, told, folder, options, console)
            workers |= {Q8: worker} if worker is not None else {}
        prompts = random_prompts(told.max_batch, options.prompt, read_config(told.folder).vocab_size)
        for batch in batches:
            results = decode_speed.compare(workers, prompts[:batch], options.tokens, options.rounds)
            decode_speed.show(console, batch, options, results, f"SmolLM2-135M, batch {batch}, {dtype}")


def quantised(
    stack: ExitStack, told: Options, folder: Path, options: argparse.Namespace, console: Console
) -> Worker | None:
    """llama.cpp on the network in Q8_0, in its own layout of the weights if it survives that here; None: it does in none."""
    write_gguf(told.folder, gguf_path(folder / "q8"), "q8_0")
    python = dict(each.partition("=")[::2] for each in options.peer).get("llama.cpp", sys.executable)
    for repack in (True, False):
        mine = replace(told, gguf=str(gguf_path(folder / "q8")), repack=repack)
        worker = stack.enter_context(Worker("llama", python, mine, {}))
        try:
            worker.generate([[1, 2, 3]], 2, worker.settings[0])
        except WorkerFailed as failure:
            console.print(f"{Q8}, weights {'repacked' if repack else 'as stored'}: does not run here: {failure}")
            continue
        return worker
    return None


if __name__ == "__main__":
    main()
