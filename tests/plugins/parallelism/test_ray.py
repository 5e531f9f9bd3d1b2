"""``parallelism=ray`` as far as no cluster is needed: what is refused and why, and who gets which GPU."""

from __future__ import annotations

import sys

import pytest

from engine.testing.context import build_context
from engine_plugins.parallelism.ray.config import RayConfig, needs_ray
from engine_plugins.parallelism.ray.launcher import _why_not_connected
from engine_plugins.parallelism.ray.nodes import Node, Wanted, devices, lacking, lacking_for_engine, share_of_memory


def node(name: str, alive: bool = True, **resources: float) -> Node:
    return Node(name, f"10.0.0.{name}", alive, resources)


TWO_CPU_NODES = (node("1", CPU=8), node("2", CPU=8))


@pytest.mark.parametrize("nodes, wanted", [
    (TWO_CPU_NODES, Wanted(2, 2, {"CPU": 8})),
    (TWO_CPU_NODES, Wanted(4, 2, {"CPU": 4})),
    (TWO_CPU_NODES, Wanted(2, 1, {"CPU": 4})),
    ((node("1", CPU=4, GPU=2), node("2", CPU=64), node("3", CPU=4, GPU=4)), Wanted(4, 2, {"CPU": 1, "GPU": 1})),
])  # fmt: skip
def test_a_cluster_that_holds_the_ranks_lacks_nothing(nodes, wanted):
    assert lacking(nodes, "1", wanted) == ""


@pytest.mark.parametrize("nodes, wanted, lacks", [
    (TWO_CPU_NODES, Wanted(3, 3, {"CPU": 8}),
     "parallelism.nodes=3 with 1 rank each needs 3 Ray nodes with 8 CPUs each, this machine among them; Ray has "
     "10.0.0.1 (this machine) with 8 CPUs, 10.0.0.2 with 8 CPUs. Use fewer ranks, or start Ray on more machines with "
     "`ray start --address=HOST:PORT`"),
    (TWO_CPU_NODES, Wanted(4, 4, {"CPU": 2}), "Use parallelism.nodes=1 or parallelism.nodes=2, or start Ray on more"),
    (TWO_CPU_NODES, Wanted(2, 2, {"CPU": 16}), "Use parallelism.cpus=8, or start Ray on more machines"),
    ((node("1", CPU=8, GPU=1), node("2", CPU=8)), Wanted(2, 2, {"CPU": 1, "GPU": 1}),
     "with 1 CPU and 1 GPU each, this machine among them; Ray has 10.0.0.1 (this machine) with 8 CPUs and 1 GPU, "
     "10.0.0.2 with 8 CPUs and 0 GPUs. Use fewer ranks"),
    ((node("1", CPU=1), node("2", CPU=8), node("3", CPU=8)), Wanted(2, 2, {"CPU": 8}), "Use parallelism.cpus=1, or"),
    ((node("1", CPU=8), node("2", alive=False, CPU=8)), Wanted(2, 2, {"CPU": 8}),
     "Ray has 10.0.0.1 (this machine) with 8 CPUs and 1 that died."),
])  # fmt: skip
def test_a_refusal_says_what_is_wanted_what_is_there_and_what_would_fit(nodes, wanted, lacks):
    assert lacks in lacking(nodes, "1", wanted)


def test_an_engine_runs_on_any_machine_that_is_large_enough_and_has_its_share_of_memory():
    small, large = node("1", CPU=2, memory=8e9), node("2", CPU=8, memory=3.2e10)
    assert lacking_for_engine([small, large], {"CPU": 4}) == ""
    assert share_of_memory(large, {"CPU": 2}) == 8e9 and share_of_memory(large, {"CPU": 8}) == 3.2e10
    lacks = lacking_for_engine([small, node("2", alive=False, CPU=8)], {"CPU": 4, "GPU": 1})
    assert "an engine needs a Ray node with 4 CPUs and 1 GPU; Ray has 10.0.0.1 with 2 CPUs and 0 GPUs. Use" in lacks


def test_rank_0_keeps_the_gpu_it_runs_on_and_the_others_get_the_rest():
    assert devices("0", ["1", "0", "2"]) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="runs on GPU 0, which is another job's: start it with CUDA_VISIBLE_DEVICES=2"):
        devices("0", ["2", "3"])


@pytest.mark.parametrize("values, why", [
    ({"address": "ray://10.0.0.1:10001"}, "parallelism.address=ray://10.0.0.1:10001: expected auto or HOST:PORT"),
    ({"address": "10.0.0.1"}, "expected auto or HOST:PORT"),
    ({"cpus": -1}, "parallelism.cpus=-1"),
    ({"port": 70000}, "parallelism.port=70000"),
    ({"wait_s": 0.0}, "parallelism.wait_s=0"),
    ({"tp": 2, "nodes": 3}, "parallelism.nodes=3: does not divide the 2 ranks"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(values, why):
    with pytest.raises(ValueError) as refused:
        RayConfig(**values)
    assert why in str(refused.value)


@pytest.mark.parametrize("address, error, said", [
    ("auto", ConnectionError("Could not find any running Ray instance"), "run `ray start --head` here, or `ray start"),
    ("10.0.0.1:6379", RuntimeError("This node has an IP address of 10.0.0.9\nand Ray expects"),
     "run `ray start --address=10.0.0.1:6379` here"),
    ("10.0.0.1:6379", RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    "
                                   "Python: 3.12.1\nThis process was started with:\n    Ray: 2.60.0\n    "
                                   "Python: 3.11.7\n"),
     "Python: 3.12.1 This process was started with: Ray: 2.60.0 Python: 3.11.7 Install the same Ray and Python on all"),
])  # fmt: skip
def test_why_ray_lets_nobody_in_is_said_with_the_command_that_helps(address, error, said):
    assert said in _why_not_connected(address, error)


def test_a_folder_of_that_name_is_not_ray(tmp_path, monkeypatch):
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    context = build_context()
    (why,) = needs_ray(context.model, context.device)
    assert "Ray is not installed; install the extra `ray` on every machine" in why
