"""``engine eval`` on the command line, before anything is loaded."""

from engine.cli.complete import candidates
from engine.cli.main import main


def test_flags_and_overrides_complete():
    assert "eval" in candidates("engine e")
    assert candidates("engine eval --max-") == ["--max-perplexity-increase", "--max-kl", "--max-slowdown"]
    assert "quantizer=int4" in candidates("engine eval quantizer=i")


def test_several_engines_are_refused_before_anything_is_loaded(capsys, tmp_path):
    (tmp_path / "asked").write_text("What is a list?\n")
    for flags in ([], ["--capacity-only"], ["--drafter", "drafter=ngram", "--prompts", str(tmp_path / "asked")]):
        assert main(["eval", "--model", "bundled", "device=cpu", "fleet.replicas=2", *flags]) == 2, flags
        assert "fleet.replicas=2: here is one engine" in capsys.readouterr().err


def test_help_groups_the_flags(capsys):
    assert main(["eval", "--help"]) == 0
    shown = capsys.readouterr().out
    for group in ("what is compared", "on what", "tolerances", "capacity", "drafters", "overrides"):
        assert group in shown
