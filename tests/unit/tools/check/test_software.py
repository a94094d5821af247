"""vLLM, Ray, and vLLM's choice of plugins."""

import importlib.metadata

import pytest
import vllm

from vllm_ssd.tools.check import software
from vllm_ssd.tools.check.software import examine_software


@pytest.fixture(autouse=True)
def all_plugins(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_software_is_in_order():
    assert [each.state for each in examine_software()] == ["ok"] * 3


def test_ray_is_missing(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software, "version", version)
    (found,) = examine_software()
    assert found.state == "bad" and "ray" in found.fact and "pip install" in found.remedy


@pytest.mark.parametrize("plugins, state", [("another", "bad"), ("", "bad"), ("a,ssd", "ok")])
def test_a_plugin_that_is_left_out(monkeypatch, plugins, state):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    *_, last = examine_software()
    assert last.state == state and last.remedy.startswith("add ssd" if state == "bad" else "")


def test_another_version_of_vllm_ends_the_check(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    *_, last = examine_software()
    assert last.name == "platform" and last.state == "bad"
    assert "0.1.0" in last.fact and "install a supported vLLM" in last.remedy
