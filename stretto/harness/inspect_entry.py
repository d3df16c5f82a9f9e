"""Entry point for inspect_ai: registers the model provider ``stretto/`` and the sandbox ``stretto``.

Every `inspect` command imports this file, so the functions import the implementations only when they are used.
"""

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
