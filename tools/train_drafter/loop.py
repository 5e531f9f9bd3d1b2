"""The training loop of every drafter: AdamW on shuffled batches, checkpoints, a budget in steps or minutes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tools.train_drafter.features import Batch, Features, shuffled
from torch import Tensor, nn

FINAL_RATE_SHARE = 0.02
"""Of the peak learning rate, at the very end."""
REPORT_EVERY = 50
Loss = Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast. The learning rate warms up linearly, then follows a cosine to the end of the budget, in
    steps or minutes of training, whichever is used up first."""

    learning_rate: float
    warmup_steps: int
    steps: int | None
    minutes: float | None
    clip: float
    """Largest norm of the gradient."""
    seed: int

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("give a budget: --steps, --minutes or both")


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0
    number: int = 0
    """Of the pass."""
    taken: int = 0
    """Batches of it."""
    tokens: int = 0
    """Of all batches, padding included."""
    seconds: float = 0.0
    """Spent in steps, features included."""

    def done(self, recipe: Recipe) -> float:
        """0 to 1, and beyond when a step took longer than was left."""
        by_steps = 0.0 if recipe.steps is None else self.step / recipe.steps
        by_minutes = 0.0 if recipe.minutes is None else self.seconds / (60 * recipe.minutes)
        return max(by_steps, by_minutes)


class Trainer:
    """A module, its optimizer and where in the seeded sequence of batches the run is."""

    def __init__(self, module: nn.Module, loss: Loss, features: Features, recipe: Recipe, folder: Path) -> None:
        """``folder``: of ``checkpoint.pt``, from which a run goes on."""
        self.module = module
        self.progress = Progress()
        self.losses: list[float] = []
        """Of the steps since the start of this process."""
        self._loss = loss
        self._features = features
        self._recipe = recipe
        self._file = folder / "checkpoint.pt"
        self._optimizer = torch.optim.AdamW(
            module.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Go on from ``checkpoint.pt``; False: there is none. Raises ``ValueError`` for one of other sizes."""
        if not self._file.exists():
            return False
        state = torch.load(self._file, map_location="cpu", weights_only=True)
        try:
            self.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise ValueError(
                f"{self._file} is of another run: {error}; take another --work or drop --resume"
            ) from error
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True

    def save(self) -> None:
        """Tensors and plain numbers, replaced at once."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, self._file.with_suffix(".tmp"))
        os.replace(self._file.with_suffix(".tmp"), self._file)

    @property
    def finished(self) -> bool:
        return self.progress.done(self._recipe) >= 1.0

    def run(self, save_every: int, stop_after_s: float = math.inf) -> bool:
        """Train to the end of the budget, or for about ``stop_after_s`` seconds, a step at least. Returns whether
        it is the end; the state is saved either way, and every ``save_every`` steps."""
        started, since = time.monotonic(), len(self.losses)
        order = shuffled(len(self._features), self._recipe.seed, self.progress.number)
        while not self.finished:
            tick = time.monotonic()
            batch = self._features[order[self.progress.taken]]
            self.losses.append(self._step(batch))
            self.progress.step += 1
            self.progress.taken += 1
            self.progress.tokens += batch.ids.numel()
            self.progress.seconds += time.monotonic() - tick
            if self.progress.taken == len(order):
                self.progress.number, self.progress.taken = self.progress.number + 1, 0
                order = shuffled(len(self._features), self._recipe.seed, self.progress.number)
            if self.progress.step % REPORT_EVERY == 0:
                self._report(self.losses[since:])
                since = len(self.losses)
            if self.progress.step % save_every == 0:
                self.save()
            if time.monotonic() - started >= stop_after_s:
                break
        self.save()
        return self.finished

    def _step(self, batch: Batch) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.module.parameters(), self._recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _rate(self) -> float:
        warm = min(1.0, (self.progress.step + 1) / max(1, self._recipe.warmup_steps))
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress.done(self._recipe))))
        return self._recipe.learning_rate * warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * decay)

    def _report(self, losses: list[float]) -> None:
        progress = self.progress
        print(
            f"step {progress.step} pass {progress.number} loss {sum(losses) / len(losses):.3f} "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s {progress.seconds / 60:.1f} min "
            f"done {progress.done(self._recipe):.1%}",
            flush=True,
        )
