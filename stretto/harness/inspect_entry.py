"""What inspect_ai finds of us by its entry point: the model provider ``stretto/`` and the sandbox ``stretto``. Both are loaded
when asked for: every `inspect` command imports this file, whatever its model is."""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi
from inspect_ai.util import SandboxEnvironment, sandboxenv


@modelapi(name="stretto")
def model() -> type[ModelAPI]:
    from stretto.harness.inspect_model import StrettoAPI

    return StrettoAPI


@sandboxenv(name="stretto")
def sandbox() -> type[SandboxEnvironment]:
    from stretto.harness.inspect_sandbox import StrettoSandbox

    return StrettoSandbox
