"""Tests `dynatree audit` on quantised targets: equality with plain decoding, and the distance from their floats."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dynatree.cli import service_pair
from dynatree.cli.main import main
from dynatree.cli.reference import Reference
from dynatree.cli.service_pair import ServicePair
from dynatree.client import Client
from dynatree.draft.settings import DraftSettings
from dynatree.engine.examined import WITHOUT_ATTENTION
from dynatree.engine.settings import ModelSettings
from dynatree.verify.settings import VerifySettings
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import CONTEXT, save_random_model
from tests.support.packed_checkpoints import save_packed
from tests.support.services import running_services

DISTANCE = re.compile(r"log-probabilities differ by (\S+) on average, at most (\S+); (\d) of 2 outputs part")


@pytest.fixture(name="prompts")
def prompts_fixture(tmp_path: Path) -> str:
    (tmp_path / "prompts.txt").write_text("It was a dark and stormy night\nMy dear sister\n")
    return str(tmp_path / "prompts.txt")


@pytest.fixture(autouse=True)
def _services_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def pair(verify: VerifySettings, draft: DraftSettings) -> Iterator[ServicePair]:
        models = Path(verify.model.model), Path(draft.model.model)
        options = {"dtype": verify.model.dtype, "weights": verify.model.weights, "draft_weights": draft.model.weights}
        with running_services(tmp_path, *models, **options) as services, Client(services.draft_address) as client:
            yield ServicePair(client, 0, 0, services.draft_address)

    monkeypatch.setattr(service_pair, "service_pair", pair)


@compiled
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gguf", []),
        ("packed", ["--dtype", "float32"]),
        ("plain", ["--weights", "int8", "--dtype", "bfloat16"]),
        ("plain", ["--weights", "int4", "--draft-weights", "int8"]),
    ],
)
def test_output_equals_plain_decoding_and_is_near_the_floats(
    tmp_path: Path, prompts: str, kind: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "gguf":
        model = save_gguf(tmp_path / "model.gguf", ("Q4_K", "Q6_K"), seed=1)
    elif kind == "packed":
        model, _ = save_packed(tmp_path, "awq", 4)
    else:
        model = save_random_model(tmp_path / "model", "llama", seed=1)
    capsys.readouterr()
    pair = ["--target-model", str(model), "--draft-model", str(model)]
    assert main(["audit", *pair, "--prompts", prompts, "--max-new-tokens", "24", *options]) == 0
    output = capsys.readouterr().out
    assert "EQUAL: 2 prompts, 48 tokens, no divergence" in output
    found = DISTANCE.search(output)
    assert found
    mean, most = float(found[1]), float(found[2])
    assert 0 < mean < most < 1.0, "rows are rounded to 8 bits"


def test_a_part_from_plain_decoding_is_a_failure(
    tmp_path: Path, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_random_model(tmp_path / "model", "llama", seed=1)
    generate = Client.generate

    def wrong(self: Client, prompt: object, **options: object) -> object:
        completion = generate(self, prompt, **options)  # type: ignore[arg-type]
        if options.get("policy") != "autoregressive":
            object.__setattr__(completion, "token_ids", (*completion.token_ids[:3], 7, *completion.token_ids[4:]))
        return completion

    monkeypatch.setattr(Client, "generate", wrong)
    pair = ["--target-model", str(model), "--draft-model", str(model), "--weights", "int8"]
    assert main(["audit", *pair, "--prompts", prompts, "--max-new-tokens", "8"]) == 1
    output = capsys.readouterr().out
    assert "DIFFERENT at new token 3 of prompt 1 of 2" in output
    assert re.search(r"DynaTree        7 .*\n  plain decoding  \d+ ", output)


def test_the_reference_has_the_context_that_is_served(tmp_path: Path) -> None:
    path = str(save_random_model(tmp_path, "llama", 1))
    settings = (ModelSettings(path), ModelSettings(path, max_context=100))
    assert [Reference(each, "float32", "cpu").context for each in settings] == [CONTEXT, 100]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_reference_may_have_a_model_that_bounds_no_context(tmp_path: Path, family: str) -> None:
    path = str(saved(tiny_model(tiny_config(family)), tmp_path))
    settings = (ModelSettings(path), ModelSettings(path, max_context=100))
    references = [Reference(each, "float32", "cpu") for each in settings]
    assert [each.context for each in references] == [WITHOUT_ATTENTION, 100]
    assert len(references[0].generate(list(range(20, 40)), 3)) == 3


@pytest.mark.parametrize(("method", "bits"), [("gptq", 8), ("awq", 4), ("packed", 4)])
def test_the_reference_of_packed_weights_is_the_model_of_their_floats(tmp_path: Path, method: str, bits: int) -> None:
    packed, plain = save_packed(tmp_path, method, bits)
    ours, theirs = (Reference(ModelSettings(str(path)), "float32", "cpu") for path in (packed, plain))
    assert (ours.dequantised, theirs.dequantised) == (True, False)
    prompt, tokens = list(range(20, 40)), list(range(50, 60))
    difference = torch.tensor(ours.log_probs(prompt, tokens)) - torch.tensor(theirs.log_probs(prompt, tokens))
    assert difference.abs().max() < 1e-4
    assert ours.generate(prompt, 10) == theirs.generate(prompt, 10)
