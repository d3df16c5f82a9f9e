"""The same small networks and batches as the evaluation's tests."""

from tests.evals.conftest import batches, make_model, numpy_batches

__all__ = ["batches", "make_model", "numpy_batches"]
