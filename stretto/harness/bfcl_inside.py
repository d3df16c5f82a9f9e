"""Runs in BFCL's own environment (`stretto.harness.suites` makes it) and imports nothing of ours: asks a server its single-turn
questions through its own handler of OpenAI's API, and has its own checker judge the calls.

BFCL's command writes a failed request into the answer, which its checker then judges: no call of a function is just what
`irrelevance` wants, so that a dead server gets 100 % there. Here it is no answer.
"""

import json
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MODEL = "served"


def main(told: dict[str, Any], path: str) -> None:
    # Its table of models imports every vendor's client. Ours has the one model; the name it is called by is the server's.
    table = types.ModuleType("bfcl_eval.constants.model_config")
    sys.modules[table.__name__] = table
    vars(table)["MODEL_CONFIG_MAPPING"] = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}

    from bfcl_eval.constants.enums import Language, ReturnFormat
    from bfcl_eval.eval_checker.eval_runner import _evaluate_single_ast_entry, _evaluate_single_relevance_entry
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
    from openai import OpenAI

    class Handler(OpenAICompletionsHandler):
        def _build_client_kwargs(self) -> dict[str, Any]:
            return {"base_url": f"{told['url']}/v1", "api_key": "none", "timeout": told["sample_s"], "max_retries": 0}

        def _query_FC(self, inference_data: dict[str, Any]) -> Any:
            fields = {"model": name, "temperature": self.temperature, "max_tokens": told["max_tokens"]}
            return self.generate_with_backoff(
                messages=inference_data["message"], tools=inference_data["tools"], **fields
            )

    name = OpenAI(base_url=f"{told['url']}/v1", api_key="none").models.list().data[0].id
    handler = Handler(model_name=name, temperature=told["temperature"], registry_name=MODEL, is_fc_model=True)
    lock, failed = threading.Lock(), list[str]()

    def judge(category: str, entry: dict[str, Any], truth: dict[str, Any]) -> None:
        line: dict[str, Any] = {"category": category, "id": entry["id"]}
        line |= {"value": None, "why": "", "prompt": 0, "sampled": 0}
        if len(failed) > told["most_infra"] * total:
            line["why"] = f"not asked any more: {failed[-1]}"
        else:
            try:
                # the handler changes what it is given
                said, meta = handler.inference(json.loads(json.dumps(entry)), False, False)
            except Exception as error:
                line["why"] = f"{type(error).__name__}: {error}"[:300]
                failed.append(line["why"])
            else:
                if category == "irrelevance":
                    verdict = _evaluate_single_relevance_entry(handler, entry["id"], said, entry, MODEL, category)
                else:
                    rest = entry, MODEL, category, Language.PYTHON, ReturnFormat.PYTHON, False
                    verdict = _evaluate_single_ast_entry(handler, entry["id"], said, truth["ground_truth"], *rest)
                line["value"] = float(verdict["valid"])
                line |= {"prompt": meta["input_token_count"], "sampled": meta["output_token_count"]}
        with lock, open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    work = []
    for category in told["categories"]:
        entries = load_dataset_entry(category)
        truths = entries if category == "irrelevance" else load_ground_truth_entry(category)
        pairs = list(zip(entries, truths, strict=True))[: told["limit"]]
        work += [(category, *pair) for pair in pairs for _ in range(told["samples"])]
    total = len(work)
    with ThreadPoolExecutor(told["at_once"]) as pool:
        list(pool.map(lambda each: judge(*each), work))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
