import dataclasses

import jax
import numpy as np
import pytest
from engines import (
    MAX_PROMPT,
    MAX_RESPONSE,
    NAMES,
    alone,
    engine,
    generate,
    mesh_of,
    model,
    next_logits,
    recomputed,
    requests,
    tokens,
)

from bagrpo.config import SampleConfig
from bagrpo.sample.engine import Engine
from bagrpo.sample.request import Request, Sampling

GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=1.3)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_samples_are_those_of_decoding_each_prompt_alone(name):
    wanted = requests()
    found = generate(engine(name), wanted, GREEDY)
    for request in wanted:
        want = alone(name, request.prompt)
        assert [found[request.problem, g].tokens for g in range(2)] == [want, want]


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_that_the_trainer_recomputes(name):
    wanted = requests()
    found = generate(engine(name), wanted, WARM)
    recomputed_, recorded = recomputed(name, wanted, found, temperature=1.3)
    np.testing.assert_allclose(recorded, recomputed_, atol=2e-5, rtol=0)


def test_log_probs_of_truncated_and_greedy_samples_are_before_truncation():
    wanted = requests()
    cut = Sampling(temperature=0.7, top_k=4, top_p=0.8, min_p=0.01)
    for sampling, temperature in ((cut, 0.7), (GREEDY, 1.0)):
        found = generate(engine(), wanted, sampling)
        recomputed_, recorded = recomputed("qwen2", wanted, found, temperature)
        np.testing.assert_allclose(recorded, recomputed_, atol=2e-5, rtol=0)


def test_bfloat16_samples_have_the_trainers_bfloat16_log_probs():
    """Both are within 2 % of the logits' deviation of float32 (tests/models), so 4 % apart."""
    wanted = requests()
    arch, params = model("qwen2")
    row_1T = np.asarray([wanted[1].prompt], np.int32)
    deviation = float(next_logits(params, arch, row_1T, np.int32(MAX_PROMPT)).std())
    found = generate(engine(dtype="bfloat16"), wanted, WARM)
    recomputed_, recorded = recomputed("qwen2", wanted, found, 1.3, dtype="bfloat16")
    assert np.abs(recorded - recomputed_).mean() < 0.04 * deviation / 1.3


def test_the_first_token_is_distributed_as_the_softmax_says():
    """Chi-square over 4000 samples of one problem: their noise is as good as independent."""
    arch, params = model("qwen2")
    (request,) = requests(1, samples=4000)
    row_1T = np.zeros((1, MAX_PROMPT + MAX_RESPONSE), np.int32)
    row_1T[0, : len(request.prompt)] = request.prompt
    logit_V = next_logits(params, arch, row_1T, np.int32(len(request.prompt)))
    want_V = 4000 * np.asarray(jax.nn.softmax(logit_V / 2))
    found = generate(engine(slots=64), [request], Sampling(temperature=2.0, max_tokens=1))
    count_V = np.bincount([c.tokens[0] for c in found.values()], minlength=arch.vocab)
    often_V = want_V >= 5
    want = np.append(want_V[often_V], want_V[~often_V].sum())
    count = np.append(count_V[often_V], count_V[~often_V].sum())
    freedom = len(want) - 1
    assert freedom > 20
    assert ((count - want) ** 2 / want).sum() <= freedom + 5 * np.sqrt(2 * freedom)


SHAPES = [
    {"slots": 1, "prefill": 1, "steps": 1},
    {"slots": 16, "steps": 3, "refill": 2},
    {"slots": 64, "prefill": 8, "slot_buckets": (2, 4, 8, 64), "steps": 4},
    {"slots": 8, "cache_buckets": (8, 17, 30, 48), "prompt_buckets": (4, 24), "steps": 2},
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_slots_buckets_and_steps_change_no_sample(shapes):
    wanted = requests(9, samples=3)
    want = generate(engine(), wanted, WARM)
    found = generate(engine(**shapes), wanted, WARM)
    assert tokens(found) == tokens(want)


def test_order_and_company_change_no_sample():
    """More requests than slots, against each of them with all slots for itself."""
    wanted = requests(9, samples=3)
    want = tokens(generate(engine(), wanted, WARM))
    backwards = tokens(generate(engine(), wanted[::-1], WARM))
    one_by_one = {}
    for request in wanted:
        one_by_one |= tokens(generate(engine(), [request], WARM))
    assert backwards == want == one_by_one


def test_fewer_samples_are_the_first_of_more():
    wanted = requests(3, samples=5)
    want = tokens(generate(engine(), wanted, WARM))
    fewer = [dataclasses.replace(request, samples=2) for request in wanted]
    found = tokens(generate(engine(), fewer, WARM))
    assert found == {key: value for key, value in want.items() if key[1] < 2}


def test_seed_step_stream_problem_and_sample_each_have_their_own_noise():
    (request,) = requests(1)
    twin = dataclasses.replace(request, problem=request.problem + 1)
    found = [
        *tokens(generate(engine(), [request, twin], WARM)).values(),
        *tokens(generate(engine(), [request], WARM, seed=1)).values(),
        *tokens(generate(engine(), [request], WARM, step=4)).values(),
        *tokens(generate(engine(), [request], WARM, stream="evaluation")).values(),
    ]
    assert len({tuple(tokens) for tokens in found}) == len(found) == 10


def test_each_position_has_its_own_noise():
    """So hot that all 320 tokens are about equally likely: 16 draws give 15.6 different ones."""
    found = generate(engine(), requests(), Sampling(temperature=1e4))
    different = [len(set(completion.tokens)) for completion in found.values()]
    assert len(different) == 10
    assert np.mean(different) >= 15


def test_all_of_an_id_keys_the_noise():
    (request,) = requests(1, samples=1)
    high = dataclasses.replace(request, problem=request.problem + 2**31)
    found = tokens(generate(engine(), [request, high], WARM))
    assert len({tuple(tokens) for tokens in found.values()}) == 2


ON_MESHES = [
    ("qwen2", (8, 1, 1)),
    ("qwen2", (1, 2, 4)),  # more devices than key heads
    ("gemma3", (2, 2, 2)),
    ("qwen3_moe", (1, 4, 2)),
]


@pytest.mark.parametrize(("name", "mesh"), ON_MESHES, ids=str)
def test_samples_are_the_same_on_every_mesh(name, mesh):
    wanted = requests(7, samples=3)
    options = {"slots": 16, "slot_buckets": (8, 16), "cache_buckets": (16, 40)}
    want = generate(engine(name, **options), wanted, WARM)
    found = generate(engine(name, mesh=mesh, **options), wanted, WARM)
    assert tokens(found) == tokens(want)


@pytest.mark.parametrize(
    ("mesh", "rows"), [((8, 1, 1), 2), ((4, 2, 1), 2), ((2, 4, 1), 4), ((1, 2, 4), 2)], ids=str
)
def test_prefilled_prompts_do_not_grow_with_data(mesh, rows):
    programs = engine(mesh=mesh, slots=16).programs
    assert programs.prefill_rows == rows
    prompts = programs.lower(("prefill", programs.prompts[-1])).out_info
    assert {x.shape[0] for x in jax.tree.leaves(prompts)} == {rows}


def test_new_weights_take_effect():
    params = model("qwen2")[1]
    shared, wanted = engine(), requests(2)
    before = tokens(generate(shared, wanted, GREEDY))
    shared.load({**params, "embed": params["embed"][::-1]})
    other = tokens(generate(shared, wanted, GREEDY))
    shared.load(params)
    assert tokens(generate(shared, wanted, GREEDY)) == before != other


def test_parameters_of_another_dtype_are_taken():
    params = model("qwen2")[1]
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    shared, wanted = engine(), requests(2)
    shared.load(rounded)
    found = tokens(generate(shared, wanted, GREEDY))
    shared.load(jax.tree.map(lambda x: x.astype("float32"), rounded))
    want = tokens(generate(shared, wanted, GREEDY))
    shared.load(params)
    assert found == want


def test_once_compiled_nothing_compiles_again():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **kwargs: compiled.append(event)
    )
    shapes = {"slots": 8, "slot_buckets": (3, 8), "cache_buckets": (16, 48)}
    fresh = engine("llama_tied", text=True, **shapes)
    names = fresh.compile()
    assert all(size > 0 for size in names.values())
    settings = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "stop": ("一",),
        "eos_ids": (5, 6, 7),
        "max_tokens": 3,
    }
    params = model("llama_tied")[1]
    fresh.load(params)
    compiled.clear()
    fresh.load(params)
    for count in (1, 3, 9):
        list(fresh.generate(requests(count), Sampling(), seed=count, step=1))
    for name, value in settings.items():
        changed = Sampling(**{name: value})
        list(fresh.generate(requests(9), changed, seed=0, step=2, stream="evaluation"))
    assert not [event for event in compiled if "compile" in event]


def test_completions_come_while_others_are_under_way():
    short, long_ = requests(2, samples=1)
    shared = engine(slots=2, steps=2)
    eos = alone("qwen2", short.prompt, 1)[0]
    arriving = shared.generate([long_, short], Sampling(0.0, eos_ids=(eos,)), seed=0, step=0)
    first, second = list(arriving)
    assert (first[0], second[0]) == (1, 0)
    assert len(first[2].tokens) == 1 < len(second[2].tokens)


@pytest.mark.parametrize("length", [0, MAX_PROMPT + 1])
def test_a_prompt_that_does_not_fit_is_refused(length):
    with pytest.raises(ValueError, match=f"request 1 .problem 8. has a prompt of {length} tokens"):
        engine().generate([Request([1], 7), Request([1] * length, 8)], GREEDY, seed=0, step=0)


@pytest.mark.parametrize(
    ("request_", "sampling", "named"),
    [
        (Request([1], -1), GREEDY, "problem id -1"),
        (Request([1], 2**32), GREEDY, "problem id 4294967296"),
        (Request([1], 1, samples=0), GREEDY, "0 samples"),
        (Request([1], 1), Sampling(max_tokens=MAX_RESPONSE + 1), "max_tokens = 17"),
        (Request([1], 1), Sampling(stop=("a",)), "tokenizer"),
    ],
)
def test_what_cannot_be_sampled_is_refused(request_, sampling, named):
    with pytest.raises(ValueError, match=named):
        engine().generate([request_], sampling, seed=0, step=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_response": 10**6}, "positions"),
        ({"config": SampleConfig(cache_buckets=(16,))}, "cache_buckets"),
        ({"config": SampleConfig(prompt_buckets=(8,))}, "prompt_buckets"),
        ({"eos_ids": range(9)}, "end-of-sequence"),
    ],
)
def test_an_engine_that_could_not_hold_its_samples_is_refused(changes, named):
    arch, _ = model("qwen2")
    settings = {"config": SampleConfig(), "max_prompt": MAX_PROMPT, "max_response": MAX_RESPONSE}
    with pytest.raises(ValueError, match=named):
        Engine(arch, mesh_of(1, 1, 1), compute_dtype="float32", **{**settings, **changes})


def test_an_engine_without_weights_says_so():
    arch, _ = model("qwen2")
    config = SampleConfig()
    bare = Engine(
        arch, mesh_of(1, 1, 1), compute_dtype="float32", config=config, max_prompt=8, max_response=8
    )
    with pytest.raises(ValueError, match="load"):
        bare.generate(requests(1), GREEDY, seed=0, step=0)
