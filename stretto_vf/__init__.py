"""What `vf-eval` finds by the name of a package: see `stretto.harness.vf`."""

from stretto.harness.vf import LocalEnv, SessionLoop, SourceTaskset

__all__ = ["LocalEnv", "SessionLoop", "SourceTaskset"]
