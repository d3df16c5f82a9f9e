"""Compiling the CPU kernels at first use and loading them.

The library has a plain C interface, so it depends on no version of torch or Python and compiles in seconds. It is kept
in the user's cache folder under a hash of its sources, the compiler and the processor it was compiled for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.track import progress

SOURCES = Path(__file__).parent
VARIABLE = "STRETTO_NATIVE"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
_REMEDY = f"install a C++ compiler (g++ 12 or later), or set {VARIABLE}=auto to run without"


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels, or why there are none."""

    handle: ctypes.CDLL | None
    reason: str
    """Empty where there is a handle."""


def load(environment: Mapping[str, str] | None = None) -> Library:
    """The kernels as ``STRETTO_NATIVE`` asks: ``1`` must have them, ``0`` must not, ``auto`` (the default) may.

    Raises:
        UserError: an unknown value, or ``1`` where they cannot be compiled.
    """
    environment = os.environ if environment is None else environment
    choice = environment.get(VARIABLE, "auto") or "auto"
    if choice not in ("0", "1", "auto"):
        raise UserError(f"{VARIABLE}: unknown value {choice!r}; use 0, 1 or auto")
    if choice == "0":
        return Library(None, f"{VARIABLE}=0")
    library = _compiled(environment)
    if library.handle is None and choice == "1":
        raise UserError(f"{VARIABLE}: the CPU kernels cannot be used: {library.reason}; {_REMEDY}")
    return library


def _compiled(environment: Mapping[str, str]) -> Library:
    if sys.platform != "linux":
        return Library(None, f"not supported on {sys.platform}")
    name = environment.get("CXX") or next((found for found in ("g++", "clang++") if shutil.which(found)), None)
    compiler = name and shutil.which(name)
    if not compiler:
        return Library(None, f"no C++ compiler {name!r}" if name else "no C++ compiler")
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "stretto" / f"native-{_key(compiler)}.so"
    if not path.is_file():
        problem = _compile(compiler, path)
        if problem:
            return Library(None, problem)
    try:
        return Library(ctypes.CDLL(str(path)), "")
    except OSError as error:
        return Library(None, f"{path} cannot be loaded: {error}; delete it")


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h", ".inc"):
            digest.update(source.read_bytes())
    # its version, and what -march=native stands for here: a home folder may be shared by different machines
    told = subprocess.run([compiler, *_FLAGS, "-E", "-v", "-x", "c++", os.devnull], capture_output=True, check=False)
    digest.update(told.stderr)
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> str | None:
    """Compile to ``path``; returns what went wrong, on one line."""
    with progress("Compiling the CPU kernels (once)", total=1) as advance, tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(SOURCES / "decode.cpp"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        advance(1)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            return f"{compiler} failed: {(errors or done.stderr.splitlines() or ['no message'])[0]}"
        with replacing(path) as temporary:
            shutil.copyfile(built, temporary)
    return None
