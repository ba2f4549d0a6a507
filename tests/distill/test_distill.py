"""Tests `dynatree distill`: what training changes, how it continues after an interruption, and what is refused."""

import argparse
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynatree import embedded
from dynatree.cli.checks import check_pair
from dynatree.cli.main import main
from dynatree.common.errors import StartupError
from dynatree.distill import command, distillation, outcome
from dynatree.distill.arguments import add_arguments
from dynatree.distill.command import examined_target, load_target
from dynatree.distill.distillation import Distillation
from dynatree.distill.folder import Folder
from dynatree.distill.labels import HELD_BACK, HELD_BACK_PIECE, Labeller, Labels
from dynatree.distill.student import check_head, cut, dense, from_config, kept_layers
from dynatree.distill.texts import LENGTH, PROMPT, chat_frame, read_texts
from dynatree.distill.training import Training, rate_share
from dynatree.engine.cpu import native
from dynatree.engine.cpu.packing import can_pack
from dynatree.engine.loading import load_engine
from dynatree.engine.model.tokenizer import load_tokenizer
from dynatree.engine.settings import ModelSettings
from dynatree.engine.support.families import recurs
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.gguf_files import save_gguf
from tests.support.model_zoo import save_random_model
from tests.support.packed_checkpoints import save_packed

TEXT = Path(__file__).parents[2] / "LICENSE"  # whose text stays as it is
STEPS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of three layers, and the text that drafts are trained on."""
    return save_random_model(tmp_path_factory.mktemp("target"), "llama", seed=1, max_position_embeddings=512)


@pytest.fixture(scope="module")
def labels(target, tmp_path_factory):
    """Files with labels of texts and of answers, which a training takes instead of making them."""
    folder = Folder(tmp_path_factory.mktemp("labels"))
    labeller = labeller_of(target)
    for number, made in enumerate((labeller.text(0), labeller.answers(1, chat=False), labeller.text(2))):
        folder.write(folder.labels(number), made.save)
    return folder.distill


def loaded(target):
    return load_target(str(target), examined_target(str(target)))


def labeller_of(target):
    tokenizer = load_tokenizer(str(target))
    return Labeller(loaded(target), read_texts([TEXT], tokenizer), chat_frame(tokenizer), seed=0)


def change(config, **values):
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


class EndedError(Exception):
    """Ends a training at a moment of its clock."""


def clock(end=None):
    """A clock that goes on by a second at each look, and raises `EndedError` at `end`."""
    for second in itertools.count():
        if second == end:
            raise EndedError
        yield float(second)


def distil(target, labels, out, *, end=None, resume=False, answers=0.0):
    """Train for `STEPS` seconds of the clock, with a checkpoint in the middle; return the training."""
    folder = Folder(out)
    if not resume:
        shutil.copytree(labels, folder.distill)
    folder.begin({"seed": 0}, resume)
    ticks = clock(end)
    training = Training(cut(loaded(target), [0, 2]), STEPS, 0, folder.labels, torch.float32, lambda: next(ticks))
    if folder.state.exists():
        training.load(folder.state)
    tokenizer = load_tokenizer(str(target))
    labeller = labeller_of(target)
    held_back = {"text": labeller.held_back(answers=False)}
    Distillation(folder, training, labeller, held_back, tokenizer, torch.float32, answers, STEPS / 2).run()
    return training


class Command:
    """`dynatree distill` for some minutes of a clock that goes on by 10 seconds at each look.

    Loading the target takes a minute, and so does measuring the outcome.
    """

    def __init__(self, target, out, monkeypatch, minutes):
        self.now = 0.0
        monkeypatch.setattr(command, "load_target", lambda *model: self.after_a_minute(load_target(*model)))
        monkeypatch.setattr(command, "outcome", self.outcome)
        monkeypatch.setattr(distillation, "LABELLING", 0.1)
        monkeypatch.setattr("dynatree.distill.labels.HELD_BACK_PIECE", HELD_BACK)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        line = ("--target-model", target, "--texts", TEXT, "--out", out, "--minutes", minutes, "--answers", 0)
        command.run(parser.parse_args([*map(str, line)]), self.now, self.clock)

    def clock(self):
        self.now += 10
        return self.now

    def after_a_minute(self, value):
        self.now += 60
        return value

    def outcome(self, model, out, held_back, end, clock):
        self.left = end - self.now
        return self.after_a_minute([])


def test_the_whole_command_takes_its_minutes(target, tmp_path, monkeypatch, capsys):
    ended = Command(target, tmp_path / "out", monkeypatch, 10)
    assert ended.left >= 60
    assert 600 - 120 <= ended.now <= 600 + 20
    times = re.fullmatch(
        r"loading (\d):(\d\d), training (\d):(\d\d), measuring (\d):(\d\d)", capsys.readouterr().out.splitlines()[-1]
    )
    minutes = [int(times[place]) + int(times[place + 1]) / 60 for place in (1, 3, 5)]
    assert sum(minutes) == ended.now / 60
    assert minutes[0] < 2 < 4 < minutes[1]


def test_one_seed_gives_one_student_whatever_the_machine_does_beside(target, tmp_path, monkeypatch):
    drafts = []
    for name, powers in (("first", (0, 1, 2, 3)), ("second", (3, 2, 1, 0))):
        seconds = itertools.accumulate(1e6**power for power in itertools.cycle(powers))
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", lambda seconds=seconds: next(seconds))
            Command(target, tmp_path / name, patched, 5)
        drafts.append((tmp_path / name / "model.safetensors").read_bytes())
    assert drafts[0] == drafts[1]


@pytest.fixture
def few_labels(monkeypatch):
    monkeypatch.setattr(distillation, "LABELLING", 2 / STEPS)
    monkeypatch.setattr(distillation, "LINE_SECONDS", 1)


@pytest.mark.long
@pytest.mark.usefixtures("few_labels")
def test_training_lowers_the_loss_and_the_draft_is_an_ordinary_checkpoint(target, labels, tmp_path, capsys):
    distil(target, labels, tmp_path / "out", answers=0.5)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split(";")[0]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    before, after = (float(line.split("held-back text ")[1].split(",")[0]) for line in (lines[0], lines[-1]))
    assert after > before
    check_pair(str(target), str(tmp_path / "out"))
    engine = load_engine(ModelSettings(str(tmp_path / "out"), sessions=1, chooses_tokens=False))
    assert engine.model.config.num_hidden_layers == 2
    draft, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", target))
    assert torch.equal(draft["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    name = "layers.1.mlp.up_proj.weight"
    assert not torch.equal(draft[f"model.{name}"], whole[f"model.{name}".replace("layers.1", "layers.2")])


@pytest.mark.usefixtures("few_labels")
def test_an_interrupted_training_continues_bit_for_bit(target, labels, tmp_path):
    whole = distil(target, labels, tmp_path / "whole")
    with pytest.raises(EndedError):
        distil(target, labels, tmp_path / "out", end=STEPS - 2)
    stopped = torch.load(tmp_path / "out/distill/state.pt")["position"]
    continued = distil(target, labels, tmp_path / "out", resume=True)
    assert 0 < stopped["steps"] < continued.position.steps
    assert continued.position == whole.position
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


@pytest.mark.usefixtures("few_labels")
def test_a_draft_that_could_not_be_written_is_written_when_the_training_is_resumed(labels, target, tmp_path):
    """The disk may be full when the last state is written and the draft is not."""
    whole = distil(target, labels, tmp_path / "out")
    draft = tmp_path / "out/model.safetensors"
    written = draft.read_bytes()
    draft.unlink()
    again = distil(target, labels, tmp_path / "out", resume=True)
    assert again.position.steps == whole.position.steps
    assert draft.read_bytes() == written


def test_a_training_goes_on_with_its_texts_though_they_have_grown(target, tmp_path, monkeypatch, capsys):
    """A service that records writes more of them."""
    monkeypatch.setattr(command, "outcome", lambda *_: [])
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(TEXT, texts / "first.txt")
    line = ("--target-model", target, "--texts", texts, "--out", tmp_path / "out", "--minutes", 1e-4, "--answers", 0)
    assert main(["distill", *map(str, line)]) == 0
    shutil.copy(TEXT, texts / "second.txt")
    assert main(["distill", *map(str, line), "--resume"]) == 0, capsys.readouterr().err
    assert f"the texts are those that {tmp_path / 'out'} keeps" in capsys.readouterr().out
    (tmp_path / "out/distill/texts.safetensors").write_bytes(b"other")
    assert main(["distill", *map(str, line), "--resume"]) == 1
    assert "texts.safetensors cannot be read" in capsys.readouterr().err


def test_a_draft_of_all_layers_has_nothing_to_learn(target, labels):
    """The loss is computed from part of the vocabulary; it still vanishes where draft and target are one model."""
    model, losses = loaded(target), {}
    for kept in ((0, 1, 2), (0, 2)):
        training = Training(
            cut(model, list(kept)), 1e9, 0, lambda number: labels / f"labels-{number:05}.safetensors", torch.float32
        )
        training.position.files = 1
        if len(kept) == 3:
            assert training.agreement(Labels.load(labels / "labels-00000.safetensors", slice(8))) > 0.99
        losses[kept] = training.step()
    assert losses[0, 1, 2] < 0.2 * losses[0, 2]


def test_positions_after_the_end_of_an_answer_do_not_count(target):
    labeller = labeller_of(target)
    first = labeller.held_back(answers=True)
    end = int(first.tokens[0, 100])
    labeller._ends = torch.tensor([end, 2047])
    labels = labeller.held_back(answers=True)
    assert torch.equal(labels.tokens, first.tokens)
    for tokens, counted in zip(labels.tokens.tolist(), labels.counted.tolist(), strict=True):
        ends = [place for place in range(64, 256) if tokens[place] in (end, 2047)]
        assert counted == [place < min(ends, default=256) for place in range(256)]


@pytest.mark.parametrize("answers", [False, True])
def test_a_slow_machine_labels_fewer_held_back_sequences(target, answers):
    whole = labeller_of(target).held_back(answers=answers)
    assert len(whole.tokens) == HELD_BACK
    times = iter([True, False])
    part = labeller_of(target).held_back(answers=answers, goes_on=lambda: next(times))
    assert torch.equal(part.tokens, whole.tokens[: 2 * HELD_BACK_PIECE])
    assert torch.equal(part.top_ids, whole.top_ids[: 2 * HELD_BACK_PIECE])


def test_kept_layers_are_evenly_spaced_from_the_first_to_the_last():
    assert kept_layers(30, 4) == [0, 10, 19, 29]
    assert kept_layers(30, None) == kept_layers(30, 4)
    assert kept_layers(4, None) == [0, 3]
    assert kept_layers(4, 1) == [0]


def test_the_learning_rate_rises_and_falls():
    rates = [rate_share(done / 100) for done in range(120)]
    assert rates[0] < rates[3] == max(rates)
    assert rates[99] < rates[50] < rates[10]
    assert rates[100:] == [rates[100]] * 20


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gguf", "gptq"])
def test_a_quantised_target_is_dequantised(tmp_path, monkeypatch, capsys, kind):
    if kind == "gguf":
        path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, context=512)
    else:
        path, _ = save_packed(tmp_path, "gptq", 4)
        change(path / "config.json", max_position_embeddings=512)
    monkeypatch.setattr(command, "outcome", lambda *_: ["done"])
    line = ("--target-model", path, "--texts", TEXT, "--out", tmp_path / "out", "--minutes", 1e-4, "--answers", 0)
    assert main(["distill", *map(str, line)]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "done"
    check_pair(str(path), str(tmp_path / "out"))
    saved_as = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert saved_as == ("bfloat16" if native.builds() or can_pack(torch.bfloat16) else "float32")
    for weights in ("auto", "int8"):  # the draft's own weights are floats
        engine = load_engine(ModelSettings(str(tmp_path / "out"), weights=weights, sessions=1, chooses_tokens=False))
        assert "gguf" not in engine.info.numerics
    short = save_gguf(tmp_path / "short.gguf", ("Q8_0",), seed=1)
    with pytest.raises(StartupError, match=r"short\.gguf has a context of 160 tokens, expected at least 256"):
        examined_target(str(short))


@pytest.fixture(scope="module", name="recurrent")
def recurrent_fixture(tmp_path_factory):
    """A target without attention, whose norms are in float32."""
    return saved(tiny_model(tiny_config("mamba", num_hidden_layers=2), 0), tmp_path_factory.mktemp("mamba"))


def test_a_target_whose_layers_recur_is_imitated_by_a_draft_that_attends(recurrent):
    """Cut layers of it would be refused as a draft once they are trained."""
    target = loaded(recurrent)
    student = dense(target, layers=2, context_length=512, seed=0)
    assert not recurs(student.config)
    assert torch.equal(student.get_input_embeddings().weight, target.get_input_embeddings().weight)
    assert not student.get_output_embeddings().weight.requires_grad
    target.to(torch.bfloat16)
    check_head(target)
    tokenizer = load_tokenizer(str(recurrent))
    labeller = Labeller(target, read_texts([TEXT], tokenizer), chat_frame(tokenizer), seed=0)
    labels = labeller._continue(torch.arange(2 * PROMPT, dtype=torch.int32).view(2, -1), torch.Generator())
    whole = labeller._label(labels.tokens)
    assert (labels.top_ids[:, :, 0] == whole.top_ids[:, :, 0]).float().mean() > 0.9, "its state is carried"


@pytest.mark.long
@pytest.mark.parametrize("family", ["mamba", "qwen3_5_text", "minimax"])
def test_every_recurrent_target_has_a_draft_in_the_end(tmp_path, monkeypatch, capsys, family):
    monkeypatch.setattr(command, "outcome", lambda *_: ["done"])
    context = {} if family == "mamba" else {"max_position_embeddings": 512}
    path = saved(tiny_model(tiny_config(family, **context), 0), tmp_path / "target")
    line = ("--target-model", path, "--texts", TEXT, "--out", tmp_path / "out", "--minutes", 1e-4)
    assert main(["distill", *map(str, line)]) == 0
    assert "because the target's layers recur" in capsys.readouterr().out
    engine = load_engine(ModelSettings(str(tmp_path / "out"), sessions=1, chooses_tokens=False))
    assert engine.model.config.num_hidden_layers == 2


def test_a_draft_that_would_be_refused_is_not_trained(tmp_path, capsys):
    config = tiny_config("lfm2")
    config.save_pretrained(tmp_path)
    arguments = ("--texts", TEXT, "--out", tmp_path / "out", "--draft-config", tmp_path / "config.json")
    message = "lfm2 has recurrent layers, and a draft cannot go back before a state; expected another --draft-model"
    assert message in refusal(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_long_context_is_neither_served_nor_refused(tmp_path, monkeypatch, capsys):
    """Phi 3.5 changes its frequencies beyond a shorter context, and others would need more memory than there is."""
    monkeypatch.setattr(outcome, "PROMPTS", 1)
    monkeypatch.setattr(outcome, "NEW_TOKENS", 4)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512, **factors}
    config = tiny_config("phi3", max_position_embeddings=2**17, rope_parameters=rope)
    path = saved(tiny_model(config), tmp_path / "target")
    line = ("--target-model", path, "--texts", TEXT, "--out", tmp_path / "out", "--minutes", 1e-4, "--answers", 0)
    assert main(["distill", *map(str, line)]) == 0, capsys.readouterr().err
    assert "expected on this machine" in capsys.readouterr().out


def test_the_outcome_names_the_speed_of_chain_and_tree(monkeypatch):
    monkeypatch.setattr(outcome, "PROMPTS", 3)  # of which the time allows one
    monkeypatch.setattr(outcome, "NEW_TOKENS", 12)
    monkeypatch.setattr(outcome, "LEAST_GAIN", 1e6)
    target, draft = str(embedded.target_path()), embedded.draft_path()
    tokens = torch.tensor(load_tokenizer(target)(TEXT.read_text())["input_ids"])
    (first, *lines, last) = outcome.outcome(target, draft, tokens, end=0.0)
    assert "from 1 held-back prompts" in first
    assert last.startswith("no faster than n-grams alone at temperature 0 and 0.7: use --draft-model none or ")
    assert last.endswith(outcome.RANK)
    rows = [re.fullmatch(r"  temperature (\S+), (.*): (\S+) tokens a round, .*, (\S+) x plain", line) for line in lines]
    names = ["n-grams alone", "a chain", "the default tree"]
    assert [row.group(1, 2) for row in rows] == [(each, name) for each in ("0", "0.7") for name in names]
    assert all(1 <= float(row[3]) <= 12 and float(row[4]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("at_0", "at_07", "says"),
    [
        ([1.0, 1.5, 2.0], [1.0, 1.0, 1.1], "use it: --draft-model student"),
        ([1.0, 1.5, 2.0], [1.0, 1.2, 1.01], "use it: --draft-model student, and --policy linear at temperature 0.7"),
        ([1.5, 1.5, 1.2], [1.0, 1.0, 2.0], "no faster than n-grams alone at temperature 0: use --draft-model none or "),
        ([1.5, 1.5, 1.2], [1.0, 1.2, 0.9], "no faster than n-grams alone at temperature 0: use --draft-model none or "),
    ],
)
def test_a_draft_is_advised_if_a_chain_or_the_tree_gains(at_0, at_07, says):
    said = outcome._advice({"0": at_0, "0.7": at_07}, Path("student"))
    assert said.startswith(says)
    assert said == says or says.startswith("no faster")


KILLED = """
import os, signal, sys
from pathlib import Path
from dynatree.distill.folder import Folder

def save(path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

folder = Folder(Path(sys.argv[1]))
folder.write(folder.state, save)
"""


def test_a_killed_writer_and_a_full_disk_leave_the_last_checkpoint(tmp_path):
    folder = Folder(tmp_path)
    folder.write(folder.state, lambda path: path.write_bytes(b"whole"))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    assert folder.state.read_bytes() == b"whole"

    def full(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StartupError, match="No space left on device; its last checkpoint stays, and --resume"):
        folder.write(folder.state, full)
    assert folder.state.read_bytes() == b"whole"
    assert [each.name for each in folder.distill.iterdir()] == ["state.pt"]
    folder.write(folder.state, lambda path: path.write_bytes(b"next"))
    assert folder.state.read_bytes() == b"next"


def refusal(capsys, *arguments, target="embedded"):
    assert main(["distill", "--target-model", str(target), *map(str, arguments)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("dynatree: error: ")
    return line


def test_texts_and_folders_that_cannot_be_used(tmp_path, capsys):
    for name in ("empty", "binary", "used"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary/picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "short.txt").write_text("A few words.")
    (tmp_path / "used/precious").touch()
    out = ("--out", tmp_path / "out")
    for texts, message in (
        ("nowhere", "there is no "),
        ("empty", "empty has no text: it is empty"),
        ("binary", "binary has no text: 1 other files"),
        ("binary/picture.png", "picture.png is not UTF-8 text"),
        ("short.txt", "short.txt has 5 tokens; expected at least 2048"),
    ):
        assert message in refusal(capsys, "--texts", tmp_path / texts, *out)
    assert "used already exists; expected a new or empty folder" in refusal(
        capsys, "--texts", TEXT, "--out", tmp_path / "used"
    )
    assert "holds no training of dynatree distill" in refusal(
        capsys, "--texts", TEXT, "--out", tmp_path / "used", "--resume"
    )
    assert not (tmp_path / "out").exists()


def test_whole_chats_are_texts_and_a_line_that_is_being_recorded_is_left_out(tmp_path):
    tokenizer = load_tokenizer(str(embedded.target_path()))
    tokenizer.chat_template = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": chat}) + "\n") * 400 + '{"messages": [{"ro')
    found = tokenizer.decode(read_texts([path], tokenizer).training)
    assert found.startswith(f"<user>Who?<assistant>A cat.{tokenizer.eos_token}<user>Who?")
    tokenizer.chat_template = None
    with pytest.raises(StartupError, match="has a chat that the chat template refuses: "):
        read_texts([path], tokenizer)


def test_half_of_a_surrogate_pair_is_one_line(tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "\\ud83d"}\n')
    message = "texts.jsonl: line 1: text is not valid Unicode: it has half of a surrogate pair"
    assert message in refusal(capsys, "--texts", path, "--out", tmp_path / "out")


def test_the_last_line_may_be_nested_deeply(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "words"}\n' * 2048 + "[" * 100_000)
    assert len(read_texts([path], load_tokenizer(str(embedded.target_path()))).training) > 2048


def test_a_token_takes_a_few_bytes(tmp_path):
    """A folder of recorded texts may have hundreds of millions."""

    class Tokenizer:
        eos_token_id = 0

        def __call__(self, text, **_):
            return {"input_ids": range(1000, 1000 + len(text))}

    for number in range(50):
        (tmp_path / f"{number}.txt").write_text("x" * 20_000)
    tracemalloc.start()
    try:
        texts = read_texts([tmp_path], Tokenizer())
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(texts.training) + len(texts.held_back) == 50 * 20_001
    assert most < 16 * 50 * 20_001


@pytest.fixture
def early(monkeypatch):
    """Mistakes are told before texts are read and the target is loaded."""
    for name in ("read_texts", "load_target"):
        monkeypatch.setattr(command, name, lambda *_, name=name: pytest.fail(f"{name} is called"))


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma4_text", {}), ("deepseek_v3", {"first_k_dense_replace": 3}), ("llama4_text", {"moe_layers": [0, 1, 2]})],
)
def test_layers_that_differ_by_their_numbers_cannot_be_cut(tmp_path, capsys, family, changes):
    path = saved(tiny_model(tiny_config(family, **changes)), tmp_path / "target")
    message = f"layers of {family} cannot be cut; expected --draft-config"
    assert message in refusal(capsys, "--texts", TEXT, "--out", tmp_path / "out", target=path)


def test_a_draft_without_the_targets_bias_has_its_own_output_layer(target, tmp_path):
    tiny_config("phi").save_pretrained(tmp_path)
    student = from_config(tmp_path / "config.json", loaded(target), seed=0)
    assert student.get_output_embeddings().bias is not None
    assert student.get_output_embeddings().weight.requires_grad


def test_a_configuration_of_quantised_files_makes_a_draft_of_floats(target, tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    change(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    student = from_config(tmp_path / "config.json", loaded(target), seed=0)
    assert not hasattr(student.config, "quantization_config")


@pytest.mark.parametrize("files", ["lack a tensor", "are cut off", "have scales"])
def test_a_target_whose_files_are_not_whole(tmp_path, files):
    path = save_random_model(tmp_path, "llama", seed=1, max_position_embeddings=512) / "model.safetensors"
    config = examined_target(str(tmp_path))
    name, weights = "model.layers.1.mlp.up_proj.weight", load_file(path)
    if files == "are cut off":
        path.write_bytes(path.read_bytes()[:-1000])
        message = "could not be loaded: "
    elif files == "lack a tensor":
        del weights[name]
        save_file(weights, path, metadata={"format": "pt"})
        message = f"cannot be served: its checkpoint lacks {name}"
    else:
        save_file(weights | {f"{name}_scale": torch.ones(1)}, path, metadata={"format": "pt"})
        message = f"cannot be served: its checkpoint has {name}_scale, but its config.json has no quantization_config"
    with pytest.raises(StartupError, match=re.escape(message)):
        load_target(str(tmp_path), config)


@pytest.mark.usefixtures("early")
def test_drafts_that_cannot_be_made(tmp_path, capsys):
    arguments = ("--texts", TEXT, "--out", tmp_path / "out")
    message = "nothing.json cannot be read: No such file or directory"
    assert message in refusal(capsys, *arguments, "--draft-config", tmp_path / "nothing.json")
    good = save_random_model(tmp_path / "good", "llama", seed=1, max_position_embeddings=LENGTH - 1) / "config.json"
    message = "config.json has a context of 255 tokens, expected at least 256"
    assert message in refusal(capsys, *arguments, "--draft-config", good)
    for values in ({"hidden_size": "wide"}, {"num_attention_heads": 7}):
        change(good, **{"hidden_size": 64, "max_position_embeddings": 512} | values)
        assert "is no configuration of a model: " in refusal(capsys, *arguments, "--draft-config", good)
    assert "--layers is 4, but the target has 4 layers" in refusal(capsys, *arguments, "--layers", 4)
    other = save_random_model(tmp_path / "other", "llama", seed=1, vocab_size=3000) / "config.json"
    message = "has a vocabulary of 3000 tokens, so it cannot use the target's tokenizer; expected 2048"
    assert message in refusal(capsys, *arguments, "--draft-config", other)
    other.write_text('{"model_type": "nothing"}')
    assert "is no configuration of a model" in refusal(capsys, *arguments, "--draft-config", other)
    assert not (tmp_path / "out").exists()


def test_another_training_is_not_continued(tmp_path):
    folder = Folder(tmp_path / "out")
    folder.begin({"seed": 0, "texts": "a", "layers": [0, 2]}, resume=False)
    folder.check(resume=True)
    folder.begin({"seed": 0, "texts": "a", "layers": [0, 2]}, resume=True)
    with pytest.raises(StartupError, match="was begun with another texts and layers"):
        folder.begin({"seed": 0, "texts": "b", "layers": [0, 1]}, resume=True)
    with pytest.raises(StartupError, match="already exists; expected --resume, which continues its training"):
        folder.check(resume=False)
