"""Do tools reach the model, and does it call them when it should? BFCL's simple_python and irrelevance, by its own checker.

    python -m bench.bfcl OUT --model runs/smol --dialogues FILE --schemas FILE --glaive FILE [--steps 300 --problems 0]

Trains ``--model`` on calls (`stretto sft`: generated questions, of which some have no function that fits; dialogues of DSTC8's
Schema-Guided Dialogue with their services as functions, and what their users want said in one go; conversations in glaive's form),
then asks BFCL's questions over HTTP (`stretto serve`) with ``tool_choice`` ``auto``: the model as it was, forced, and trained, with its
functions as they are and as ``strict`` ones, whose calls a grammar holds to their schemas once the model has begun one. Beside them
what knows nothing: an empty call, a call of the first function with values that regular expressions find in the question, and
no call at all. What has a function's name or a question of BFCL's is left out of training. Of several ``--rates`` the one is
taken whose calls are right most often on held-out questions: generated, of services that are not trained on, of glaive's.

Its package pins other versions than ours and gets an environment of its own, which only the first and the last part need:
``--until questions`` writes them to OUT, ``--until answers`` trains and asks (on another machine, say: of OUT it needs
questions.jsonl), and the whole command judges what was answered, with no need of OUT/trained, where rows and weights are.

``--problems`` of each kind are asked (0: all), drawn by ``--seed``; intervals are over them. Defaults end within half an hour on a
core; ``--steps 500 --rows 32 --rates 3e-4 1e-3 --problems 0 --device cuda`` is the long run. Exits with 1 where the trained model has
less than `AIM`, strict or not. Called again, it goes on: what was made, trained and asked is kept.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from bench.common.calls import NO_CALL, conversation
from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES, checkpoint_folder, remove, write_json, write_text
from stretto.base.track import progress, say
from stretto.evals.scores import mean_interval
from stretto.harness.suites import bfcl_python, serving
from stretto.text.chat import tokenise_chat
from stretto.text.tokenizer import Tokenizer, load_tokenizer

AIM = {"simple_python": 0.45, "irrelevance": 0.60}
MOST_TOKENS = 511
"""Of a conversation that is trained on; longer dialogues are cut behind an answer, or left out."""
SHARES = {"made": 0.65, "requests": 0.25, "dialogues": 0.05, "glaive": 0.05}
"""Of the rows that are trained on."""
FITTING = 0.6
"""Of generated questions and requests, those with a function that fits."""
HELD_OUT = 5
"""One domain of the dialogues in so many, and one of glaive's conversations, is for the choice of a rate."""
RECIPE = {
    "long": '"leave_out"',
    "train.seq_len": MOST_TOKENS + 1,
    "train.micro_batches": 1,
    "train.eval_rows": 2,
    "train.dtype": '"bfloat16"',
}
"""What differs from recipes/sft.toml: few and small steps want a higher rate. Found on no question of BFCL's."""
AT_ONCE, MAX_TOKENS = 48, 160
MOST_TRIES = 300
"""Of a question: a server that is busy says so, and when to ask again."""
QUESTIONS = "questions.jsonl"
STAGES = ("questions", "answers", "scores")
ASKED = ("before", "trained", "strict", "forced")

Questions = list[dict[str, Any]]

# --- what is trained on -----------------------------------------------------------------------------------------------


def made(seed: str) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"bfcl/{seed}")
    while True:
        yield conversation(draw, draw.choice((1, 2, 3)), FITTING)


def plain(text: str) -> str:
    """``text`` however it is spelt."""
    return re.sub(r"[\W_]", "", text).lower()


def words_of(record: Mapping[str, Any]) -> set[str]:
    """Its functions' names, and what its user says."""
    said = [each["content"] for each in record["messages"] if each["role"] == "user"]
    return {plain(each) for each in (*(tool["function"]["name"] for tool in record["tools"]), *said)}


def is_held_out(service: str, services: Collection[str]) -> bool:
    """Whether its domain is: ``Hotels_1`` and ``Hotels_4`` are of one."""
    domains = sorted({name.partition("_")[0] for name in services})
    return domains.index(service.partition("_")[0]) % HELD_OUT == 0


def requests(path: Path, schemas: Path, seed: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """A call of a dialogue and all that its user had said to that end, as one question; of the arguments those that the words hold."""
    offers = {schema["service_name"]: _functions(schema) for schema in json.loads(schemas.read_text())}
    names = [name for name in offers if is_held_out(name, offers) == held_out]
    records = _records(path)
    draw = random.Random(f"requests/{seed}/{held_out}")
    draw.shuffle(records)
    for record in records:
        said: list[str] = []
        for turn in record["turns"]:
            if turn["s"] == "U":
                said.append(turn["u"])
            for call in turn.get("calls", ()):
                text, service = " ".join(said), call["service"]
                if service not in names or (found := _found(call, text, offers[service])) is None:
                    continue
                tool, arguments = found
                others = [each for each in offers[service] if each is not tool]
                far = [name for name in names if name.partition("_")[0] not in " ".join(record["services"])]
                fits = not far or draw.random() < FITTING
                if not fits:
                    tool, others = draw.choice(offers[draw.choice(far)]), []
                tools = [tool, *others[: draw.choice((0, 0, 1, 2))]]
                draw.shuffle(tools)
                answer = (
                    _call(tool["function"]["name"], arguments) if fits else {"role": "assistant", "content": NO_CALL[0]}
                )
                yield {"messages": [{"role": "user", "content": text}, answer], "tools": tools}
                said = []


def _found(call: Mapping[str, Any], text: str, tools: Questions) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The function, and the arguments that ``text`` holds; None: not all that it requires."""
    tool = next(each for each in tools if each["function"]["name"] == call["method"])
    parameters, arguments = tool["function"]["parameters"], {}
    for key, value in call["parameters"].items():
        if key in parameters["properties"] and re.search(rf"\b{re.escape(str(value))}\b", text, re.IGNORECASE):
            is_number = parameters["properties"][key]["type"] == "integer"
            arguments[key] = int(value) if is_number else value
    return None if set(parameters["required"]) - arguments.keys() else (tool, arguments)


def dialogues(path: Path, schemas: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Schema-Guided Dialogue, one service each: its intents are functions, its calls are calls."""
    offers = {schema["service_name"]: _functions(schema) for schema in json.loads(schemas.read_text())}
    records = [record for record in _records(path) if len(record["services"]) == 1]
    records = [record for record in records if not is_held_out(record["services"][0], offers)]
    random.Random(seed).shuffle(records)
    for record in records:
        messages: list[dict[str, Any]] = []
        for turn in record["turns"]:
            if turn["s"] == "U":
                messages.append({"role": "user", "content": turn["u"]})
                continue
            for call in turn.get("calls", ()):
                messages.append(_call(call["method"], call["parameters"]))
                found = {"found": len(call["results"]), "first": call["results"][:1]}
                messages.append({"role": "tool", "content": json.dumps(found)})
            messages.append({"role": "assistant", "content": turn["u"]})
        yield {"messages": messages, "tools": offers[record["services"][0]]}


def glaive(path: Path, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Conversations with functions, in LLaMA-Factory's form."""
    for place, record in enumerate(json.loads(path.read_text())):
        if (place % HELD_OUT == 0) != held_out:
            continue
        messages: list[dict[str, Any]] = []
        for turn in record["conversations"]:
            said = turn["value"]
            if turn["from"] == "function_call":
                call = json.loads(said)
                messages.append(_call(call["name"], call["arguments"]))
            else:
                role = {"human": "user", "gpt": "assistant", "observation": "tool"}[turn["from"]]
                messages.append({"role": role, "content": said})
        if tools := json.loads(record["tools"] or "[]"):
            yield {"messages": messages, "tools": [{"type": "function", "function": each} for each in tools]}


def _functions(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    slots = {slot["name"]: slot for slot in schema["slots"]}
    found = []
    for intent in schema["intents"]:
        fields = {}
        for name in [*intent["required_slots"], *intent["optional_slots"]]:
            fields[name] = {"type": "string", "description": slots[name]["description"]}
            values = slots[name]["possible_values"]
            if values and all(value.isdigit() for value in values):
                fields[name]["type"] = "integer"
            elif slots[name]["is_categorical"]:
                fields[name]["enum"] = values
        parameters = {"type": "object", "properties": fields, "required": intent["required_slots"]}
        told = {"name": intent["name"], "description": intent["description"], "parameters": parameters}
        found.append({"type": "function", "function": told})
    return found


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def fitted(
    records: Iterator[dict[str, Any]], num: int, tokenizer: Tokenizer, taken: Collection[str]
) -> Iterator[dict[str, Any]]:
    """``num`` of them that a row holds, without those that have a name or a question of ``taken``; long ones are cut behind an
    answer."""
    num_taken = 0
    for record in records:
        if num == 0:
            break
        if words_of(record) & set(taken):
            num_taken += 1
            continue
        ends = [place + 1 for place, each in enumerate(record["messages"]) if each["role"] == "assistant"]
        for end in (end for end in reversed(ends) if end > 1):
            cut = {**record, "messages": record["messages"][:end]}
            if len(tokenise_chat(tokenizer, cut["messages"], cut["tools"]).tokens) <= MOST_TOKENS:
                num -= 1
                yield cut
                break
    say(f"left out, for BFCL asks the same or has a function of the same name: {num_taken}")


def _records(path: Path) -> list[dict[str, Any]]:
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _write(path: Path, records: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def train(options: argparse.Namespace, rate: float, taken: Collection[str]) -> Path:
    """The run trained at this rate; made, where it is not there."""
    run, data = options.out / "trained" / f"{rate:g}", options.out / "trained" / "data"
    if not (run / CHECKPOINT).is_dir():
        remove(run)  # one that was cut off
        tokenizer = load_tokenizer(checkpoint_folder(options.model))
        rows = options.steps * options.rows
        streams = {
            "made": made(str(options.seed)),
            "requests": requests(options.dialogues, options.schemas, options.seed, held_out=False),
            "dialogues": dialogues(options.dialogues, options.schemas, options.seed),
            "glaive": glaive(options.glaive, held_out=False),
        }
        command = ["sft", str(RECIPES / "sft.toml"), "--model", str(options.model), "-o", str(run)]
        for name, stream in streams.items():
            path = data / f"{name}.jsonl"
            if not path.is_file():
                num = max(40, int(3 * rows * SHARES[name]))
                kept = []
                with progress(f"make {name}", num) as advance:
                    for record in fitted(stream, num, tokenizer, taken):
                        kept.append(record)
                        advance(1)
                _write(path, kept)
            command += ["--data", f"{path}@{SHARES[name]}"]
        settings = {
            **RECIPE,
            "optim.lr": rate,
            "optim.warmup_steps": max(3, options.steps // 30),
            "train.steps": options.steps,
            "train.rows": options.rows,
            "train.eval_every": options.steps,
            "train.snapshot_every": options.steps,
        }
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "stretto", *command, "--device", options.device], check=True)
    return run


def chosen(options: argparse.Namespace, taken: Collection[str]) -> Path:
    """The run whose calls are right most often on held-out questions."""
    if options.trained is not None or len(options.rates) == 1:
        return options.trained or train(options, options.rates[0], taken)
    held, shares, those = held_out(options), {}, {}
    for rate in options.rates:
        those[rate] = train(options, rate, taken)
        answers = answered(options, f"held_out_{rate:g}", lambda run=those[rate]: run, held)  # type: ignore[misc]
        kinds = Counter(each["category"] for each in answers)
        right = Counter(each["category"] for each in answers if _same(each["calls"], each["wanted"]))
        shares[rate] = {kind: right[kind] / num for kind, num in kinds.items()}
        say(
            f"rate {rate:g}: right of held-out questions { ({kind: f'{each:.2f}' for kind, each in shares[rate].items()}) }"
        )
    best = max(shares, key=lambda rate: sum(shares[rate].values()))
    write_json(options.out / "rates.json", {"chosen": best, "right": {f"{rate:g}": shares[rate] for rate in shares}})
    return those[best]


def held_out(options: argparse.Namespace) -> Questions:
    """Questions with what is ``wanted``: nothing, or one call."""
    streams = {
        "made": (record for record in made(f"held out/{options.seed}") if len(record["messages"]) == 2),
        "requests": requests(options.dialogues, options.schemas, options.seed, held_out=True),
        "glaive": glaive(options.glaive, held_out=True),
    }
    found = []
    for kind, stream in streams.items():
        for place, record in enumerate(islice(stream, options.held_out)):
            question, answer = record["messages"][:2]
            calls = [[each["function"][key] for key in ("name", "arguments")] for each in answer.get("tool_calls", ())]
            told = {"category": kind, "id": f"{kind}/{place}", "messages": [question], "tools": record["tools"]}
            found.append({**told, "wanted": calls})
    return found


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True).lower() == json.dumps(other, sort_keys=True).lower()


# --- what is asked ----------------------------------------------------------------------------------------------------


def inside(options: argparse.Namespace, *arguments: str, text: str = "") -> list[Any]:
    """What our script says in BFCL's environment."""
    script = Path(__file__).parent / "common" / "bfcl_inside.py"
    command = [str(bfcl_python()), "-I", str(script), *arguments]
    environment = {**os.environ, "BFCL_PROJECT_ROOT": str(options.out)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"bfcl: its environment says: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def asked(options: argparse.Namespace) -> Questions:
    path = options.out / QUESTIONS
    if not path.is_file():
        _write(path, inside(options, "questions", *AIM))
    found: Questions = []
    for category, those in _by_category(_records(path)).items():
        num = min(len(those), options.problems or len(those))
        found += random.Random(f"{category}/{options.seed}").sample(those, num)
    return found


def _by_category(records: Questions) -> dict[str, Questions]:
    return {category: [each for each in records if each["category"] == category] for category in AIM}


def answered(
    options: argparse.Namespace,
    name: str,
    source: Callable[[], Path],
    questions: Questions,
    choice: str = "auto",
    is_strict: bool = False,
) -> Questions:
    """Each question with the ``calls`` that the served model makes, and what it says beside them; ``source`` only where some lack."""
    path = options.out / "answers" / f"{name}.jsonl"
    kept = {each["id"]: each for each in (_records(path) if path.is_file() else ())}
    missing = [each for each in questions if each["id"] not in kept]
    if missing:
        with (
            serving(source(), "--device", options.device, "--dtype", "bfloat16") as (url, _),
            httpx.Client(base_url=url, timeout=900) as client,
        ):

            def ask(question: dict[str, Any]) -> dict[str, Any]:
                functions = [each["function"] | {"strict": is_strict} for each in question["tools"]]
                body = {
                    "model": client.get("/v1/models").json()["data"][0]["id"],
                    "messages": question["messages"],
                    "tools": [{"type": "function", "function": each} for each in functions],
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                }
                for _ in range(MOST_TRIES):
                    reply = client.post(
                        "/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": MAX_TOKENS}
                    )
                    if reply.status_code not in (429, 503):
                        break
                    time.sleep(float(reply.headers.get("retry-after", 1)))
                if reply.is_error:
                    raise UserError(f"{question['id']}: {reply.text[:300]}")
                message = reply.json()["choices"][0]["message"]
                calls = [_read(call["function"]) for call in message.get("tool_calls") or ()]
                return {"id": question["id"], "calls": calls, "said": message["content"]}

            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                ThreadPoolExecutor(AT_ONCE) as pool,
                path.open("a", buffering=1) as file,
                progress(name, len(missing)) as advance,
            ):
                for each in pool.map(ask, missing):
                    file.write(json.dumps(each) + "\n")
                    kept[each["id"]] = each
                    advance(1)
    return [{**each, **kept[each["id"]]} for each in questions]


def _read(call: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return call["name"], json.loads(call["arguments"])
    except ValueError:
        return call["name"], {}


def filled(question: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call of the first function with what regular expressions find."""
    told, text = question["tools"][0]["function"], question["messages"][-1]["content"]
    numbers = [float(each) if "." in each else int(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)]
    words = re.findall(r"['\"]([^'\"]+)['\"]", text) + re.findall(r"(?<=[a-z,] )[A-Z]\w+(?: [A-Z]\w+)*", text)
    arguments: dict[str, Any] = {}
    for key in told["parameters"].get("required", ()):
        field = told["parameters"]["properties"][key]
        choices = [each for each in field.get("enum", ()) if str(each).lower() in text.lower()]
        if choices:
            arguments[key] = choices[0]
        elif field["type"] in ("integer", "number") and numbers:
            arguments[key] = numbers.pop(0)
        elif field["type"] == "array":
            arguments[key], numbers = (numbers, []) if numbers else (words, [])
        elif field["type"] == "boolean":
            arguments[key] = True
        elif words:
            arguments[key] = words.pop(0)
    return told["name"], arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="the adopted run or checkpoint")
    parser.add_argument("--trained", type=Path, help="a run that was trained already: trains nothing")
    parser.add_argument("--dialogues", type=Path, help="JSONL of DSTC8's dialogues with their calls; .xz is read too")
    parser.add_argument("--schemas", type=Path, help="JSON of their services")
    parser.add_argument("--glaive", type=Path, help="JSON of conversations in glaive's form")
    parser.add_argument("--steps", type=int, default=44, help=f"of --rows rows of {MOST_TOKENS + 1} tokens")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-4], help="learning rates; the best of several")
    parser.add_argument("--held-out", type=int, default=80, help="questions of each kind that a rate is chosen on")
    parser.add_argument("--problems", type=int, default=60, help="of each kind; 0: all")
    parser.add_argument(
        "--ask",
        nargs="+",
        choices=ASKED,
        default=ASKED,
        help="of these alone; the others' answers are taken where they are",
    )
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="end there; called again, it goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    questions = asked(options)
    if options.until == "questions":
        return
    taken = set().union(*map(words_of, _records(options.out / QUESTIONS)))

    def needed(*names: str) -> None:
        if missing := [f"--{name}" for name in names if getattr(options, name) is None]:
            raise UserError(f"{', '.join(missing)}: missing; not all of it was asked yet")

    def before() -> Path:
        needed("model")
        return Path(options.model)

    def after() -> Path:
        if options.trained is None:
            needed("model", "dialogues", "schemas", "glaive")
        return chosen(options, taken)

    wanted = {
        "before": ("as it was, auto", before, {}),
        "trained": ("trained, auto", after, {}),
        "strict": ("trained, auto, strict", after, {"is_strict": True}),
        "forced": ("as it was, forced", before, {"choice": "required"}),
    }
    rows = {
        "no call": [{**each, "calls": []} for each in questions],
        "empty call": [{**each, "calls": [(each["tools"][0]["function"]["name"], {})]} for each in questions],
        "regex filler": [{**each, "calls": [filled(each)]} for each in questions],
    } | {
        told: answered(options, name, source, questions, **how)
        for name, (told, source, how) in wanted.items()
        if name in options.ask or (options.out / "answers" / f"{name}.jsonl").is_file()
    }
    if options.until == "answers":
        return
    shown = table(f"Right, %, with 95 % intervals over {len(questions)} questions", "", *AIM, "calls")
    is_enough = False
    for name, answers in rows.items():
        verdicts = inside(options, "judge", text="".join(json.dumps(each) + "\n" for each in answers))
        found = {kind: mean_interval("", [right for what, _, right in verdicts if what == kind]) for kind in AIM}
        cells = [f"{100 * each.value:.1f} [{100 * each.low:.1f}, {100 * each.high:.1f}]" for each in found.values()]
        shown.add_row(name, *cells, f"{sum(bool(each['calls']) for each in answers)}/{len(answers)}")
        is_enough |= name.startswith("trained") and all(found[kind].value >= least for kind, least in AIM.items())
    wide_console().print(shown)
    sys.exit(0 if is_enough else 1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
