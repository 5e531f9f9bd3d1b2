"""Quality, by the command that measures it."""

import asyncio

import pytest
from tests.lab.sweep.test_report import options

from engine_lab.sweep.quality import QualityError, loss_of
from engine_lab.sweep.record import Candidate


def test_what_engine_eval_refuses_is_said_in_its_words(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(QualityError, match=r"empty\.txt"):
        asyncio.run(loss_of(Candidate(0, "", ("device=cpu",)), options("--quality-text", str(empty))))


@pytest.mark.slow
def test_rounded_weights_lose_a_little_and_those_of_the_checkpoint_nothing():
    for word, most in (("quantizer=checkpoint", 0.0), ("quantizer=int4", 0.5)):
        found, source = asyncio.run(loss_of(Candidate(0, "", ("device=cpu", word)), options()))
        assert 0.0 <= found <= most and "4,096 tokens" in source
