"""Tests the routers of all families with mixtures: a row's experts and weights do not depend on the rows beside it."""

import pytest
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING

from dynatree.engine.adapters import routers
from dynatree.engine.adapters.registry import adapt
from dynatree.engine.cpu.native_experts import are_experts
from tests.support.families import FAMILIES, NOT_TINY, tiny_config, tiny_model

ROWS = 40
NOT_SERVED = {"deepseek_v4", "inkling2_text", "inkling_text", "zaya"}
DTYPES = (torch.float32, torch.bfloat16)


class Chosen(Exception):  # noqa: N818
    """Ends a mixture's forward pass with what its experts would compute."""


@torch.inference_mode()
def rows_with_other_routes(family, dtype):
    """The numbers of rows that change a row's routes, in a model's last mixture; None if it has no mixture."""
    model = tiny_model(tiny_config(family))
    for weight in model.parameters():
        weight.data = weight.to(dtype)
    adapt(model)
    blocks = [(block, each) for block in model.modules() for each in block.children() if are_experts(each)]
    if not blocks:
        return None
    block, experts = blocks[-1]

    def choose(_, args, options):
        raise Chosen(args + tuple(options.values()))

    def routes(rows):
        with pytest.raises(Chosen) as chosen:
            block(rows[None])
        ((_, *found),) = chosen.value.args
        return [each.reshape(len(rows), -1) for each in found if isinstance(each, torch.Tensor)]

    experts.register_forward_pre_hook(choose, with_kwargs=True)
    rows = torch.randn(ROWS, model.config.get_text_config().hidden_size, generator=torch.manual_seed(0)).to(dtype)
    alone = [torch.cat(each) for each in zip(*map(routes, rows.split(1)), strict=True)]
    assert len(alone) == 2
    return [
        count
        for count in range(2, ROWS + 1)
        if not all(map(torch.equal, routes(rows[:count]), (each[:count] for each in alone)))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_routes_in_any_company(dtype):
    assert rows_with_other_routes("kimi_linear", dtype) == []


def test_arguments_with_names_count():
    rows, weight, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)
    expected = functional.linear(rows.double(), weight.double(), bias.double()).float()
    with routers._ROUNDED:
        assert torch.equal(functional.linear(rows, weight, bias=bias), expected)
        assert torch.equal(functional.linear(input=rows, weight=weight, bias=bias), expected)


@pytest.mark.long
def test_a_row_has_the_same_routes_in_every_family():
    families = [
        family
        for family in set(FAMILIES) - NOT_TINY - NOT_SERVED
        if any("expert" in field for field in vars(CONFIG_MAPPING[family]().get_text_config()))
    ]
    found = {(family, dtype): rows_with_other_routes(family, dtype) for family in families for dtype in DTYPES}
    assert {case: rows for case, rows in found.items() if rows} == {}
    assert sum(rows is not None for rows in found.values()) > 80
