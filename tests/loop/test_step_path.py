"""What assembly uses stays at assembly: the step path calls neither pluggy nor OmegaConf and imports nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.assembly.assemble import assemble

from ..laws.harness import exact_engine, random_requests, run


def test_pluggy_and_omegaconf_are_called_zero_times_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import omegaconf
    import pluggy

    calls: list[str] = []

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(self: object, *args: object, **kwargs: object) -> object:
            calls.append(f"{owner.__name__}.{name}")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    engine = exact_engine("+preset=latency", "drafter=ngram")
    count(pluggy.HookCaller, "__call__")
    for name in ("__getattr__", "__getitem__", "__contains__", "get"):
        count(omegaconf.DictConfig, name)
    assert omegaconf.OmegaConf.create({"a": 1}).a == 1 and calls, "the counters count"
    calls.clear()
    for seed in range(6):
        run(engine.core, random_requests(seed, 20))
    assert engine.core.stats().step > 50
    assert calls == []
    engine.core.close()


def test_the_engine_process_imports_nothing_of_assembly_and_nothing_new_while_it_serves() -> None:
    script = (
        "import sys\n"
        "from engine.assembly.plan import EnginePlan\n"
        "from engine.contracts.request import EngineRequest, SamplingParams\n"
        "from engine.startup.build import build_engine\n"
        "core = build_engine(EnginePlan.from_json(sys.stdin.buffer.read())).core\n"
        "before = set(sys.modules)\n"
        "assert not before & {'hydra', 'omegaconf', 'engine.assembly.discovery'}\n"  # pluggy marks hooks of slots
        "options = (SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),\n"
        "    SamplingParams(max_tokens=8, top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0, seed=1))\n"
        "for i, sampling in enumerate(options):\n"
        "    core.submit(EngineRequest(str(i), tuple(range(9, 60)), sampling))\n"
        "while core.has_work:\n"
        "    for out in core.step().outputs:\n"
        "        assert not out.error, out.error\n"
        "new = set(sys.modules) - before\n"
        "assert not {n for n in new if n.startswith('engine')}, new\n"
        "core.close()\n"
    )
    plan = assemble(["+preset=latency", "device=cpu", "model.max_len=256", "threads=1"])
    done = subprocess.run([sys.executable, "-c", script], input=plan.to_json(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_the_loop_imports_neither_torch_nor_anything_that_computes() -> None:
    """A simulator runs it on a machine without a device."""
    script = (
        "import sys, engine.loop.core, engine.loop.driver\n"
        "computes = ('torch', 'triton', 'engine.kernels', 'engine.sampling', 'engine.step.runner')\n"
        "assert not [name for name in sys.modules if name.startswith(computes)], sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
