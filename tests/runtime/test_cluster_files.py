"""The files in docs/cluster: valid by Ray's schema, of one version of Ray, and with commands whose options exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.main import command as stretto

yaml = pytest.importorskip("yaml")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "CLUSTER.md"
FOLDER = PAGE.parent / "cluster"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def check_command(command: str) -> None:
    """Every option of a ``stretto`` command exists."""
    program, name, *rest = shlex.split(command)
    known = {option for parameter in stretto.commands[name].params for option in parameter.opts}
    assert program == "stretto" and {each for each in rest if each.startswith("-")} <= known, command


def test_the_file_for_aws_is_valid_by_rays_schema() -> None:
    ray, jsonschema = pytest.importorskip("ray"), pytest.importorskip("jsonschema")
    (config,) = documents("ray-aws.yaml")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]


def test_the_manifest_for_kubernetes_is_complete() -> None:
    job, volume = documents("kuberay.yaml")
    spec = job["spec"]["rayClusterSpec"]
    pods = [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    assert (job["kind"], volume["kind"]) == ("RayJob", "PersistentVolumeClaim")
    assert {each["containers"][0]["image"] for each in pods} == {f"REGISTRY/stretto:0.1.0-ray{spec['rayVersion']}"}
    assert {each["name"] for each in pods[0]["volumes"]} == {
        each["name"] for each in pods[0]["containers"][0]["volumeMounts"]
    }
    assert pods[0]["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    check_command(job["spec"]["entrypoint"])


def test_the_page_names_the_same_version_and_existing_options() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (config,), (job, _) = documents("ray-aws.yaml"), documents("kuberay.yaml")
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"rayproject/ray:{version}-" in config["docker"]["image"]
    assert set(re.findall(r"(?:ray.{0,12}==|rayproject/ray:|-ray)(\d+\.\d+\.\d+)", text)) == {version}
    inside = re.findall(r"ray exec \S+ (?:--tmux )?'(stretto .*?)'", text, re.DOTALL)
    assert len(inside) == 2
    for command in (*inside, *re.findall(r"^(stretto serve [^#\n]*)", text, re.MULTILINE)):
        check_command(command.replace("\\\n", " "))
