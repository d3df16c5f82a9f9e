"""Script for BFCL's own environment (`stretto.harness.suites` creates it): runs BFCL's single-turn questions on a server.

The requests go through BFCL's handler of OpenAI's API, and BFCL's checker judges the calls. The script imports nothing of Stretto.

BFCL's own command would write a failed request into the answer and judge it. In `irrelevance`, where no call is the correct answer, a
dead server would then get 100 %. This script reports a failed request as an infrastructure error.
"""

import json
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MODEL = "served"


def main(job: dict[str, Any], path: str) -> None:
    # BFCL's table of models imports the clients of all vendors. This one has a single model.
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
            return {"base_url": f"{job['url']}/v1", "api_key": "none", "timeout": job["sample_s"], "max_retries": 0}

        def _query_FC(self, inference_data: dict[str, Any]) -> Any:
            fields = {"model": name, "temperature": self.temperature, "max_tokens": job["max_tokens"]}
            return self.generate_with_backoff(
                messages=inference_data["message"], tools=inference_data["tools"], **fields
            )

    name = OpenAI(base_url=f"{job['url']}/v1", api_key="none").models.list().data[0].id
    handler = Handler(model_name=name, temperature=job["temperature"], registry_name=MODEL, is_fc_model=True)
    lock, failed = threading.Lock(), list[str]()

    def judge(category: str, entry: dict[str, Any], truth: dict[str, Any]) -> None:
        line = {"category": category, "id": entry["id"], "value": None, "why": "", "prompt": 0, "sampled": 0}
        if len(failed) > job["most_infra"] * total:
            line["why"] = f"not asked, after too many failures: {failed[-1]}"
        else:
            try:
                # a copy, because the handler changes its argument
                answer, meta = handler.inference(json.loads(json.dumps(entry)), False, False)
            except Exception as error:
                line["why"] = f"{type(error).__name__}: {error}"[:300]
                failed.append(line["why"])
            else:
                if category == "irrelevance":
                    verdict = _evaluate_single_relevance_entry(handler, entry["id"], answer, entry, MODEL, category)
                else:
                    rest = entry, MODEL, category, Language.PYTHON, ReturnFormat.PYTHON, False
                    verdict = _evaluate_single_ast_entry(handler, entry["id"], answer, truth["ground_truth"], *rest)
                line["value"] = float(verdict["valid"])
                line |= {"prompt": meta["input_token_count"], "sampled": meta["output_token_count"]}
        with lock, open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    work = []
    for category in job["categories"]:
        entries = load_dataset_entry(category)
        truths = entries if category == "irrelevance" else load_ground_truth_entry(category)
        pairs = list(zip(entries, truths, strict=True))[: job["limit"]]
        work += [(category, *pair) for pair in pairs for _ in range(job["samples"])]
    total = len(work)
    with ThreadPoolExecutor(job["at_once"]) as pool:
        list(pool.map(lambda each: judge(*each), work))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
