"""Tests that a model without weights that a checkpoint fills is the model that transformers loads."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dynatree.common.errors import StartupError
from dynatree.engine.model.checkpoint import Checkpoint, saved_buffers
from dynatree.engine.model.composite import KEY_MAPPING, text_config_of
from dynatree.engine.model.skeleton import skeleton
from tests.support.door import saved
from tests.support.families import FAMILIES, NOT_TINY, tiny_config, tiny_model

SHORT = ("ernie4_5_moe", "gemma4_text", "glm4_moe", "llama")
NOT_SERVED = {"deepseek_v4", "gpt_neo", "zaya"}
CASES = sorted(set(FAMILIES) - NOT_TINY - NOT_SERVED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CASES]
)
def test_a_filled_model_is_the_one_that_transformers_loads(tmp_path, family, dtype):
    """Its parameters and saved buffers have equal dtypes and bits; or the checkpoint is refused."""
    try:
        tiny = tiny_model(tiny_config(family))
        for buffer in saved_buffers(tiny).values():  # which are neutral, as those of a trained model are not
            buffer += torch.ones(()).to(buffer.dtype)
        folder = saved(tiny, tmp_path / "model")
        config = text_config_of(AutoConfig.from_pretrained(folder))
        expected, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, key_mapping=KEY_MAPPING, output_loading_info=True
        )
    except Exception as error:
        pytest.skip(f"transformers cannot save or load it: {error}")
    model = skeleton(expected.config, dtype)
    files = Checkpoint(folder, family, model)
    if found["missing_keys"] or not all(name in files for name, _ in model.named_parameters()):
        with pytest.raises(StartupError, match="does not contain"):
            files.fill(model)
        return
    files.fill(model)
    if family == "youtu":  # of which transformers forgets the embedding of the padding token
        table = expected.get_input_embeddings()
        table.weight.data[table.padding_idx] = model.get_input_embeddings().weight[table.padding_idx]
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
    assert [name for name, each in ours.items() if not torch.equal(each, theirs[name])] == []
