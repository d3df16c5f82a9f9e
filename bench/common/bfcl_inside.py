"""Runs in the environment of bfcl-eval (`stretto.harness.suites.bfcl_python`) and imports nothing of ours.

``questions CATEGORY…`` prints each question as a server takes it, one JSON object a line; ``judge`` reads such objects with the
``calls`` that were made, ``[[name, arguments], …]``, and prints ``[category, id, whether the package's checker takes them]``.
"""

import json
import sys
import types

MODEL = "served"
# Its table of models imports every vendor's client. Names with a dot reach an API with an underscore.
table = types.ModuleType("bfcl_eval.constants.model_config")
vars(table)["MODEL_CONFIG_MAPPING"] = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}
sys.modules[table.__name__] = table

from bfcl_eval.constants.enums import Language, ModelStyle  # noqa: E402
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402
from bfcl_eval.model_handler.utils import convert_to_tool  # noqa: E402
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry  # noqa: E402


def questions(categories: list[str]) -> None:
    for category in categories:
        for entry in load_dataset_entry(category):
            tools = convert_to_tool(entry["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
            told = {"category": category, "id": entry["id"], "messages": entry["question"][0], "tools": tools}
            print(json.dumps(told))


def judge() -> None:
    known, truths = {}, {}
    for line in sys.stdin:
        asked = json.loads(line)
        category, number, calls = asked["category"], asked["id"], asked["calls"]
        if category == "irrelevance":
            print(json.dumps([category, number, not calls]))
            continue
        if category not in known:
            known[category] = {entry["id"]: entry for entry in load_dataset_entry(category)}
            truths[category] = {entry["id"]: entry["ground_truth"] for entry in load_ground_truth_entry(category)}
        made = [{name: arguments} for name, arguments in calls]
        rest = truths[category][number], Language.PYTHON, category, MODEL
        verdict = bool(made) and ast_checker(known[category][number]["function"], made, *rest)["valid"]
        print(json.dumps([category, number, bool(verdict)]))


if __name__ == "__main__":
    questions(sys.argv[2:]) if sys.argv[1] == "questions" else judge()
