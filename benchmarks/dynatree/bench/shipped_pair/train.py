"""Train the embedded pair from plain-text books.

    python -m dynatree.bench.shipped_pair.train BOOK.txt... --validation BOOK.txt --prompts TEXT.txt --out DIR

There are three stages. If DIR already holds a target, it is kept with its tokenizer, and only the draft is trained:

1. a byte-level BPE of 2,048 entries over the training books;
2. the target (GPT-NeoX, 320 wide, 4 layers, 6.2 M parameters), next-token cross-entropy;
3. the draft (GPT-NeoX, 128 wide, 3 layers, 1.1 M parameters), distilled from the target.

The widths are 1/8 of Pythia-2.8B's and 1/4 of Pythia-70M's with the same head sizes, so that `grow.py` can widen
the pair to those shapes without changing its function.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

# Typed as Any, because the annotations of transformers' generate() and from_pretrained() reject its own models.
Model: Any = GPTNeoXForCausalLM

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
VOCAB_SIZE = 2048
CONTEXT = 2048
SHORT_WINDOW = 512
CHAPTER = re.compile(r"\n(?=(?:CHAPTER|Chapter|LETTER|Letter|VOLUME|Volume) [IVXLC\d]+)")


@dataclass(frozen=True)
class Shape:
    """The part of a GPT-NeoX configuration that differs between target and draft."""

    hidden_size: int
    layers: int
    heads: int

    def config(self, dropout: float) -> GPTNeoXConfig:
        """The transformers configuration; everything else is as in Pythia."""
        return GPTNeoXConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden_size,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            use_parallel_residual=True,
            hidden_dropout=dropout,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )


TARGET_SHAPE = Shape(hidden_size=320, layers=4, heads=4)
DRAFT_SHAPE = Shape(hidden_size=128, layers=3, heads=2)
LONG_TEXT = 1536


def read_book(path: Path) -> str:
    """A book's text with its hard line wrapping undone and a document mark between chapters."""
    text = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("_", "")
    chapters = CHAPTER.split(text)
    paragraphs = (re.split(r"\n\s*\n", chapter) for chapter in chapters)
    unwrapped = ("\n\n".join(" ".join(p.split()) for p in chapter if p.strip()) for chapter in paragraphs)
    return END_OF_TEXT.join(chapter for chapter in unwrapped if chapter) + END_OF_TEXT


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose ids 0 and 1 are the special tokens, as in Pythia's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in text.split(END_OF_TEXT)), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def windows(tokens: Tensor, tokens_per_step: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random windows `[batch, length + 1]`; every fourth step spans the whole context, so that all positions train."""
    step = 0
    while True:
        length = CONTEXT - 1 if step % 4 == 3 else SHORT_WINDOW
        batch = max(1, tokens_per_step // length)
        starts = torch.randint(0, len(tokens) - length - 1, (batch,), generator=generator)
        yield torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        step += 1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine to 2 % of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100))))


def optimizer_for(model: Any, peak: float) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def step_optimizer(model: Any, optimizer: torch.optim.AdamW, rate: float) -> None:
    """One update at a given learning rate, with the gradient clipped to norm 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def validation_loss(model: Any, tokens: Tensor, count: int = 8) -> float:
    """Mean cross-entropy in nats per token over `count` evenly spaced windows of the whole context."""
    model.eval()
    starts = torch.linspace(0, len(tokens) - CONTEXT - 1, count).long().tolist()
    total = 0.0
    for start in starts:
        window = tokens[start : start + CONTEXT + 1]
        logits = model(window[None, :-1], use_cache=False).logits[0].float()
        total += functional.cross_entropy(logits, window[1:]).item()
    model.train()
    return total / count


def train_target(tokens: Tensor, held_out: Tensor, steps: int, tokens_per_step: int) -> Any:
    """Next-token training of the target on the tokenised books `[n]`."""
    torch.manual_seed(0)
    model = Model(TARGET_SHAPE.config(dropout=0.1)).train()
    peak = 2e-3
    optimizer = optimizer_for(model, peak)
    batches = windows(tokens, tokens_per_step, torch.Generator().manual_seed(0))
    began = time.monotonic()
    for step in range(steps):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        step_optimizer(model, optimizer, learning_rate(step, steps, peak))
        if step % 100 == 99 or step == steps - 1:
            held = validation_loss(model, held_out) if step % 400 == 399 or step == steps - 1 else float("nan")
            elapsed = time.monotonic() - began
            print(f"target {step + 1}/{steps} loss {loss.item():.3f} held-out {held:.3f} {elapsed:.0f} s", flush=True)
    model.config.hidden_dropout = 0.0
    return model.eval()


@torch.no_grad()
def greedy_texts(model: Any, tokens: Tensor, count: int, prompt_length: int, length: int) -> Tensor:
    """The target's own greedy continuations, prompts included: `[count, prompt_length + length]`."""
    starts = torch.linspace(0, len(tokens) - prompt_length - 1, count).long().tolist()
    prompts = torch.stack([tokens[s : s + prompt_length] for s in starts])
    return model.generate(  # type: ignore[no-any-return]
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        pad_token_id=1,
    )


def loops(tokens: Tensor, tokens_per_step: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows `[batch, SHORT_WINDOW]` that fall into a loop: book text, then its last 4 to 48 tokens over and over.

    Small models' greedy text loops sooner or later. A draft learns to follow only if it has seen many different loops.
    """
    batch = tokens_per_step // SHORT_WINDOW
    while True:
        rows = []
        for start in torch.randint(0, len(tokens) - SHORT_WINDOW, (batch,), generator=generator).tolist():
            lead = int(torch.randint(48, 256, (), generator=generator))
            phrase = int(torch.randint(4, 49, (), generator=generator))
            text = tokens[start : start + lead]
            repeats = -(-(SHORT_WINDOW - lead) // phrase)
            rows.append(torch.cat([text, text[-phrase:].repeat(repeats)])[:SHORT_WINDOW])
        yield torch.stack(rows)


def own_texts(texts: Tensor, tokens_per_step: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows of `SHORT_WINDOW` of the target's own text `[n, length]`, alternating with whole texts if longer."""
    batch, slack = tokens_per_step // SHORT_WINDOW, texts.shape[1] - SHORT_WINDOW
    while True:
        rows = torch.randint(0, len(texts), (batch,), generator=generator).tolist()
        starts = torch.randint(0, slack + 1, (batch,), generator=generator).tolist()
        yield torch.stack([texts[row, start : start + SHORT_WINDOW] for row, start in zip(rows, starts, strict=True)])
        if slack:
            yield texts[torch.randint(0, len(texts), (1,), generator=generator)]


@dataclass(frozen=True)
class OwnText:
    """The target's own greedy text with its prompts: `[n, SHORT_WINDOW]`, and `[n, LONG_TEXT]`; most of it loops."""

    short: Tensor
    long: Tensor


def own_text(target: Any, tokens: Tensor, prompts: Tensor) -> OwnText:
    """The target's continuations of 64 tokens of the books and, for the long texts, of the prompts too."""
    short = greedy_texts(target, tokens, count=288, prompt_length=64, length=SHORT_WINDOW - 64)
    long = [greedy_texts(target, text, count, 64, LONG_TEXT - 64) for text, count in ((tokens, 112), (prompts, 80))]
    return OwnText(short, torch.cat(long))


def distillation_loss(target: Any, draft: Any, batch: Tensor, first: int, choice_weight: float) -> Tensor:
    """Kullback-Leibler divergence from the target's distribution over positions from `first` on, in nats per token.

    The cross-entropy on the target's choice is added with `choice_weight`: a greedy draft is judged by its top choice.
    """
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            teacher = target(batch, use_cache=False).logits
        student = draft(batch, use_cache=False).logits
    teacher = teacher[:, first:].float().flatten(0, 1)
    student = student[:, first:].float().flatten(0, 1).log_softmax(-1)
    divergence = functional.kl_div(student, teacher.log_softmax(-1), reduction="batchmean", log_target=True)
    return divergence + choice_weight * functional.nll_loss(student, teacher.argmax(-1))


def distil_draft(target: Any, tokens: Tensor, own: OwnText, steps: int, tokens_per_step: int) -> Any:
    """Distil the draft from scratch.

    Three of five steps read the target's own greedy text, as a served draft does; two of these
    three read long texts. One step reads loops of many lengths, and one the books at every length up to the context.
    """
    torch.manual_seed(0)
    draft = Model(DRAFT_SHAPE.config(dropout=0.0)).train()
    peak = 4e-3
    optimizer = optimizer_for(draft, peak)
    generator = torch.Generator().manual_seed(0)
    short, long = own_texts(own.short, tokens_per_step, generator), own_texts(own.long, tokens_per_step, generator)
    looping = loops(tokens, tokens_per_step, generator)
    natural = (window[:, :-1] for window in windows(tokens, tokens_per_step, generator))
    began = time.monotonic()
    for step in range(steps):
        batch = next((short, looping, long, natural, long)[step % 5])
        loss = distillation_loss(target, draft, batch, first=0, choice_weight=0.3)
        loss.backward()  # type: ignore[no-untyped-call]
        step_optimizer(draft, optimizer, learning_rate(step, steps, peak))
        if step % 100 == 99:
            print(f"draft {step + 1}/{steps} loss {loss.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    return draft.eval()


def lean_to_loops(target: Any, draft: Any, own: OwnText, steps: int) -> None:
    """Train the draft on the later two thirds of the long texts, and move its weights 0.4 of the way to the result.

    After `distil_draft`, the draft agrees with its target more than the real pair does on short text, and less where
    text loops. The weighted mean keeps agreement on short text in the real pair's range (see the model card).
    """
    torch.manual_seed(1)
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    peak = 2e-3
    optimizer = optimizer_for(draft.train(), peak)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        batch = own.long[torch.randint(0, len(own.long), (1,), generator=generator)]
        loss = distillation_loss(target, draft, batch, first=SHORT_WINDOW, choice_weight=1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        step_optimizer(draft, optimizer, learning_rate(step, steps, peak))
    draft.load_state_dict({name: before[name].lerp(weight, 0.4) for name, weight in draft.state_dict().items()})
    draft.eval()


@torch.no_grad()
def tokens_per_round(draft: Any, texts: Tensor, prompt_length: int, chain: int = 8) -> float:
    """Mean tokens committed per round by chains of `chain` draft tokens on greedy target text `texts` `[n, length]`.

    Along the target's own greedy text, a greedy chain is accepted up to the first position where the draft's choice
    differs, so one teacher-forced forward pass of the draft determines every round.
    """
    rounds = committed = 0
    for text in texts:
        choice = draft(text[None, :-1], use_cache=False).logits[0].argmax(-1)
        agree = (choice == text[1:])[prompt_length - 1 :].tolist()
        position = 0
        while position < len(agree):
            run = 0
            while run < chain and position + run < len(agree) and agree[position + run]:
                run += 1
            advance = min(run + 1, len(agree) - position)
            position, committed, rounds = position + advance, committed + advance, rounds + 1
    return committed / rounds


def calibration(target: Any, draft: Any, held_out: Tensor) -> dict[int, float]:
    """Tokens per round of a chain of 8 on held-out prompts of 128 tokens, by generated length."""
    texts = greedy_texts(target, held_out, count=16, prompt_length=128, length=1500)
    return {length: tokens_per_round(draft, texts[:, : 128 + length], 128) for length in (100, 1500)}


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Any:
    """Write bfloat16 safetensors with the tokenizer, and return the model with the rounded weights."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.config.dtype = torch.float32  # the dtype that users get by default
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Model.from_pretrained(folder, dtype=torch.float32).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the three stages."""
    parser = argparse.ArgumentParser(description="Train the embedded pair from plain-text books.")
    parser.add_argument("books", nargs="+", type=Path, help="UTF-8 file of training text")
    parser.add_argument("--validation", type=Path, required=True, help="UTF-8 file of the book held out for validation")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="UTF-8 file of prompts from which the target generates looping text"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/ and draft/")
    for option, default, text in (
        ("--target-steps", 4800, "training steps of the target"),
        ("--target-tokens-per-step", 4096, "tokens of one training step of the target"),
        ("--draft-steps", 7000, "training steps of the draft"),
        ("--loop-steps", 1200, "further training steps of the draft on looping text"),
        ("--draft-tokens-per-step", 2048, "tokens of one training step of the draft"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    options = parser.parse_args(arguments)

    texts = [read_book(path) for path in options.books]
    target_folder, draft_folder = options.out / "target", options.out / "draft"
    if (target_folder / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target_folder)
    else:
        tokenizer = train_tokenizer(texts)
    tokens = torch.tensor([i for text in texts for i in tokenizer(text)["input_ids"]])
    prompts = torch.tensor(tokenizer(options.prompts.read_text(encoding="utf-8"))["input_ids"])
    held_out = torch.tensor(tokenizer(read_book(options.validation))["input_ids"])
    print(f"{len(tokens)} training tokens, {len(held_out)} held out", flush=True)

    if (target_folder / "model.safetensors").exists():
        target = Model.from_pretrained(target_folder, dtype=torch.float32).eval()
    else:
        target = train_target(tokens, held_out, options.target_steps, options.target_tokens_per_step)
        target = save(target, tokenizer, target_folder)
    print(f"target: held-out loss {validation_loss(target, held_out):.3f} nats a token", flush=True)

    own = own_text(target, tokens, prompts)
    draft = distil_draft(target, tokens, own, options.draft_steps, options.draft_tokens_per_step)
    lean_to_loops(target, draft, own, options.loop_steps)
    draft = save(draft, tokenizer, draft_folder)
    for length, committed in calibration(target, draft, held_out).items():
        print(f"chain of 8, T = {length}: {committed:.2f} tokens a round", flush=True)


if __name__ == "__main__":
    main()
