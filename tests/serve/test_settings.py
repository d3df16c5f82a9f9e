from __future__ import annotations

import pytest

from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.serve.elastic import environment_subnet
from stretto.serve.server import ServeSettings


def test_the_environment_sets_axes(config: ModelConfig) -> None:
    assert environment_subnet({}, config) is None
    assert environment_subnet({"ERNIE_ELASTIC_LAYERS": "  "}, config) is None
    environ = {"ERNIE_ELASTIC_LAYERS": "3", "ERNIE_ELASTIC_EXPERTS": " 4 ", "ERNIE_ELASTIC_TOPK": "1"}
    assert environment_subnet(environ, config) == SubnetChoice(layers=3, experts=4, top_k=1)
    assert environment_subnet({"ERNIE_ELASTIC_TOPK": "1"}, config) == SubnetChoice(top_k=1)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"ERNIE_ELASTIC_LAYERS": "5"}, r"^ERNIE_ELASTIC_LAYERS=5: .*outside 1\.\.4"),
        ({"ERNIE_ELASTIC_EXPERTS": "1"}, r"^ERNIE_ELASTIC_EXPERTS=1: .*top_k=2"),
        ({"ERNIE_ELASTIC_TOPK": "two"}, "^ERNIE_ELASTIC_TOPK: 'two' is not a whole number"),
        ({"ERNIE_ELASTIC_TOPK": "0"}, "^ERNIE_ELASTIC_TOPK"),
        ({"ERNIE_ELASTIC_TOPK": "²"}, "^ERNIE_ELASTIC_TOPK"),
    ],
)
def test_a_bad_environment_is_one_line(config: ModelConfig, environ: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        environment_subnet(environ, config)
    assert "\n" not in str(caught.value)


def test_only_loopback_names_on_loopback() -> None:
    assert "localhost" in (ServeSettings().hosts() or ())
    assert ServeSettings(host="0.0.0.0").hosts() is None
    assert ServeSettings(host="0.0.0.0", allowed_hosts=("a",)).hosts() == ("a",)


def test_keys_do_not_show() -> None:
    assert "secret" not in repr(ServeSettings.model_validate({"api_keys": ["secret"], "admin_key": "secret"}))
