import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from bagrpo.config import MeshConfig
from bagrpo.models import params
from bagrpo.models.family import architecture
from bagrpo.sharding import SAMPLE, TRAIN, make_mesh, param_shardings

ARCH = architecture(
    {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
    }
)


def mesh_of(**sizes):
    return make_mesh(MeshConfig(**sizes))


def test_minus_one_takes_the_rest_of_the_devices():
    assert mesh_of(data=2, fsdp=-1, tensor=2).shape == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3, "fsdp": 1}, "needs 3 devices and there are 8"),
        ({"data": 3}, "3 does not divide the 8 devices, so nothing is left for mesh.fsdp"),
        ({"data": -1, "fsdp": -1}, "at most one may be -1"),
        ({"tensor": 0}, "must be positive"),
    ],
)
def test_an_impossible_mesh_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        mesh_of(**sizes)


def test_parameters_and_so_moments_are_split_over_fsdp_and_tensor():
    layout = param_shardings(params.specs(ARCH), mesh_of(data=2, fsdp=2, tensor=2))
    assert layout["blocks"]["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert layout["blocks"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert layout["embed"].spec == PartitionSpec("tensor", "fsdp")


def test_sampling_keeps_parameters_whole_along_fsdp():
    layout = param_shardings(params.specs(ARCH), mesh_of(data=2, fsdp=2, tensor=2), SAMPLE)
    assert all("fsdp" not in x.spec for x in jax.tree.leaves(layout))


def test_few_key_heads_are_kept_by_every_device_that_needs_them():
    layout = param_shardings(params.specs(ARCH), mesh_of(fsdp=2, tensor=4))
    assert layout["blocks"]["k"].spec == PartitionSpec(None, "fsdp", None, None)


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"embed": 60}, {"fsdp": 8}, "'blocks/down': dimension 'embed' of size 60 .* axis 'fsdp'"),
        ({"heads": 6, "kv_heads": 6}, {"tensor": 4}, "'blocks/k': dimension 'kv_heads' of size 6"),
        ({"heads": 6}, {"tensor": 4}, "'blocks/o': dimension 'heads' of size 6 .* axis 'tensor'"),
        ({"vocab": 321}, {"tensor": 2}, "dimension 'vocab' of size 321 .* mesh axis 'tensor'"),
    ],
)
def test_a_dimension_that_does_not_divide_is_named(change, sizes, message):
    arch = dataclasses.replace(ARCH, **change)
    with pytest.raises(ValueError, match=message):
        param_shardings(params.specs(arch), mesh_of(**sizes))


def test_a_parameter_without_a_rule_is_named():
    table = {meaning: axis for meaning, axis in TRAIN.items() if meaning != "ffw"}
    with pytest.raises(ValueError, match="no sharding rule for axis 'ffw' of parameter 'blocks/"):
        param_shardings(params.specs(ARCH), mesh_of(), table)
