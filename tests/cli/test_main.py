import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.selection import few

from engine import __version__
from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import bundled_dir
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.cli.commands import CORE
from engine.cli.complete import candidates
from engine.cli.main import main
from engine.contracts.command import CommandProvider
from engine.contracts.slots import SLOTS
from engine.http.server import serve
from engine.startup.build import build_engine

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "transformers"):
            raise AssertionError("imports " + name)

sys.meta_path.insert(0, Blocked())
from engine.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def engine(*words: str) -> "subprocess.CompletedProcess[str]":
    """``engine ...`` in a process that cannot import torch."""
    return subprocess.run([sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, timeout=60)


@pytest.fixture
def model(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@few(2)
@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["bench", "--help"], ["config"], ["plugins"]])
def test_nothing_before_serving_needs_torch(words):
    done = engine(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_plan_needs_no_weights(model):
    assert assemble(["+preset=latency", f"model.path={model}", "device=cpu"]).choice("drafter").name == "ngram"


def test_check_prints_the_plan_as_json(capsys):
    assert main(["check", "drafter=ngram", "--json", "device=cpu"]) == 0
    out, err = capsys.readouterr()
    plan = EnginePlan.from_json(out.encode())
    assert plan.choice("drafter").name == "ngram" and plan.model.path == str(bundled_dir()) and not err


@pytest.fixture
def whole(tmp_path):
    """The bundled model, in files that may be changed."""
    folder = tmp_path / "whole"
    return Path(shutil.copytree(bundled_dir(), folder, ignore=shutil.ignore_patterns("drafters")))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_check_refuses_files_that_are_missing_as_serve_does(missing, whole, capsys, monkeypatch):
    monkeypatch.setattr("engine.service.logs.configure", lambda: None)  # this process has other tests' logs, too
    (whole / missing).unlink()
    with pytest.raises(AssemblyError) as raised:
        serve(assemble([f"model.path={whole}", "device=cpu"]))
    assert main(["check", "--model", str(whole), "device=cpu"]) == 2
    assert capsys.readouterr().err == f"engine: {raised.value}\n" and missing in str(raised.value)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.0.mlp.gate_proj.bias", (8,), "tensors this architecture does not use"),
        ("model.norm.weight", (7,), "has shape [7], the model expects"),
        ("model.norm.weight", None, "tensors missing from the checkpoint"),
    ],
)
def test_check_refuses_tensors_as_the_engine_does(name, shape, said, whole, capsys):
    tensors = load_file(whole / "model.safetensors")
    tensors.pop(name, None)
    changed = tensors if shape is None else tensors | {name: torch.zeros(shape)}
    save_file(changed, whole / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        build_engine(assemble([f"model.path={whole}", "device=cpu"]))
    assert main(["check", "--model", str(whole), "device=cpu"]) == 2
    assert capsys.readouterr().err == f"engine: {raised.value}\n" and said in str(raised.value)


def test_check_says_what_is_not_read_as_it_seems(whole, capsys):
    (whole / "model.safetensors.index.json").write_text("{}")
    assert main(["check", "--model", str(whole), "device=cpu"]) == 0
    assert capsys.readouterr().err.startswith("note: model.safetensors is read; model.safetensors.index.json beside it")


def test_a_mistake_is_one_message_and_exit_code_2_without_a_traceback():
    done = engine("serve", "+prest=latency", "schedulr=static")
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 3


def test_a_folder_that_is_gone_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "engine: the current folder is gone; change to one that exists\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"engine {__version__}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chekc"], "did you mean 'check'"),
        (["xyz"], "commands: "),
        (["serve", "--prot", "80"], "no such flag --prot; did you mean '--port'"),
        (["plugins", "--jsno"], "did you mean '--json'"),
        (["completion", "tcsh"], "tcsh"),
        (["completion", "bash", "drafter=none"], "unexpected 'drafter=none'"),
        (["top", "http://host:1"], "unexpected 'http://host:1'; did you mean --url http://host:1?"),
        (["config", "drafter=ngrm"], "did you mean 'ngram'"),
        (["config", "--config-dir", "/nowhere"], "no such directory"),
        (["check", "--model", "/nowhere"], "no such directory"),
    ],
)
def test_wrong_words_get_the_nearest_right_one_and_exit_code_2(words, expected, capsys):
    assert main(words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", [*(provider.name for provider in CORE), "bench"])
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"engine {name}" in capsys.readouterr().out


def test_no_words_or_help_lists_every_command(capsys):
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in (*(provider.name for provider in CORE), "bench"))


def test_flags_and_overrides_mix_anywhere(capsys):
    words = ["drafter=none", "--port", "81", "+preset=latency", "--json", "seed=3", "--host=0.0.0.0", "overlap=false"]
    assert main(["config", *words]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["server"]["port"] == 81 and tree["server"]["host"] == "0.0.0.0"
    assert tree["drafter"]["plugin"] == "none" and tree["seed"] == 3 and tree["overlap"] is False


@pytest.mark.parametrize(
    "path", ["a b/c", "it's", "x,y=[z]", "C:\\new", "org/name@v1", "12", "007", "null", "ends\\", "a\\'b", "{x}", ""]
)
def test_a_flags_value_arrives_as_it_was_typed(path, capsys):
    assert main(["config", "--json", "--model", path]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["path"] == path


def test_config_prints_yaml_with_every_slot(capsys):
    assert main(["config", "+preset=throughput"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert set(SLOTS) <= set(tree) and tree["scheduler"]["max_requests"] == 128


def test_plugins_lists_each_with_slot_origin_and_selection(capsys):
    assert main(["plugins", "--json", "drafter=ngram"]) == 0
    listed = json.loads(capsys.readouterr().out)["plugins"]
    assert {row["slot"] for row in listed} == set(SLOTS)
    assert {row["name"] for row in listed if row["slot"] == "drafter" and row["selected"]} == {"ngram"}
    assert all(row["doc"] and row["origin"] for row in listed)


def test_check_prints_the_table(capsys):
    assert main(["check", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert all(slot in text for slot in SLOTS)


def test_serve_hands_the_resolved_plan_to_the_server(model, monkeypatch, capsys):
    import engine.http.server as server

    served: list[EnginePlan] = []
    found: dict[str, CommandProvider] = {}
    transports: list[int] = []

    def serve(plan, finders, beside):
        served.append(plan)
        found.update(finders)
        transports.append(len(beside))
        return 0

    monkeypatch.setattr(server, "serve", serve)
    line = ["serve", "--model", model, "--port", "0", "+preset=baseline", "device=cpu"]
    assert main(line) == main([*line, "server.grpc.listen=0"]) == 0
    assert transports == [0, 1]
    assert served[0].settings.server.port == 0 and served[0].choice("scheduler").name == "static"
    assert "scheduler" in capsys.readouterr().out
    assert found.keys() == {"doctor"} and all(each.finds for each in found.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_script_for_each_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "engine complete --" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("engine se", ["serve"]),
        ("engine serve +pre", ["+preset="]),
        ("engine serve +preset=la", ["+preset=latency"]),
        ("engine serve --po", ["--port"]),
        ("engine serve drafter=n", ["drafter=ngram", "drafter=none"]),
        ("engine check server.po", ["server.port="]),
        ("engine serve drafter.max_m", ["drafter.max_match="]),
        ("engine bench --conc", ["--concurrency"]),
        ("engine bench dra", []),
        ("engine nonsense x", []),
    ],
)
def test_completion_offers_commands_flags_options_and_keys(line, expected):
    assert candidates(line) == expected
