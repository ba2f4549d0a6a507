"""Tests `dynatree check`: its lines, its JSON, and its exit status."""

import json
import re
from pathlib import Path

import pytest

from dynatree.cli.main import main
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model
from tests.support.packed_checkpoints import save_packed
from tests.support.tokenizer_zoo import gemma, word_piece


@pytest.fixture(name="gguf")
def gguf_fixture(tmp_path: Path) -> str:
    return str(save_gguf(tmp_path / "model.gguf", ("Q4_K", "Q6_K"), seed=1))


@compiled
def test_a_pair_has_a_line_for_each_model(gguf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft, _ = save_packed(tmp_path, "awq", 4)
    capsys.readouterr()
    assert main(["check", "--target-model", gguf, "--draft-model", str(draft)]) == 0
    target_line, draft_line = capsys.readouterr().out.splitlines()
    assert target_line.startswith("target model.gguf: LlamaForCausalLM of 0.00")
    assert "Q4_K and Q6_K weights that take 3 MB of memory" in target_line
    assert "bfloat16 activations on cpu by a native program" in target_line
    assert target_line.endswith("a context of 160 tokens")
    assert "awq of 4 bits weights" in draft_line


@compiled
def test_json_has_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_random_model(tmp_path / "model", "gpt_neox", seed=1))
    capsys.readouterr()
    line = ["check", "--target-model", model, "--draft-model", model, "--draft-weights", "int4", "--dtype", "float32"]
    assert main([*line, "--max-context", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[role]["weights"] for role in ("target", "draft")] == ["float32", "int4 and int8"]
    assert 0 < found["draft"]["weight_bytes"] < found["target"]["weight_bytes"]
    assert found["target"]["context_length"] == 100


def test_a_model_without_attention_says_what_it_keeps_and_who_bounds_its_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(saved(tiny_model(tiny_config("mamba"), 0), tmp_path))
    capsys.readouterr()
    assert main(["check", "--target-model", model]) == 0
    line, log = capsys.readouterr()
    assert "0 kB of keys and values a token, 7 MB of states and records a session, a context of 131072" in line
    assert line.endswith("tokens. The model itself bounds no context; --max-context sets another bound\n")
    assert log == ""


def test_states_of_less_than_a_megabyte_are_not_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(saved(tiny_model(tiny_config("lfm2"), 0), tmp_path))
    capsys.readouterr()
    assert main(["check", "--target-model", model]) == 0
    assert re.search(
        r", [1-9][0-9.]* kB of states and records a session, a context of \d+ tokens\n$", capsys.readouterr().out
    )


def test_a_refusal_is_one_line_or_json(gguf: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "model model.gguf is a GGUF file, which has its own precision: it cannot be rounded to int8"
    line = ["check", "--target-model", gguf, "--weights", "int8"]
    assert main(line) == 1
    assert capsys.readouterr() == ("", f"dynatree: error: {refused}\n")
    assert main([*line, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"refusal": {"message": refused}}


def test_the_overlap_of_different_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(save_random_model(tmp_path / "target", "llama", seed=1))
    draft = save_random_model(tmp_path / "draft", "llama", seed=1)
    gemma().save_pretrained(draft)
    capsys.readouterr()
    line = ["check", "--target-model", target, "--draft-model", str(draft)]
    assert main(line) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"different tokenizers: 1\d% of the target's tokens, and 4\d% of a sample's, .*: expect few accepted tokens",
        last,
    )
    assert main([*line, "--json"]) == 0
    overlap = json.loads(capsys.readouterr().out)["overlap"]
    assert 0.1 < overlap["vocabulary"] < 0.2 < overlap["sample"] < 0.5
    word_piece(clean_up=False).save_pretrained(draft)
    assert main(line) == 1
    assert "the draft model's tokenizer cannot be matched with another one" in capsys.readouterr().err
