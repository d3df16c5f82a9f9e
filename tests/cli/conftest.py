"""The fixtures of `tests.api.conftest`: the command line called as a user calls it, and what it reads."""

from tests.api.conftest import finished, healing, recipe, served_run, stretto, text, tiny

__all__ = ["finished", "healing", "recipe", "served_run", "stretto", "text", "tiny"]
