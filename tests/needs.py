"""What a test may need of the machine it runs on. Nothing else skips a test: what does not apply is not generated.

A test is marked with one of these; ``conftest.py`` skips it where something is lacking, and lists the reasons at the
end of a run. Reasons are found when the test starts: to know the processor's instructions, kernels are built.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from engine import native


def needs(lacking: Callable[[], str]) -> pytest.MarkDecorator:
    """``lacking()`` says why not on this machine; empty where nothing is lacking."""
    return pytest.mark.needs.with_args(lacking)


def each(values: Sequence[str], mark: Callable[[str], pytest.MarkDecorator]) -> list[object]:
    """Parameters that need something each."""
    return [pytest.param(value, marks=mark(value)) for value in values]


def _compiler() -> str:
    found = native.find_compiler()
    return found if isinstance(found, str) else ""


def _x86() -> str:
    return "" if platform.machine() == "x86_64" else f"not an x86-64 processor but {platform.machine()}"


def _no_gpu() -> str:
    return "there is a CUDA device" if torch.cuda.is_available() else ""


def _integer_instructions(name: str) -> str:
    from engine.kernels.cpu.linear.integer_linear import INSTRUCTIONS, best_instructions

    best = 0 if _compiler() else INSTRUCTIONS.index(best_instructions())
    return "" if INSTRUCTIONS.index(name) <= best else f"no {name} for integers in processor, compiler or system"


def _bfloat16_instructions(name: str) -> str:
    from engine.kernels.cpu.linear.float_linear import INSTRUCTIONS, available

    has = INSTRUCTIONS[:1] if _compiler() else available(torch.bfloat16)
    return "" if name in has else f"no {name} for bfloat16 in processor, compiler or system"


def _amx() -> str:
    from engine_plugins.attention_kernel.cpu.kernel import kernels

    has = not _compiler() and kernels(torch.bfloat16, torch.bfloat16).can_use_amx()
    return "" if has else "no AMX for bfloat16 in processor, compiler or system"


def _ray() -> str:
    found = find_spec("ray")
    return "" if found is not None and found.origin is not None else "Ray is not installed: pip install -e '.[ray]'"


def browser() -> str:
    """The command that starts Chromium; empty where there is none."""
    return next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), "")


def _browser() -> str:
    return "" if browser() else "there is no Chromium (Debian's package chromium-headless-shell)"


def _network_namespaces() -> str:
    """Also ``ip``, which makes them."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "there is no command ip"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "network namespaces may not be made here"


def _openssl() -> str:
    return "" if shutil.which("openssl") else "there is no command openssl"


needs_compiler = needs(_compiler)
needs_x86 = needs(_x86)
needs_no_gpu = needs(_no_gpu)
needs_amx = needs(_amx)
needs_ray = needs(_ray)
needs_browser = needs(_browser)
needs_network_namespaces = needs(_network_namespaces)
needs_openssl = needs(_openssl)


def needs_integer_instructions(name: str) -> pytest.MarkDecorator:
    """``name``: one of ``engine.kernels.cpu.linear.integer_linear.INSTRUCTIONS``."""
    return needs(partial(_integer_instructions, name))


def needs_bfloat16_instructions(name: str) -> pytest.MarkDecorator:
    """``name``: one of ``engine.kernels.cpu.linear.float_linear.INSTRUCTIONS``."""
    return needs(partial(_bfloat16_instructions, name))
