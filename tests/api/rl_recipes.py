"""A recipe of `stretto rl` that is done in seconds, and a task that goes wrong as it is told."""

from __future__ import annotations

STEPS, PROMPTS = 4, 2
TINY = f"""
staleness = 1

[sources.flip]
kind = "strings"
args = {{ operation = "complement", length = 3, graded = true }}

[start]
steps = 25
rows = 4
noise = 0.3

[start.model]
vocab_size = 280
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
top_k = 2
expert_intermediate_size = 16

[start.optim]
lr = 5e-3

[rollout]
group = 4
max_tokens = 10

[loss]
drop_uniform = false

[optim]
lr = 1e-3

[train]
steps = {STEPS}
prompts = {PROMPTS}
seq_len = 64
micro_rows = 4
snapshot_every = 2
keep_snapshots = 9
eval_every = 100
eval_prompts = 4

[runtime.rewards]
max = 1
deadline_s = 2
"""

OWN = """
import math, os, signal, time

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Problem, Score, TaskSource


class Args(Config):
    fault: str


class Own(TaskSource):
    args_kind = Args

    def __init__(self, name, args, sandbox=None):
        super().__init__(name, args, sandbox)
        self.fault = args.fault

    def problem(self, item):
        if self.fault == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        return Problem(item, ({"role": "user", "content": f"say {item % 10}"},), str(item % 10))

    def score(self, problem, answer):
        if self.fault == "never returns":
            time.sleep(1000)
        text = answer.text.strip()
        # what validate() tries is judged well; only what a policy writes meets the fault
        if self.fault == "gold" or not text or "no such answer" in text or len(text) == 1:
            return Score.of(text == problem.gold and self.fault != "gold")
        return {
            "raises": lambda: {}["no\\nwhere"],
            "nan": lambda: Score(math.nan, Outcome.OK),
            "string": lambda: "1.0",
            "hangs": lambda: time.sleep(60),
            "exits": lambda: os._exit(3),
        }[self.fault]()
"""
