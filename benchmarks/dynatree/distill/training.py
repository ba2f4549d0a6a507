"""Trains a student on labels: the Kullback-Leibler divergence from the target at each position.

The output layer over the whole vocabulary would be most of the work. So the student's logits are computed for the
tokens that are among the target's likeliest anywhere in the batch, and for random others, which stand for the rest:

    log Z = logsumexp over the likely tokens and over the m of r others, each plus log(r / m)
    loss  = sum over the target's top tokens i of p_i log(p_i / q_i) + p_rest log(p_rest / q_rest)

with p of the target, q = exp(logit) / Z of the student, and one bucket for all tokens outside a position's top tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from dynatree.common.seeds import derived_seed
from dynatree.distill.labels import SEQUENCES, Labels
from dynatree.distill.texts import LENGTH

BATCH = 4  # sequences of a step
OTHERS = 1024  # random tokens that stand for the unlikely ones
# Highest learning rate, and its product with the width of wide models, near to that of published pre-trainings. After
# 60 steps on SmolLM2-135M, 576 wide, a draft of 4 layers agreed on 0.234 of held-back text at 1e-3, and 0.252 at 2e-3.
RATE, RATE_WIDTH = 2e-3, 1.2
WARM_UP = 0.03  # share of the time
_LEAST = 1e-6  # of a probability of the rest
_ROWS = 1024  # rows whose logits over the whole vocabulary are in memory at once


@dataclass
class Position:
    """How far a training is.

    Attributes:
        steps: Optimizer steps.
        files: Files of labels.
        seconds: Seconds of the training.
        labelling: Those of them in which the target worked.
    """

    steps: int = 0
    files: int = 0
    seconds: float = 0.0
    labelling: float = 0.0


class Training:
    """A student, its optimizer and its position.

    Args:
        student: The model to train; parameters that need no gradient stay as they are.
        seconds: Seconds of the whole training, over which the learning rate rises and falls.
        seed: Seed; the batch of a step depends on it, on the step and on the number of files.
        path_of: The path of a file of labels, by its number.
        dtype: Data type of the multiplications.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        seconds: float,
        seed: int,
        path_of: Callable[[int], Path],
        dtype: torch.dtype,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.student = student
        self.position = Position()
        self.seconds = seconds
        self._seed = seed
        self._path_of = path_of
        self._dtype = dtype
        self._trained = {name: each for name, each in student.named_parameters() if each.requires_grad}
        self._rate = min(RATE, RATE_WIDTH / student.config.get_text_config().hidden_size)
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start the clock; the seconds before do not count."""
        self._before = self._clock()

    def tick(self) -> float:
        """Add the seconds since the last call to the position, and return them."""
        now = self._clock()
        passed, self._before = now - self._before, now
        self.position.seconds += passed
        return passed

    def step(self) -> float:
        """Train on one batch; return its loss in nats a token."""
        generator = self._generator(self.position.steps)
        picks = torch.randint(self.position.files * SEQUENCES, (BATCH,), generator=generator).tolist()
        batch = Labels.join(
            [Labels.load(self._path_of(pick // SEQUENCES), slice(row := pick % SEQUENCES, row + 1)) for pick in picks]
        )
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            loss = self._divergence(batch, generator)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._trained.values(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * rate_share(self.position.seconds / self.seconds)
        self._optimizer.step()
        self.position.steps += 1
        return loss.item()

    @torch.no_grad()
    def agreement(self, labels: Labels) -> float:
        """Return the share of positions at which the student's likeliest token is the target's."""
        body: Any = self.student.base_model
        head: Any = self.student.get_output_embeddings()  # type: ignore[no-untyped-call]
        agreed = 0
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            for tokens, choices, counted in zip(
                *(
                    torch.split(each, _ROWS // LENGTH)
                    for each in (labels.tokens, labels.top_ids[..., 0], labels.counted)
                ),
                strict=True,
            ):
                ours = head(body(input_ids=tokens.long(), use_cache=False).last_hidden_state).argmax(-1)
                agreed += int(((ours == choices) & counted).sum())
        return agreed / int(labels.counted.sum())

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on, but the labels."""
        weights = {name: each.detach() for name, each in self._trained.items()}
        state = {"weights": weights, "optimizer": self._optimizer.state_dict(), "position": asdict(self.position)}
        with path.open("wb") as file:  # Python's file, whose errors have a reason
            torch.save(state, file)

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, weight in state["weights"].items():
                self._trained[name].copy_(weight)
        self._optimizer.load_state_dict(state["optimizer"])
        self.position = Position(**state["position"])

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self._seed, 1, step) >> 1)

    def _divergence(self, batch: Labels, generator: torch.Generator) -> Tensor:
        """Return the mean loss over the counted positions; see the module."""
        body: Any = self.student.base_model
        head: Any = self.student.get_output_embeddings()  # type: ignore[no-untyped-call]
        counted = batch.counted.flatten()
        hidden = body(input_ids=batch.tokens.long(), use_cache=False).last_hidden_state.flatten(0, 1)[counted]
        top_log_p = batch.top_log_probs.flatten(0, 1)[counted].float()
        likely, places = torch.unique(batch.top_ids.flatten(0, 1)[counted].long(), return_inverse=True)
        vocabulary = len(head.weight)
        others: Tensor = torch.unique(torch.randint(vocabulary, (OTHERS,), generator=generator))
        others = others[~torch.isin(others, likely)]
        chosen = torch.cat([likely, others])
        offsets = torch.zeros(len(chosen))
        if len(others):
            offsets[len(likely) :] = math.log((vocabulary - len(likely)) / len(others))
        bias = None if head.bias is None else head.bias[chosen]
        logits = functional.linear(hidden, head.weight[chosen], bias).float()
        top_log_q = logits.gather(1, places) - (logits + offsets).logsumexp(-1, keepdim=True)
        top_p = top_log_p.exp()
        rest_p, rest_q = ((1 - each.sum(-1)).clamp_min(_LEAST) for each in (top_p, top_log_q.exp()))
        losses = (top_p * (top_log_p - top_log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
        return losses.mean()


def rate_share(done: float) -> float:
    """Return the share of the highest learning rate after a share of the time: a line, then a cosine to 2 %."""
    if done < WARM_UP:
        return 0.02 + 0.98 * done / WARM_UP
    falling = min((done - WARM_UP) / (1 - WARM_UP), 1.0)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * falling))
