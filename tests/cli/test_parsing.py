"""Command lines and environment variables, as the commands parse them."""

import argparse
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from dynatree.bench import methods
from dynatree.cli.arguments import SCHEMES
from dynatree.cli.checks import check_pair
from dynatree.cli.main import COMMANDS, main
from dynatree.cli.parser import Parser
from dynatree.cli.service_arguments import fixed_rows, tree_nodes
from dynatree.cli.settings import serve_settings
from dynatree.client import SamplingScheme
from dynatree.common.limits import ALL_LAYERS
from dynatree.engine.settings import WEIGHTS
from tests.support.gguf_files import save_gguf
from tests.support.packed_checkpoints import save_packed

PAIR = ["--target-model", "embedded", "--draft-model", "embedded"]
DRAFT = ["draft", "--draft-model", "embedded", "--verify", "localhost:1"]
VERIFY = ["verify", "--target-model", "embedded"]


@pytest.mark.parametrize("option", ["--max-tree-nodes", "--fixed-rows", "--max-context", "--max-sessions"])
def test_a_value_of_another_kind_is_told_in_words(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main([*VERIFY, option, "many"]) == 2
    assert re.search(r"invalid whole numbers? value: 'many'", capsys.readouterr().err)


@pytest.mark.parametrize(("number_of", "most"), [(fixed_rows, 4096), (tree_nodes, 2048)])
def test_numbers_of_rows_and_nodes_have_a_highest(number_of: Callable[[str], object], most: int) -> None:
    assert number_of(str(most))
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected .* {most}"):
        number_of(str(most + 1))


def test_a_layer_cache_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service that finds the model's layers there writes nothing; a folder that is not there must be made."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    for folder, refused in ((tmp_path, "--device is cuda:99"), (tmp_path / "new", "--layer-cache is")):
        assert main([*VERIFY, "--layer-cache", str(folder), "--device", "cuda:99"]) == 1
        assert refused in capsys.readouterr().err


def test_choices_are_what_the_services_take() -> None:
    assert get_args(SamplingScheme) == SCHEMES == methods.SCHEMES


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nope"],
        ["serve"],
        ["generate"],
        ["generate", "Once", "--nope"],
        ["generate", "Once", "--max-new", "3"],
        ["generate", "Once", "twice"],
        ["generate", "Once", "--top-k", "many"],
        ["generate", "Once", "--n", "many"],
        ["generate", "Once", "--stop-token-id", "END"],
        ["generate", "Once", "--scheme", "none"],
        ["generate", "Once", "--logit-bias", "5"],
        ["generate", "Once", "--logit-bias", "a=1"],
        ["generate", "Once", "--logit-bias", "5=much"],
        ["generate", "Once", "--set", "depth"],
        ["generate", "Once", "--set", "=8"],
        ["generate", "Once", "--set", "depth=8x"],
        ["generate", "Once", "--set", "root=Single"],
        ["generate", "Once", "--set", "widths=1,"],
        ["generate", "Once", "--set", "widths=1,x"],
        ["generate", "Once", "--set", "depth=8", "--set", "depth=8"],
        ["generate", "Once", "--logit-bias", "5=1", "--logit-bias", "5=2"],
        ["generate", "Once", "--timeout", "0"],
        ["generate", "Once", "--timeout", "soon"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: dynatree")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["vefify"], "there is no command 'vefify'; did you mean verify?"),
        (["quux"], "there is no command 'quux'; dynatree --help lists them"),
        (["verify", "--target-model", "x", "--max-sesions", "3"], "--max-sesions 3; did you mean --max-sessions?"),
        (["serve", *PAIR, "--model", "x"], "unrecognized arguments: --model x; did you mean --target-model?"),
        (["generate", "Once", "--max-tokens", "3"], "did you mean --max-new-tokens?"),
        (["bench", "compare", "--prompts", "x", "--polisy", "linear"], "did you mean --policy?"),
        (["gateway", "--quux"], "unrecognized arguments: --quux\n"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_may_have_been_meant_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str) -> None:
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Return a function that parses a command line with variables in the environment."""

    def parse(*arguments: str, **variables: str) -> argparse.Namespace:
        seen = []
        module = importlib.import_module(COMMANDS[arguments[0]][1])
        monkeypatch.setattr(module, "run", lambda options: seen.append(options) or 0)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(arguments) == 0
        return seen[0]

    return parse


def service_lines() -> Iterator[tuple[list[str], argparse.Action]]:
    """Yield every option of every service that a variable can set, with a command line of the service."""
    for line in (VERIFY, DRAFT, ["gateway"], ["serve", *PAIR]):
        parser = Parser()
        importlib.import_module(COMMANDS[line[0]][1]).add_arguments(parser)
        for action in parser._actions:
            if action.option_strings and action.dest not in ("help", "target_model", "draft_model", "verify"):
                yield line, action


VALUES = {"--max-context": "7", "--listen": "localhost:7", "--host": "::1", "--set": "depth=7 widths=1,2"}
VALUES |= {"--metrics": "localhost:7", "--grpc": "localhost:7", "--server": "localhost:7", "--device": "cuda:7"}


@pytest.mark.parametrize(
    ("line", "action"), list(service_lines()), ids=lambda value: value[0] if isinstance(value, list) else value.dest
)
def test_every_option_of_a_service_can_be_a_variable(
    parsed: Callable[..., argparse.Namespace], line: list[str], action: argparse.Action
) -> None:
    """The variable has the effect of the option, and the command line takes precedence."""
    option = action.option_strings[0]
    variable = "DYNATREE_" + option[2:].upper().replace("-", "_")
    value = list(action.choices)[-1] if action.choices else VALUES.get(option, "a b" if action.nargs == "+" else "1")
    if option == "--draft-device":
        value = "cuda:7"
    words = [option] if action.nargs == 0 else [option, value]
    if action.nargs == "+":
        words = [option, *value.split()]
    elif isinstance(action.default, (list, dict)):
        words = [word for each in value.split() for word in (option, each)]

    def read(*words: str, **variables: str) -> tuple[frozenset[str], dict[str, object]]:
        options = vars(parsed(*line, *words, **variables))
        return options.pop("from_environment"), options

    neither, by_line = read(*words)
    named, by_variable = read(**{variable: value})
    assert by_variable == by_line
    assert (neither, named) == (frozenset(), {action.dest})
    assert by_variable != read(**{variable: ""})[1] or getattr(action, "default", None) == by_line[action.dest]
    wrong = {variable: "\u2028nonsense"} if action.nargs != 0 else {variable: "1"}
    assert read(*words, **wrong) == (frozenset(), by_line)


def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DYNATREE_QUEUE", "many")
    assert main(VERIFY) == 2
    assert "argument --queue: invalid whole number value: 'many' (set by the environment variable DYNATREE_QUEUE)" in (
        capsys.readouterr().err
    )


def test_what_kubernetes_says_of_a_service_is_no_port(parsed: Callable[..., argparse.Namespace]) -> None:
    assert parsed(*VERIFY, DYNATREE_PORT="tcp://10.0.0.1:8000").listen == "localhost:50052"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--port", "7"], "localhost:7"),
        (["--host", "0.0.0.0"], "0.0.0.0:50052"),
        (["--port", "7", "--host", "::1"], "[::1]:7"),
        (["--listen", "unix:x"], "unix:x"),
    ],
)
def test_host_and_port_are_parts_of_listen(
    parsed: Callable[..., argparse.Namespace], words: list[str], address: str
) -> None:
    assert parsed(*VERIFY, *words).listen == address


def test_serve_passes_on_what_the_services_take(parsed: Callable[..., argparse.Namespace]) -> None:
    """Every option of `verify` and `draft` is an option of `serve`, except those for addresses and authentication."""
    own = {"listen", "verify", "client_ca", "reflection", "target_model", "draft_model", "tls_cert", "tls_key"}
    names = {action.dest for line, action in service_lines() if line[0] in ("verify", "draft")}
    assert {name for name in names if not name.startswith("verify_")} - own <= set(vars(parsed("serve", *PAIR)))
    options = parsed(
        *(
            "serve",
            *PAIR,
            "--resident-layers",
            "all",
            "--fixed-rows",
            "off",
            "--set",
            "depth=3",
            "--set",
            "root=single",
            "--metrics",
            "h:7",
        ),
        *("--kv-tokens", "99", "--prefix-cache", "off", "--threads", "1", "--insecure"),
    )
    verify, draft = serve_settings(options)
    for each in (verify, draft):
        model = each.model
        assert (model.fixed_rows, model.kv_tokens, model.threads, each.limits.prefix_cache) == ((), 99, 1, False)
        each.operation.security.check_plain(each.operation.metrics)
    assert (verify.model.resident_layers, verify.operation.metrics) == (ALL_LAYERS, "h:8")
    assert (draft.policy.settings, draft.operation.metrics) == ({"depth": 3.0, "root": "single"}, "h:7")


def test_services_without_options_have_these_limits(parsed: Callable[..., argparse.Namespace]) -> None:
    for each in serve_settings(parsed("serve", *PAIR)):
        assert (each.limits.sessions, each.limits.queue, each.limits.max_tree_nodes) == (16, 256, 256)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ([], ("auto", "auto")),
        (["--weights", "int8"], ("int8", "int8")),
        (["--draft-weights", "int4"], ("auto", "int4")),
        (["--weights", "int8", "--draft-weights", "auto"], ("int8", "auto")),
    ],
)
def test_the_draft_may_have_other_weights(
    parsed: Callable[..., argparse.Namespace], options: list[str], weights: tuple[str, str]
) -> None:
    verify, draft = serve_settings(parsed("serve", *PAIR, *options))
    assert (verify.model.weights, draft.model.weights) == weights


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_targets_own_copy_has_its_files_and_options(
    parsed: Callable[..., argparse.Namespace], weights: str
) -> None:
    line = ("serve", "--target-model", "embedded", "--draft-model", f"self:{weights}", "--dtype", "bfloat16")
    verify, draft = serve_settings(parsed(*line))
    assert draft.copy
    assert verify.model.copy == draft.model
    assert draft.model is not None
    assert (draft.model.model, draft.model.dtype) == (verify.model.model, "bfloat16")
    assert (draft.model.weights, verify.model.weights) == (weights, "auto")
    assert not serve_settings(parsed("serve", *PAIR))[1].copy


@pytest.mark.parametrize(
    ("draft", "options", "words"),
    [
        ("self", [], "--draft-model self names no copy of the target; expected self:int8 or self:int4"),
        ("self:int3", [], "--draft-model self:int3 names no copy of the target; expected self:int8 or self:int4"),
        ("self:int4", ["--draft-weights", "int4"], "--draft-model self:int4 and --draft-weights cannot be combined"),
        ("self:int8", ["--weights", "int4"], "has no fewer bits than the target with --weights int4"),
    ],
)
def test_a_copy_that_is_none_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], draft: str, options: list[str], words: str
) -> None:
    assert main(["serve", "--target-model", "embedded", "--draft-model", draft, "--port", "0", *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [VERIFY, ["serve", *PAIR]])
@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        (1, ["--device", "cpu"], "measured on a GPU only, but the device is a CPU"),
        (0, [], "measured on a GPU only, but the device is a CPU"),
        (1, ["--fixed-rows", "64"], "expected --fixed-rows auto"),
        (1, ["--fixed-rows", "off", "--device", "cuda"], "expected --fixed-rows auto"),
        (1, ["--fixed-rows-file", "/"], "--fixed-rows-file is /, which is not a file"),
        (1, ["--fixed-rows-file", ""], "--fixed-rows-file is ., which is not a file"),
        (1, ["--traces", "nowhere"], "--traces is"),  # a later check
    ],
)
def test_a_file_for_rows_is_refused_where_none_are_measured(
    command: list[str],
    gpus: int,
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dynatree.cli.gpus._count", lambda: gpus)
    monkeypatch.setattr("dynatree.cli.gpus._ROCM", Path("/no/driver"))
    assert main([*command, "--port", "0", "--fixed-rows-file", "rows.json", *options]) == 1
    assert words in capsys.readouterr().err


def test_a_draft_service_is_told_how_to_name_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "--draft-model", "self:int4", "--verify", "localhost:1"]) == 1
    assert "expected --draft-model with the target's folder, hub name or file, and --weights int4" in (
        capsys.readouterr().err
    )


def test_without_a_draft_model_its_variables_have_no_effect_and_the_log_names_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deployments give both services the same dtype, device, weights and slots."""
    for name in ("check_draft", "configure_logging", "without_torch"):
        monkeypatch.setattr(f"dynatree.cli.draft.{name}", lambda *_: None)
    monkeypatch.setattr("dynatree.draft.serve_ngrams.run", lambda settings: int(settings.model is not None))
    for name, value in (("KV_TOKENS", "4096"), ("WEIGHTS", "auto"), ("DEVICE", "cuda"), ("DTYPE", "bfloat16")):
        monkeypatch.setenv(f"DYNATREE_{name}", value)
    assert main(["draft", "--draft-model", "none", "--verify", "localhost:1"]) == 0
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "without a draft model, --device, --dtype, --kv-tokens have no effect"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("device", "cpu"), ("dtype", "float32"), ("weights", "int8"), ("threads", "1"), ("fixed-rows", "off")),
        *(("max-context", "100"), ("kv-tokens", "100"), ("draft-ahead", "on")),
    ],
)
def test_without_a_draft_model_its_options_are_refused(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line gives the option, whatever the environment gives as well."""
    for from_environment in (False, True):
        if from_environment:
            monkeypatch.setenv(f"DYNATREE_{option.replace('-', '_').upper()}", value)
        command = ["draft", "--draft-model", "none", "--verify", "localhost:1", f"--{option}", value]
        assert main(command) == 1
        assert f"--{option} is an option of the draft model, and --draft-model is none" in capsys.readouterr().err


def test_packed_weights_are_not_rounded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(save_packed(tmp_path, "gptq", 4)[0])
    capsys.readouterr()
    for line in (
        ["serve", "--target-model", target, "--draft-model", "self:int4", "--port", "0"],
        ["draft", "--draft-model", target, "--weights", "int4", "--verify", "localhost:1", "--port", "0"],
    ):
        assert main(line) == 1
        assert "has gptq weights, which cannot be rounded again to int4" in capsys.readouterr().err


def test_the_copy_of_a_file_of_blocks_is_found(tmp_path: Path) -> None:
    check_pair(str(save_gguf(tmp_path / "target.gguf", ("Q4_1",), seed=1)), "self:int4")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example_that_is_a_command_line(name: str, parsed: Callable[..., argparse.Namespace]) -> None:
    words = shlex.split(importlib.import_module(COMMANDS[name][1]).EXAMPLE)
    assert words[:2] == ["dynatree", name]
    assert parsed(*words[1:])
