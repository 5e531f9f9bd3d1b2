import json

import pytest

from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config, of_text, served_name


def refused(path):
    with pytest.raises(AssemblyError) as raised:
        model_config(path)
    return raised.value.problems[0]


def test_what_every_checkpoint_states_is_read_whatever_its_family(checkpoint):
    config = model_config(checkpoint(architectures=["AnyForCausalLM", "Other"], bos_token_id=1, any_size=7), "tiny")
    assert (config.name, config.architecture, config.dtype) == ("tiny", "AnyForCausalLM", "bfloat16")
    assert (config.bos_token_id, config.eos_token_ids, config.quantization) == (1, (2,), None)
    assert config.raw["any_size"] == 7


def test_a_config_without_any_size_is_one_for_the_architecture_to_judge(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["AnyForCausalLM"]}')
    config = model_config(str(tmp_path))
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float32", None, ())


@pytest.mark.parametrize("spelling", [{"dtype": "float16"}, {"torch_dtype": "torch.float16"}])
def test_old_and_new_spellings_of_dtype_mean_the_same(spelling, checkpoint):
    assert model_config(checkpoint(**{"torch_dtype": None} | spelling)).dtype == "float16"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantization_has_two_names(key, checkpoint):
    assert model_config(checkpoint(**{key: {"quant_method": "gptq"}})).quantization == {"quant_method": "gptq"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": []}, "config.json has no 'architectures'"),
        ({"architectures": "AnyForCausalLM"}, "architectures='AnyForCausalLM': expected a list of at most 1024 names"),
        ({"torch_dtype": "float8"}, "dtype 'float8': expected one of float32, bfloat16, float16"),
        ({"quantization_config": "awq"}, "quantization_config 'awq': expected an object"),
        ({"eos_token_id": -1}, "eos_token_id=-1: expected whole numbers from 0"),
        ({"bos_token_id": "1"}, "bos_token_id='1': expected whole numbers from 0"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_was_expected(changes, words, checkpoint):
    path = checkpoint(**changes)
    assert refused(path).startswith(f"model.path={path}: {words}")


def adapter(folder, **said):
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "tiny-q4.gguf", "a model in GGUF, which is not read: set"),
        (lambda folder: (folder / "tiny-q4.gguf").write_bytes(b"GGUF") and folder, "a model in GGUF, which is"),
        (
            lambda folder: adapter(folder, base_model_name_or_path="org/base"),
            "a LoRA adapter of org/base, not a model: merge it into its model",
        ),
        (lambda folder: adapter(folder), "a LoRA adapter, not a model: merge it into its model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x") and folder / "model.safetensors", "a file; "),
        (lambda folder: folder, "/"),
    ],
)
def test_a_path_that_is_no_model_says_what_it_is(make, words, tmp_path):
    path = make(tmp_path)
    assert refused(str(path)).startswith(f"model.path={path}: {words}")


@pytest.mark.parametrize("path", ["models/tiny.gguf", "tiny.gguf"])
def test_a_relative_path_of_another_format_is_no_hub_id(path):
    assert refused(path).startswith(f"model.path={path}: a model in GGUF")


@pytest.mark.parametrize(("whole", "key"), [("dtype", "torch_dtype"), ("torch_dtype", "dtype")])
def test_what_both_parts_say_counts_as_the_part_for_text_has_it(whole, key, checkpoint):
    part = {key: "float16", "bos_token_id": None, "hidden_size": 32}
    config = model_config(checkpoint(**{"torch_dtype": None, whole: "bfloat16", "bos_token_id": 1}))
    text = of_text(config, part)
    assert (text.dtype, text.bos_token_id, text.raw) == ("float16", 1, part)
    assert (text.path, text.name, text.architecture) == (config.path, config.name, config.architecture)


@pytest.mark.parametrize(("stated", "ends"), [(2, (9, 2, 7)), (None, (9, 7))])
def test_a_text_ends_with_the_tokens_of_every_part_and_file(stated, ends, checkpoint):
    config = model_config(checkpoint({"eos_token_id": [7]}, eos_token_id=stated))
    assert of_text(config, {"eos_token_id": 9}).eos_token_ids == ends


def test_end_tokens_come_from_both_files_once(checkpoint):
    assert model_config(checkpoint({"eos_token_id": [7, 2]}, eos_token_id=[2, 3])).eos_token_ids == (2, 3, 7)
    assert model_config(checkpoint({}, eos_token_id=None)).eos_token_ids == ()


def test_code_in_a_checkpoint_is_never_run(checkpoint, tmp_path):
    path = checkpoint(auto_map={"AutoConfig": "evil.Config"})
    (tmp_path / "checkpoint" / "evil.py").write_text("raise SystemExit('ran')")
    assert model_config(path).architecture == "LlamaForCausalLM"


def test_a_hub_id_is_found_in_the_local_cache(tmp_path, monkeypatch, checkpoint):
    folder = tmp_path / "hub" / "models--org--tiny"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    with open(checkpoint() + "/config.json") as source:
        (snapshot / "config.json").write_text(source.read())
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "hf download org/tiny" in refused("org/tiny"), "a snapshot without weights is not complete"
    (snapshot / "model.safetensors").write_text("")
    facts = model_config("org/tiny")
    assert (facts.path, facts.name) == (str(snapshot), "org/tiny")
    assert model_config("org/tiny@abc").path == str(snapshot)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nope", "nope", "a/b/c"])
def test_a_path_that_is_nothing_says_what_was_expected(path):
    assert "expected 'bundled', a directory, or a hub id" in refused(path)


def test_a_folder_without_a_config_and_a_config_that_is_no_json(tmp_path):
    assert "no config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot read config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refused(str(tmp_path))


def test_served_names(tmp_path):
    assert served_name("bundled") == "bundled"
    assert served_name("org/name@rev") == "org/name"
    assert served_name(str(tmp_path)) == tmp_path.name
