import pytest

from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config, served_name

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def refused(path):
    with pytest.raises(AssemblyError) as raised:
        model_config(path)
    return raised.value.problems[0]


def test_plain_llama(checkpoint):
    facts = model_config(checkpoint(), "tiny")
    assert (facts.name, facts.architecture, facts.head_dim, facts.num_kv_heads) == ("tiny", "LlamaForCausalLM", 16, 2)
    assert facts.rope.kind == "default" and facts.rope.theta == 10000.0 and facts.rope.rotary_dim is None
    assert facts.layer_windows == (None,) * 4
    assert facts.dtype == "bfloat16" and facts.max_position == 512 and facts.eos_token_ids == (2,)


def test_missing_head_counts_have_their_usual_defaults(checkpoint):
    assert model_config(checkpoint(num_key_value_heads=None)).num_kv_heads == 4
    assert model_config(checkpoint(head_dim=32)).head_dim == 32
    assert model_config(checkpoint(head_dim=None)).head_dim == 16


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_spellings_of_rope_mean_the_same(spelling, checkpoint):
    facts = model_config(checkpoint(**spelling))
    assert (facts.rope.kind, facts.rope.theta, dict(facts.rope.params)) == ("linear", 5e5, {"factor": 4.0})
    assert facts.max_position == 2048


@pytest.mark.parametrize(
    ("params", "reach"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 512),
        ({"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 512),
    ],
)
def test_every_scaled_kind_says_how_far_it_reaches_and_keeps_its_numbers(params, reach, checkpoint):
    facts = model_config(checkpoint(rope_scaling=params, original_max_position_embeddings=None))
    assert facts.max_position == reach
    assert facts.rope.kind == {"su": "longrope"}.get(params.get("type"), params.get("rope_type", "longrope"))
    for key, value in params.items():
        if key not in ("type", "rope_type"):
            assert facts.rope.params[key] == value
    assert facts.rope.params["original_max_position_embeddings"] == params.get("original_max_position_embeddings", 512)


def test_partial_rotation(checkpoint):
    assert model_config(checkpoint(partial_rotary_factor=0.5)).rope.rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "float8"}, "float8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_cannot_be_read_is_named(changes, words, checkpoint):
    assert words in refused(checkpoint(**changes))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, (100,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 512}, (None,) * 4),
        ({"model_type": "llama", "sliding_window": 100}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 100}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 100),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            (100, None, None, 100),
        ),
    ],
)
def test_attention_windows_follow_the_familys_rule(changes, windows, checkpoint):
    facts = model_config(checkpoint(**changes))
    assert facts.layer_windows == windows
    assert facts.sliding_window == next((window for window in windows if window), None)


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
