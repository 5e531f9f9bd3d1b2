"""``tools/train_drafter`` teaches what it says: the chain that a server computes, the format, a run that goes on."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.kernels import tiny  # noqa: E402
from tests.plugins.drafter import test_parallel_block as block  # noqa: E402
from tools.train_drafter import chains, draft_model, eagle3, parallel_block  # noqa: E402
from tools.train_drafter.__main__ import main as train_drafter  # noqa: E402
from tools.train_drafter.acceptance import Counts  # noqa: E402
from tools.train_drafter.answers import Answered, answer, read_answers, read_prompts  # noqa: E402
from tools.train_drafter.draft_model import DraftModel, DraftModelSizes  # noqa: E402
from tools.train_drafter.eagle3 import Eagle3, Eagle3Sizes  # noqa: E402
from tools.train_drafter.features import Features  # noqa: E402
from tools.train_drafter.loop import Recipe, Trainer  # noqa: E402
from tools.train_drafter.parallel_block import BlockSizes, ParallelBlock  # noqa: E402
from tools.train_drafter.prompts import BUNDLED, PHRASINGS, Prompts, is_held_out  # noqa: E402
from tools.train_drafter.target import Target  # noqa: E402
from tools.train_drafter.train import default_aux_layers, gated_size  # noqa: E402

from engine.contracts.graph import Builder  # noqa: E402
from engine.contracts.ops import LinearPart  # noqa: E402
from engine_plugins.drafter.parallel_block import read_facts as read_block_facts  # noqa: E402

AUX_LAYERS = (1, 2, 3)
STEPS = 4
HEADS, KV_HEADS, DIM = 4, 2, 8
HEAD_FLAGS = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--intermediate", "48"]


def some_answers(count=24, seed=0):
    """Sequences that a drafter can learn: runs through the vocabulary from a random start."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for number in range(count):
        length = 8 + number % 5
        start = int(torch.randint(0, 40, (1,), generator=generator))
        tokens = tuple((start + 3 * i) % 120 for i in range(length))
        answers.append(Answered(tokens, 2 + number % 3, "runs" if number % 2 else "others"))
    return answers


def write_answers(file, answers):
    lines = [{"tokens": a.tokens, "prompt_len": a.prompt_len, "group": a.group} for a in answers]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(scope="module")
def target(folder):
    return Target(str(folder), "cpu", "float32")


def features_of(target, aux_layers=AUX_LAYERS, answers=None, folder=None):
    return Features(target, answers or some_answers(), aux_layers, batch_tokens=64, choices=16, folder=folder)


def sizes_of(hidden, heads, kv_heads, head_dim, intermediate, theta=10000.0):
    """What every kind of drafter for the tiny target has."""
    return {
        "hidden_size": hidden,
        "vocab_size": 120,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "max_position_embeddings": 256,
    }


def new_head(target, draft_vocab=None, **norms):
    torch.manual_seed(3)
    ids = torch.arange(120) if draft_vocab is None else draft_vocab
    shared = sizes_of(64, HEADS, KV_HEADS, DIM, 48)
    sizes = Eagle3Sizes(**shared, draft_vocab_size=len(ids), aux_layers=AUX_LAYERS, **norms)
    head = Eagle3(sizes, ids, target.embedding().clone())
    with torch.no_grad():  # norms that do something
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return head


def new_block_head(target):
    """As in the test of the server's drafter, which computes it from the format's description."""
    shared = sizes_of(64, block.HEADS, block.KV_HEADS, block.DIM, block.MLP, block.THETA) | {"rms_norm_eps": block.EPS}
    sizes = BlockSizes(
        **shared,
        draft_vocab_size=50,
        num_hidden_layers=block.LAYERS,
        block_size=6,
        mask_token=block.MASK,
        aux_layers=(1, 3),
    )
    tensors = block.head_tensors(50)
    head = ParallelBlock(sizes, tensors["d2t"] + torch.arange(50), target.embedding().clone())
    head.load_state_dict(tensors, strict=False)
    return head


def trained(kind, target, folder, steps, resume=False, stop_at=None):
    """A trainer after its run; ``stop_at``: a run of ``steps`` is cut off there."""
    features = features_of(target, (1, 3) if kind == "parallel_block" else AUX_LAYERS)
    if kind == "parallel_block":
        head = new_block_head(target)
        module, loss = head, lambda batch: chains.chain_loss(head, batch, parallel_block.filled(head, batch))
    elif kind == "eagle3":
        head = new_head(target)
        module, loss = head, lambda batch: chains.chain_loss(head, batch, eagle3.unrolled(head, batch, STEPS))
    else:
        torch.manual_seed(3)
        model = DraftModel(DraftModelSizes(**sizes_of(32, 2, 1, 16, 48), num_hidden_layers=1))
        module, loss = model, lambda batch: draft_model.distillation_loss(model, batch)
    if stop_at is not None:
        loss = dying(loss, stop_at)
    trainer = Trainer(module, loss, features, Recipe(1e-2, 2, steps, None, 1.0, 0), folder)
    if resume:
        assert trainer.resume()
    if stop_at is None:
        trainer.run(save_every=1000)
        return trainer
    with pytest.raises(KeyboardInterrupt):
        trainer.run(save_every=1)
    return trainer


def dying(loss, steps):
    """A loss after which the process is gone, in the middle of the step after so many."""
    taken = []

    def loss_or_death(batch):
        if len(taken) == steps:
            raise KeyboardInterrupt
        taken.append(batch)
        return loss(batch)

    return loss_or_death


@pytest.mark.parametrize("kind", ["eagle3", "parallel_block", "draft_model"])
def test_a_few_steps_lower_the_loss(kind, target, tmp_path):
    losses = trained(kind, target, tmp_path, steps=40).losses
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("kind", ["eagle3", "parallel_block", "draft_model"])
def test_a_run_that_died_goes_on_as_if_it_had_not(kind, target, tmp_path):
    whole = trained(kind, target, tmp_path / "whole", steps=9)
    trained(kind, target, tmp_path / "cut", steps=9, stop_at=7)
    resumed = trained(kind, target, tmp_path / "cut", steps=9, resume=True)
    assert len(resumed.losses) == 2 and resumed.losses == whole.losses[7:]
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name


def test_a_checkpoint_of_other_sizes_is_refused(target, tmp_path):
    trained("eagle3", target, tmp_path, steps=1)
    other = new_head(target, torch.arange(50))
    trainer = Trainer(other, lambda batch: None, features_of(target), Recipe(1e-3, 0, 2, None, 1.0, 0), tmp_path)
    with pytest.raises(ValueError, match="another run"):
        trainer.resume()


# The chain, as the paper and a server have it, one token at a time ------------------------------------------------


class PlainChain:
    """An EAGLE3 head in float32 for one sequence: lists of keys and values, and nothing batched."""

    def __init__(self, head, embedding):
        self.w = {name: tensor.detach() for name, tensor in head.state_dict().items()}
        self.embedding = embedding
        self.keys, self.values = [], []

    def norm(self, x, name):
        return x / (x.pow(2).mean() + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, x, position):
        """Pairs ``(i, i + dim / 2)`` of each head turned by ``position * theta ** (-2i / dim)``."""
        half = DIM // 2
        angle = position * torch.tensor([10000.0 ** (-2 * i / DIM) for i in range(half)])
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat((turned.real, turned.imag), dim=1)

    def fuse(self, aux_layers):
        if "fc_norm.0.weight" in self.w:
            parts = aux_layers.chunk(3)
            aux_layers = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.w["fc.weight"] @ aux_layers

    def step(self, token, hidden, position):
        """The layer's output for one pair, after its key has joined the others."""
        layer = "midlayer.self_attn"
        x = torch.cat(
            (self.norm(self.embedding[token], "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm"))
        )
        q, k, v = ((self.w[f"{layer}.{p}_proj.weight"] @ x).view(-1, DIM) for p in "qkv")
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        q = self.rotated(q, position)
        outputs = []
        for i in range(HEADS):
            kv = i // (HEADS // KV_HEADS)
            scores = torch.stack([q[i] @ key[kv] for key in self.keys]) / math.sqrt(DIM)
            outputs.append(scores.softmax(0) @ torch.stack([value[kv] for value in self.values]))
        hidden = hidden + self.w[f"{layer}.o_proj.weight"] @ torch.cat(outputs)
        y = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (self.w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + down @ (torch.nn.functional.silu(gate @ y) * (up @ y))

    def logits(self, hidden):
        return self.w["lm_head.weight"] @ self.norm(hidden, "norm")


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle 3.1"])
def test_the_training_time_test_computes_what_a_server_does_step_by_step(norms, target):
    head, features = new_head(target, **norms), features_of(target)
    batch = features[len(features) - 1]
    found = eagle3.unrolled(head, batch, STEPS)
    embedding, checked = target.embedding(), 0
    for row, a in batch.real.nonzero().tolist():
        start, ids = int(batch.starts[row, a]), batch.ids[row].tolist()
        chain = PlainChain(head, embedding)
        for position in range(start + 1):
            fused = chain.fuse(batch.aux_layers[row, position].float())
            hidden = chain.step(ids[position + 1], fused, position)
        for step in range(STEPS):
            if not bool(chains.judged(batch, step)[row, a]):
                break
            if step:
                handed = chain.norm(hidden, "norm") if norms else hidden
                hidden = chain.step(ids[start + 1 + step], handed, start + step)
            torch.testing.assert_close(found[step][row, a], chain.logits(hidden), rtol=2e-4, atol=2e-4)
            checked += 1
    assert checked > 20


@torch.no_grad()
def test_blocks_are_filled_in_training_as_in_the_formats_description(target, folder):
    head, features = new_block_head(target), features_of(target, (1, 3))
    described = block.Described(block.head_tensors(50), block.LlamaForCausalLM.from_pretrained(folder).eval())
    batch = features[len(features) - 1]
    found, checked = torch.stack(parallel_block.filled(head, batch)), 0
    for row, a in batch.real.nonzero().tolist():
        known = batch.ids[row, : int(batch.starts[row, a]) + 2].tolist()
        drafts = head.draft_vocab[found[:, row, a].argmax(dim=-1)]
        assert drafts.tolist() == described.drafts(known, 5).tolist()
        checked += 1
    assert checked > 5


def test_each_step_is_judged_by_what_the_target_says_after_the_token_it_read(target):
    """A head that says what the target says is right everywhere, and nowhere when it says it one position late."""
    head, features = new_head(target), features_of(target)
    batch = features[0]
    seen = target.see([row[: int(n)] for row, n in zip(batch.ids.tolist(), lengths(batch), strict=True)], ())
    said = target.likeliest(seen.residual.flatten(0, 1), 1)[0].view(batch.ids.shape)
    rows, last = torch.arange(len(said))[:, None], said.shape[1] - 1

    def logits(step, late):
        where = (batch.starts + 1 + step + late).clamp(max=last)
        return torch.nn.functional.one_hot(said[rows, where], 120).float()

    right, where = chains.matches(head, batch, [logits(step, 0) for step in range(STEPS)])
    assert where.any() and right[where].all()
    late, _ = chains.matches(head, batch, [logits(step, 1) for step in range(STEPS)])
    assert late[where].float().mean() < 0.5


def lengths(batch):
    """Tokens of each row: the answer's last one is after the last real start."""
    return (batch.starts * batch.real).amax(dim=1) + 2


def test_no_step_learns_from_what_follows_the_token_it_predicts(target):
    """The last token of an answer changes nothing but the steps that read it."""
    head, features = new_head(target), features_of(target)
    batch = features[0]
    before = eagle3.unrolled(head, batch, STEPS)
    for row, length in enumerate(lengths(batch).tolist()):
        batch.ids[row, length - 1] = (batch.ids[row, length - 1] + 7) % 120
    after = eagle3.unrolled(head, batch, STEPS)
    for step in range(STEPS):
        where = chains.judged(batch, step)
        assert where.any() and torch.equal(before[step][where], after[step][where])


def test_a_draft_model_with_the_targets_weights_is_always_right(tmp_path):
    folder = tiny.write(tmp_path, tied_weights(), head_dim=16, tie_word_embeddings=True)
    same = Target(str(folder), "cpu", "float32")
    model = DraftModel(DraftModelSizes(**sizes_of(64, 4, 2, 16, 96), num_hidden_layers=3))
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tied_weights().items()})
    features = features_of(same, ())
    for number in range(len(features)):
        right, where = draft_model.matches(model, features[number], STEPS)
        assert right[where].all()


def tied_weights():
    return {name: tensor for name, tensor in tiny.weights().items() if name != "lm_head.weight"}


# Files --------------------------------------------------------------------------------------------------------------


def run(kind, folder, tmp_path, *more):
    answers = write_answers(tmp_path / "answers.jsonl", some_answers())
    held_out = write_answers(tmp_path / "held-out.jsonl", some_answers(6, seed=1))
    paths = ["--answers", str(answers), "--held-out", str(held_out), "--work", str(tmp_path / "work")]
    words = [kind, str(folder), *paths, "--out", str(tmp_path / "out"), "--device", "cpu", "--batch-tokens", "64"]
    return train_drafter([*words, "--ttt-steps", "3", *more] if kind == "eagle3" else [*words, *more])


def test_the_exported_head_has_the_tensors_of_the_format(folder, tmp_path):
    assert run("eagle3", folder, tmp_path, "--steps", "2", "--draft-vocab", "30", *HEAD_FLAGS) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "midlayer.self_attn"
    shapes = {
        "fc.weight": [64, 192],
        "midlayer.hidden_norm.weight": [64],
        "midlayer.input_layernorm.weight": [64],
        "midlayer.post_attention_layernorm.weight": [64],
        f"{layer}.q_proj.weight": [32, 128],
        f"{layer}.k_proj.weight": [16, 128],
        f"{layer}.v_proj.weight": [16, 128],
        f"{layer}.o_proj.weight": [64, 32],
        "midlayer.mlp.gate_proj.weight": [48, 64],
        "midlayer.mlp.up_proj.weight": [48, 64],
        "midlayer.mlp.down_proj.weight": [64, 48],
        "norm.weight": [64],
        "lm_head.weight": [30, 64],
        "d2t": [30],
        "t2d": [120],
    }
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == shapes
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.bfloat16}


def test_draft_ids_stand_for_the_tokens_that_are_most_frequent_in_answers(folder, tmp_path):
    assert run("eagle3", folder, tmp_path, "--steps", "1", "--draft-vocab", "30", *HEAD_FLAGS) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    meant = tensors["d2t"] + torch.arange(30)
    assert meant.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    own = [token for a in some_answers() for token in a.tokens[a.prompt_len :]]
    counts = torch.bincount(torch.tensor(own), minlength=120)
    left_out = [token for token in range(120) if token not in meant.tolist()]
    assert counts[meant].min() >= counts[left_out].max()


def test_the_config_names_the_layers_of_the_aux_hidden_states(folder, tmp_path):
    assert run("eagle3", folder, tmp_path, "--steps", "1", "--aux-layers", "1", "2", "3", *HEAD_FLAGS) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    expected = {"hidden_size": 64, "vocab_size": 120, "num_attention_heads": 4, "num_key_value_heads": 2}
    expected |= {
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    assert {key: config[key] for key in expected} == expected


def test_the_exported_block_head_is_one_that_the_engine_reads(folder, target, tmp_path):
    flags = ["--layers", "2", "--mask-token", "119", "--block-size", "6", "--aux-layers", "1", "3"]
    flags += ["--draft-vocab", "30"]
    assert run("parallel_block", folder, tmp_path, "--steps", "2", *flags, *HEAD_FLAGS) == 0
    facts = read_block_facts(str(tmp_path / "out"), target.facts)
    assert (facts.aux_layers, facts.block_size, facts.mask_token, facts.draft_vocab) == ((1, 3), 6, 119, 30)
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == set(block.head_tensors(30)) | {"t2d"}


def test_the_exported_draft_model_is_one_that_the_engine_loads(folder, tmp_path):
    flags = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
    assert run("draft_model", folder, tmp_path, "--steps", "2", *flags) == 0
    loaded = Target(str(tmp_path / "out"), "cpu", "float32")
    model = DraftModel(DraftModelSizes(**sizes_of(32, 2, 1, 16, 96), num_hidden_layers=2))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})
    ids = torch.randint(0, 120, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model.hidden(ids)[0] @ model.embed_tokens.weight.T
    residual = loaded.see(ids.tolist(), ()).residual[0]
    chosen, probabilities = loaded.likeliest(residual, 120)
    torch.testing.assert_close(ours.softmax(-1).gather(1, chosen), probabilities, rtol=1e-3, atol=1e-5)


def test_a_run_in_pieces_ends_with_the_same_file_as_one_in_one_piece(folder, tmp_path):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.mkdir(), pieces.mkdir()
    flags = ["--steps", "5", *HEAD_FLAGS]
    assert run("eagle3", folder, whole, *flags) == 0
    for _ in range(3):  # a piece is one step: its time is over when that has been taken
        assert run("eagle3", folder, pieces, *flags, "--resume", "--stop-after", "1e-9") == 0
    assert not (pieces / "out/model.safetensors").exists()
    assert run("eagle3", folder, pieces, *flags, "--resume") == 0
    assert (whole / "out/model.safetensors").read_bytes() == (pieces / "out/model.safetensors").read_bytes()


def test_features_of_other_answers_are_not_mixed_up(target, tmp_path):
    features_of(target, folder=tmp_path)[0]
    with pytest.raises(ValueError, match="other tokens"):
        features_of(target, answers=some_answers(7), folder=tmp_path)


@pytest.mark.parametrize("order", [((), AUX_LAYERS, (0, 1, 2)), (AUX_LAYERS, (), (0, 1, 2))])
def test_drafters_with_other_taps_share_a_folder(target, tmp_path, order):
    for aux_layers in order:
        kept = features_of(target, aux_layers, folder=tmp_path)[0]
        computed = features_of(target, aux_layers)[0]
        assert torch.equal(kept.choices, computed.choices)
        assert not aux_layers or torch.equal(kept.aux_layers, computed.aux_layers)


def test_kept_features_are_those_that_were_computed(target, tmp_path):
    first = features_of(target, folder=tmp_path)[1]
    again = features_of(target, folder=tmp_path)[1]
    for name in ("ids", "starts", "real", "aux_layers", "choices", "probabilities"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name


# What is asked and what is counted ------------------------------------------------------------------------------------


def test_a_step_ends_with_the_first_rejected_draft():
    counts = Counts(steps=2)
    right = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
    where = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    counts.add(right, where)
    # Step 1 at 0: one is accepted, the second rejected. Step 2 at 2: both are accepted; nothing is left.
    assert (counts.tried, counts.right, counts.decode_steps) == ([2, 2], [2, 1], 2)
    assert counts.by_position == [1.0, 0.5] and counts.tokens == 4


def test_every_draft_of_a_block_may_be_accepted():
    counts = Counts(steps=2)
    counts.add(torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool))
    assert counts.right == counts.tried == [2, 2] and counts.tokens_per_step == 3.0


@pytest.mark.parametrize("block_size", [2, 6, 10])
def test_acceptance_is_counted_for_as_many_drafts_as_a_block_has(block_size, folder, tmp_path, monkeypatch):
    """Also where all of them are accepted."""

    def right(head, batch, logits):
        matches = torch.ones(len(logits), *batch.real.shape, dtype=torch.bool)
        return matches, torch.stack([chains.judged(batch, step) for step in range(len(logits))])

    monkeypatch.setattr(chains, "matches", right)
    flags = ["--layers", "1", "--mask-token", "119", "--block-size", str(block_size), *HEAD_FLAGS]
    assert run("parallel_block", folder, tmp_path, "--steps", "1", *flags) == 0
    header = (tmp_path / "out" / "MODEL_CARD.md").read_text().split("| prompts |")[1].splitlines()[0]
    assert header.count("|") == block_size


def test_taps_are_where_eagle3_has_them_or_else_distinct():
    assert default_aux_layers(32) == (2, 16, 29)
    for layers in range(3, 12):
        aux_layers = default_aux_layers(layers)
        assert len(set(aux_layers)) == 3 and list(aux_layers) == sorted(aux_layers)
        assert aux_layers[0] >= 1 and aux_layers[-1] <= layers


def test_the_size_of_gated_layers_is_the_targets_or_asked_for():
    def graph(with_gate):
        b = Builder()
        x = b.embed("embed", 10, 8)
        with b.layer(x):
            gate, up = b.linear(x, LinearPart("gate", 24), LinearPart("up", 24))
            wide = b.gated(gate, up, "silu") if with_gate else b.activation(up, "relu")
            x = b.add(x, b.linear(wide, LinearPart("down", 8)))
        b.lm_head(x, "head", 10)
        return b.graph()

    assert gated_size(graph(True)) == 24
    with pytest.raises(ValueError, match="--intermediate is needed"):
        gated_size(graph(False))


def test_a_guess_is_accepted_as_far_as_the_target_says_the_same(tmp_path):
    text = "<|begin|><|user|>What does json.dumps do?<|end|><|assistant|>"
    lines = [{"prompt": text}, {"prompt": text, "guess": "Serialize ``obj`` to a JSON formatted bicycle, which is"}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer("bundled", read_prompts(prompts, 24, 0.0), out, device="cpu")
    generated, guessed = read_answers(out)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert guessed.tokens == generated.tokens[: len(guessed.tokens)]
    said = tokenizer.decode(list(guessed.tokens[guessed.prompt_len :]))
    assert said.startswith("Serialize ``obj`` to a JSON formatted ") and "bicycle" not in said


def test_no_question_of_the_training_set_is_about_a_held_out_entry():
    prompts = Prompts(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), seed=0)
    held_out = [name for name in prompts.answers if is_held_out(name)]
    spelled = (spelling for name in held_out for spelling in (name, f"`{name}`", f"{name}()"))
    forbidden = {words.format(name=name) for name in spelled for words in PHRASINGS}
    lines = prompts.training(times=1, made_up=500, sampled=200, conversations=100, source=0)
    asked = {question for line in lines for question in re.findall(r"<\|user\|>(.*?)<\|end\|>", line["prompt"])}
    assert len(held_out) > 200 and len(asked) > 2000 and not asked & forbidden
