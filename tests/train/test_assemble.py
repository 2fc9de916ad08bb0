import dataclasses

import numpy as np
import pytest
from tiny import ALL_TERMS, batch_config, rows

from bagrpo.train.assemble import Row, cut, microbatches, response_buckets, shapes

MANY = batch_config(problems=16, group=4, max_prompt=64, max_response=256, microbatch_tokens=1024)
MANY = MANY.model_copy(update={"prompt_buckets": (16, 64)})


def random_rows(seed=0, count=64):
    random = np.random.default_rng(seed)
    return [
        Row([1] * int(random.integers(1, 65)), [2] * int(random.integers(0, 257)), group=i // 4)
        for i in range(count)
    ]


@pytest.mark.parametrize("row_shards", [1, 2, 8])
def test_every_row_is_in_one_microbatch_of_a_known_shape(row_shards):
    known = set(shapes(MANY, row_shards))
    for seed in range(5):
        made = random_rows(seed)
        pieces = list(cut(made, MANY, row_shards))
        assert sorted(i for _, places in pieces for i in places.values()) == list(range(64))
        for shape, places in pieces:
            assert shape in known
            assert shape.rows % row_shards == 0
            assert max(places) < shape.rows
            assert all(len(made[i].prompt) <= shape.prompt for i in places.values())
            assert all(len(made[i].response) <= shape.response for i in places.values())


@pytest.mark.parametrize("share", [2, 4])
def test_rows_that_stand_together_have_one_prompt(share):
    """Groups of 4, of which some rows are missing: a pack may have gaps, but never two prompts."""
    config = MANY.model_copy(update={"share_prompt": share})
    random = np.random.default_rng(0)
    made = [
        Row([i // 4] * 9, [2] * int(random.integers(0, 257)), group=i // 4)
        for i in range(64)
        if i % 7
    ]
    pieces = list(cut(made, config, 2))
    assert sorted(i for _, places in pieces for i in places.values()) == list(range(len(made)))
    for shape, places in pieces:
        assert shape in shapes(config, 2)
        assert shape.rows % (2 * share) == 0
        for first in range(0, shape.rows, share):
            pack = [made[places[b]] for b in range(first, first + share) if b in places]
            assert len({row.group for row in pack}) <= 1
            assert not pack or first in places  # whose prompt is read


def test_sharing_must_divide_the_group():
    with pytest.raises(ValueError, match="share_prompt = 3 must divide group = 4"):
        batch_config(share_prompt=3)


def test_shapes_hold_what_a_device_takes_and_divide_an_update_evenly():
    for shape in shapes(MANY, 2):
        number = -(-32 // (1024 // shape.positions))  # of micro-batches, if all 64 rows are so long
        assert shape.rows == 2 * -(-32 // number)


def test_sorting_by_length_halves_the_padding_of_mixed_lengths():
    """Lengths uniform in 0..256: whole rows would be 320 positions, half of them padding."""
    made = random_rows(3)
    used = sum(len(row.prompt) + len(row.response) for row in made)
    padded = sum(shape.tokens for shape, _ in cut(made, MANY, 1))
    assert used / (64 * 320) < 0.55
    assert used / padded > 0.6


def test_response_buckets_are_halves_of_the_longest():
    assert response_buckets(batch_config(max_response=300)) == (38, 75, 150, 300)
    assert response_buckets(batch_config(max_response=16)) == (16,)


def test_a_batch_holds_each_row_where_the_loss_looks_for_it():
    made = rows()
    for batch, places in microbatches(made, ALL_TERMS, batch_config(), 1):
        for b, i in places.items():
            row, length = made[i], len(made[i].response)
            start = batch.prompt_B[b]
            assert batch.tokens_BT[b, :start].tolist() == list(row.prompt)
            assert batch.tokens_BT[b, start : start + length].tolist() == list(row.response)
            assert batch.mask_BR[b].sum() == length * row.trained
            np.testing.assert_array_equal(batch.old_logp_BR[b, :length], np.float32(row.old_logps))
        assert not batch.mask_BR[len(places) :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "row 3 has a prompt of 0 tokens"),
        ({"prompt": [1] * 9}, "row 3 has a prompt of 9 tokens; allowed are 1 to batch.max_prompt"),
        ({"response": [1] * 17}, "row 3 has a response of 17 tokens"),
        ({"ref_logps": None}, "some have not"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(change, message):
    made = rows()
    made[3] = dataclasses.replace(made[3], **change)
    with pytest.raises(ValueError, match=message):
        microbatches(made, ALL_TERMS, batch_config(), 1)


def test_buckets_must_rise_to_the_limit():
    with pytest.raises(ValueError, match="response_buckets = \\[16, 8\\] must rise"):
        batch_config(response_buckets=(16, 8))
    with pytest.raises(ValueError, match="must rise to max_prompt = 8"):
        batch_config(prompt_buckets=(2, 4))
