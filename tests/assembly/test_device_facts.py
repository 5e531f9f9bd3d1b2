import pytest

from engine.assembly import device_facts as facts
from engine.assembly.errors import AssemblyError
from engine.native import Compiler


def test_cpu_flags_come_from_the_kernel(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast One\nflags\t\t: fpu avx2 avx512f amx_bf16 nonsense\n")
    found = facts.cpu_facts(str(info))
    assert (found.kind, found.name) == ("cpu", "Fast One")
    assert found.features - {"cxx"} == {"avx2", "avx512f", "amx_bf16"}
    assert found.memory_bytes > 1 << 20


@pytest.mark.parametrize(("compiler", "has"), [(Compiler(("g++",), "12"), True), ("there is none", False)])
def test_a_working_compiler_is_a_feature(monkeypatch, compiler, has):
    monkeypatch.setattr(facts, "find_compiler", lambda: compiler)
    found = facts.cpu_facts()
    assert ("cxx" in found.features, found.no_cxx) == (has, "" if has else compiler)


def test_a_machine_without_cpuinfo_still_has_facts(tmp_path):
    assert facts.cpu_facts(str(tmp_path / "none")).features <= {"cxx"}


def test_cuda_without_a_cuda_build_of_torch_says_so_and_auto_takes_the_cpu(monkeypatch):
    monkeypatch.setattr(facts, "torch_built_for_cuda", lambda: False)
    with pytest.raises(AssemblyError, match="built without CUDA"):
        facts.device_facts("cuda")
    assert facts.device_facts("auto").kind == "cpu"


def test_cuda_without_a_driver_says_so(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(facts, "torch_built_for_cuda", lambda: True)
    monkeypatch.setattr(facts.ctypes, "CDLL", missing)
    with pytest.raises(AssemblyError, match="no NVIDIA driver"):
        facts.device_facts("cuda")


def test_the_torch_build_is_read_without_importing_torch():
    import torch

    assert facts.torch_built_for_cuda() == (torch.version.cuda is not None)
