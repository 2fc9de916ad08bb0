"""Counts of compiled programs against what can be counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bagrpo import sharding
from bagrpo.config import MeshConfig
from bagrpo.plan.cost import cost


def compiled(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def test_a_loop_counts_as_often_as_it_runs():
    def five(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    found = cost(compiled(five, (7, 16), (5, 16, 16)))
    assert found.flops == 5 * 2 * 7 * 16 * 16
    assert found.bytes >= 4 * (5 * 16 * 16)


def test_a_loop_that_data_end_takes_the_turns_it_is_given():
    def some(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    text = compiled(some, (4, 8), (8, 8))
    one = 2 * 4 * 8 * 8
    assert [cost(text, turns=n).flops for n in (1, 3)] == [one, 3 * one]


def test_collectives_are_bytes_that_come_in():
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    def turns(x):
        def body(x, _):
            whole = jax.lax.all_gather(x, "fsdp", tiled=True)
            return jax.lax.psum_scatter(jnp.sin(whole), "fsdp", tiled=True), None

        x, _ = jax.lax.scan(body, x, None, length=3)
        return x + jax.lax.psum(x, "tensor")

    found = cost(compiled(turns, (64, 32), in_shardings=rows)).collectives
    part = 16 * 32 * 4
    assert found["all-gather"] == 3 * 3 * part  # three parts of others, three times
    assert found["reduce-scatter"] == 3 * 3 * part
    assert found["all-reduce"] == part  # 2 x 1 / 2 over two devices


HEAD = "HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"


def of(*lines):
    return cost(HEAD + "".join(f"  {line}\n" for line in lines) + "}\n")


def test_tpu_writes_products_as_convolutions():
    found = of(
        "%a = bf16[14,1280,1536]{2,1,0} parameter(0)",
        "%w = bf16[1536,8960,1]{1,0,2} parameter(1)",
        "ROOT %c = bf16[14,1280,8960]{2,1,0} convolution(%a, %w), window={size=1}, "
        "dim_labels=0bf_io0->0bf",
    )
    assert found.flops == 2 * 14 * 1280 * 1536 * 8960


def test_a_batched_product_with_padding_counts_only_what_meets():
    # 8 separate products of (16, 32) and (32, 64): the window pads so that each meets its own.
    found = of(
        "%a = f32[8,16,32]{2,1,0} parameter(0)",
        "%w = f32[8,32,64]{2,1,0} parameter(1)",
        "ROOT %c = f32[8,16,64]{2,1,0} convolution(%a, %w), "
        "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
    )
    assert found.flops == 8 * 2 * 16 * 32 * 64


@pytest.mark.parametrize(
    "groups",
    [
        "[2,4]<=[8]",
        "{{0,1,2,3},{4,5,6,7}}",
        "mesh['a'=2,'b'=4] {'b'}",
        "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
    ],
)
def test_devices_of_a_collective_in_every_spelling(groups):
    found = of(
        "%a = bf16[2,64]{1,0} parameter(0)",
        f"ROOT %g = bf16[8,64]{{1,0}} all-gather(%a), channel_id=1, replica_groups={groups}, "
        "dimensions={0}",
    )
    assert found.collectives == {"all-gather": 3 * 2 * 64 * 2}


def test_stages_of_one_collective_count_once():
    text = """HloModule m

%stage (p: bf16[64]) -> bf16[64] {
  %p = bf16[64]{0} parameter(0)
  ROOT %s = bf16[64]{0} collective-permute(%p), channel_id=5, source_target_pairs={{0,1}}
}

ENTRY %main (a: bf16[64]) -> bf16[64] {
  %a = bf16[64]{0} parameter(0)
  %f = bf16[64]{0} fusion(%a), kind=kLoop, calls=%stage
  ROOT %g = bf16[64]{0} fusion(%f), kind=kLoop, calls=%stage
}
"""
    assert cost(text).collectives == {"collective-permute": 128}


def test_what_is_in_fast_memory_is_not_moved():
    found = of("%a = bf16[64]{0:T(256)S(1)} parameter(0)", "ROOT %s = bf16[64]{0} sine(%a)")
    assert found.bytes == 128  # the result


def test_a_slice_moves_what_is_sliced_and_an_update_what_is_updated():
    text = """HloModule m

%inner (p: f32[100,64], i: s32[]) -> f32[1,64] {
  %p = f32[100,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,64]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,64}
}

ENTRY %main (a: f32[100,64], n: s32[]) -> f32[1,64] {
  %a = f32[100,64]{1,0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %f = f32[1,64]{1,0} fusion(%a, %n), kind=kLoop, calls=%inner
}
"""
    assert cost(text).bytes == 2 * 64 * 4 + 4


def test_splash_attention_counts_the_blocks_that_it_visits():
    found = of(
        "%m = s8[1,4,4]{2,1,0} parameter(0)",
        "%q = bf16[7,2048,128]{2,1,0} parameter(1)",
        "ROOT %splash_mqa_fwd_segmented.2 = bf16[7,2048,128]{2,1,0} custom-call(%m, %q), "
        'custom_call_target="tpu_custom_call"',
    )
    # Of 4 x 4 blocks of 512 tokens, 10 on and below the diagonal; two products each.
    assert found.flops == 2 * 2 * 7 * 10 * 512 * 512 * 128


def test_what_is_fetched_ahead_is_read_once():
    fetched = of(
        "%a = bf16[6,8,128]{2,1,0} parameter(0)",
        "%c = (bf16[6,8,128]{2,1,0:S(1)}, bf16[6,8,128]{2,1,0}, u32[]{:S(2)}) copy-start(%a)",
        "ROOT %d = bf16[6,8,128]{2,1,0:S(1)} copy-done(%c)",
    )
    assert fetched.bytes == 6 * 8 * 128 * 2 + 4  # and a flag
    sliced = of(
        "%a = bf16[6,8,128]{2,1,0} parameter(0)",
        "%s = ((bf16[6,8,128]{2,1,0}), bf16[2,8,128]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), "
        "slice={[0:2], [0:8], [0:128]}",
        "ROOT %d = bf16[2,8,128]{2,1,0:S(1)} slice-done(%s)",
    )
    assert sliced.bytes == 2 * 8 * 128 * 2
