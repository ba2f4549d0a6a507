"""Tests the perplexity of the embedded target, as the command measures and records it."""

import json
import math
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree import embedded
from tests.support.benchmark_modules import module

TEXT = "The captain looked at the sea, and the sea looked back at him. " * 100


def test_it_is_that_of_transformers_and_the_record_can_be_read(tmp_path, monkeypatch):
    target, text, out = embedded.target_path(), tmp_path / "text", tmp_path / "out.json"
    text.write_text(TEXT)
    models = [f"{target}:auto:float32", f"{target}:int8:float32"]
    monkeypatch.setattr(sys, "argv", ["perplexity", str(text), *models, "--windows", "1", "--out", str(out)])
    perplexity = module("perplexity")
    perplexity.main()
    record = json.loads(out.read_text())
    assert set(record["environment"]) == {"versions", "git", "machine"}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(target)(TEXT, return_tensors="pt", add_special_tokens=False)
    window = tokens["input_ids"][:, : perplexity.WINDOW]
    with torch.no_grad():
        expected = math.exp(cross_entropy(model(window).logits[0, :-1], window[0, 1:]))
    assert [result["weights"] for result in record["results"]] == ["auto", "int8"]
    full, rounded = (result["perplexity"] for result in record["results"])
    assert full == pytest.approx(expected, rel=1e-4)
    assert rounded == pytest.approx(expected, rel=0.05)
    assert rounded != full
