"""``engine serve`` and ``engine check`` on quantized copies of the bundled model."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import model_facts
from tests.plugins.quantizer.checkpoint.writers import PROJECTIONS, Case, ct_fp8, ct_packed, gptq
from tests.selection import few

from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import bundled_dir
from engine.checkpoint.tensors import CheckpointError
from engine.cli.main import main
from engine.service.offline import LLM

SMALL = ("device=cpu", "model.max_len=64", "scheduler.max_requests=2", "exporter=[]", "overlap=false")
QUESTION = {"messages": [{"role": "user", "content": "What does json.dumps do?"}], "temperature": 0, "max_tokens": 24}
ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."


def quantized_bundled(folder: Path, case: Case) -> Path:
    """The bundled model as ``case`` writes it; its head is its embedding and stays."""
    shutil.copytree(bundled_dir(), folder, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if any(name.endswith(f"{part}.weight") for part in PROJECTIONS)]:
        layer = name.removesuffix(".weight")
        tensors, _ = case.write(stored.pop(name).float())
        stored |= {f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return configured(folder, case.quantization)


def configured(folder: Path, quantization: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def engine(capfd: pytest.CaptureFixture[str]) -> Command:
    """A command with these words: in this process, and ``serve`` in one of its own."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        words = (*words, "device=cpu", "exporter=[]")
        if words[0] == "serve":
            command = [sys.executable, "-m", "engine.cli.main", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)
        capfd.readouterr()
        return subprocess.CompletedProcess(words, main([*words]), *capfd.readouterr())

    return run


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


CASES = {
    "gptq": (gptq(8, 64, True, True, "gptq"), "gptq group 64 in activation order"),
    "compressed-tensors": (ct_packed(8, 32, symmetric=False), "compressed-tensors group 32 with zero points"),
    "fp8": (ct_fp8("channel"), "compressed-tensors per channel; FP8 is storage only"),
}


@few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_quantized_copy_answers_as_the_original(name: str, tmp_path: Path) -> None:
    case, label = CASES[name]
    folder = quantized_bundled(tmp_path / name, case)
    llm = LLM(str(folder), ["device=cpu", "model.max_len=512", "scheduler.max_requests=2", "exporter=[]"])
    assert llm.chat(**QUESTION).text.startswith(ANSWER)
    assert any(label in line for line in llm.info.lowering), llm.info.lowering
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_quantized_copy_is_served(name: str, tmp_path: Path) -> None:
    case, label = CASES[name]
    folder = quantized_bundled(tmp_path / name, case)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{probe.getsockname()[1]}"
    small = ["model.max_len=512", "scheduler.max_requests=2", "scheduler.token_budget=64"]
    words = ["serve", f"model.path={folder}", f"server.port={base.rpartition(':')[2]}", *small]
    command = [sys.executable, "-m", "engine.cli.main", *words, "device=cpu", "exporter=[]"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for _ in range(900):
            assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
            try:
                get(f"{base}/ready")
                break
            except (urllib.error.URLError, ConnectionError, json.JSONDecodeError):
                time.sleep(0.1)  # polling a child process, bounded
        answer = get(f"{base}/v1/chat/completions", QUESTION | {"model": name})
        assert answer["choices"][0]["message"]["content"].startswith(ANSWER)
        assert label in json.dumps(get(f"{base}/engine/plan"))
    finally:
        process.terminate()
        assert process.wait(30) == 0


FOUR_BITS = ct_packed(4, 32, symmetric=True)


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody changes it."""
    return quantized_bundled(tmp_path_factory.mktemp("w4"), FOUR_BITS)


def test_check_says_that_a_quantized_checkpoint_fits(four_bits: Path, engine: Command) -> None:
    done = engine("check", "--build", f"model.path={four_bits}")
    assert done.returncode == 0, done.stderr
    assert "every selected plugin is built" in done.stderr and "activations=auto" in done.stdout


@pytest.mark.parametrize("words", [("check",), ("serve", "server.port=0")])
def test_what_cannot_be_read_is_refused_with_every_reason_and_no_traceback(
    words: tuple[str, ...], tmp_path: Path, engine: Command
) -> None:
    shutil.copytree(bundled_dir(), tmp_path / "copy")
    quantization = {"quant_method": "awq", "bits": 3, "version": "gemv", "zero_point": True}
    done = engine(*words, f"model.path={configured(tmp_path / 'copy', quantization)}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "bits=3: expected 4 bits" in done.stderr and "only the gemm layout can be read" in done.stderr
    assert "load weights" not in done.stderr


@pytest.mark.parametrize(
    "words", [("check", "--build"), pytest.param(("serve", "server.port=0"), marks=pytest.mark.slow)]
)
def test_what_only_headers_show_is_refused_before_loading(
    words: tuple[str, ...], four_bits: Path, tmp_path: Path, engine: Command
) -> None:
    folder = shutil.copytree(four_bits, tmp_path / "mixed")
    mixed = FOUR_BITS.quantization | {"ignore": ["lm_head", "re:.*layers\\.[01]\\.self_attn\\.q_proj"]}
    done = engine(*words, f"model.path={configured(folder, mixed)}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("layers that are multiplied together must be stored in the same way") == 2
    assert "model.layers.1.self_attn.q_proj is not quantized" in done.stderr and "load weights" not in done.stderr


@pytest.mark.slow
def test_a_cache_scale_that_cannot_be_stops_only_plans_that_use_it(tmp_path: Path) -> None:
    folder = quantized_bundled(tmp_path / "fp8", ct_fp8("channel"))
    stored = load_file(folder / "model.safetensors")
    names = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(0.0) for kind in "kv"}
    save_file(stored | names, folder / "model.safetensors")
    for kv_format in ("native", "int8"):
        LLM(str(folder), [*SMALL, f"kv_format={kv_format}"]).close()
    with pytest.raises(CheckpointError, match=r"k_scale holds .0\.0.: a scale is a positive number; kv_format=NAME"):
        LLM(str(folder), [*SMALL, "kv_format=fp8"])


def test_another_quantizer_is_refused_and_told_who_reads_it(four_bits: Path, engine: Command) -> None:
    done = engine("check", f"model.path={four_bits}", "quantizer=int8")
    assert done.returncode == 2
    assert "already quantized (quant_method=compressed-tensors); quantizer=checkpoint reads that" in done.stderr


def test_modelopts_own_file_is_read_where_the_configuration_says_nothing(tmp_path: Path, engine: Command) -> None:
    shutil.copytree(bundled_dir(), tmp_path / "copy")
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "copy" / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    done = engine("check", f"model.path={tmp_path / 'copy'}")
    assert done.returncode == 2 and "quant_method=modelopt" in done.stderr and "quant_algo='NVFP4'" in done.stderr


def test_modelopts_own_file_must_not_contradict_the_configuration(tmp_path: Path) -> None:
    stated = {"quant_method": "modelopt", "quant_algo": "FP8"}
    folder = configured(shutil.copytree(bundled_dir(), tmp_path / "copy"), stated)
    own = folder / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8_PB_WO"}}))
    with pytest.raises(AssemblyError, match=r"hf_quant_config\.json says quant_algo=FP8_PB_WO and .* quant_algo=FP8;"):
        model_facts(str(folder))
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    assert model_facts(str(folder)).quantization == stated
