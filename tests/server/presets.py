"""Named Subnets of the tests' tiny network."""

from __future__ import annotations

from stretto.model.spec import SubnetChoice

PRESETS = {
    "half": SubnetChoice(layers=3, experts=4, top_k=2),
    "wide": SubnetChoice(layers=4, experts=4, top_k=1),
    "corner": SubnetChoice(layers=2, experts=2, top_k=1),
}
