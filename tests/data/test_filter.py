import logging
import math
import random

import pytest

from bagrpo.data.filter import Collector
from bagrpo.records import Completion, Problem, Rollout, Verdict


def make_group(problem, correct, rewards=None):
    """A group with the given correctness, and rewards that by default contradict it."""
    item = Problem(id=problem, messages=[], answer="1", kind="math")
    completion = Completion(tokens=[1], logps=[0.0], finish="stop")
    rewards = rewards if rewards is not None else [float(i) for i in range(len(correct))]
    return [
        Rollout(item, [1], completion, Verdict(reward=reward, correct=right), sample)
        for sample, (right, reward) in enumerate(zip(correct, rewards, strict=True))
    ]


def problems_of(collector):
    return [group[0].problem.id for group in collector.groups]


def test_correctness_decides_and_shaped_reward_does_not():
    collector = Collector(3, 1)
    collector.add(
        [
            make_group(0, [True, True], [1.0, 0.5]),
            make_group(1, [False, False], [0.0, 0.5]),
            make_group(2, [True, False], [1.0, 1.0]),
        ]
    )
    assert problems_of(collector) == [2]
    assert (collector.all_correct, collector.all_wrong) == (1, 1)


def test_the_first_mixed_groups_fill_the_batch_and_every_group_is_accounted_for():
    rng = random.Random(0)
    for _ in range(100):
        wanted, max_rounds, given = rng.randint(1, 6), rng.randint(1, 4), []
        collector = Collector(wanted, max_rounds)
        while not collector.done:
            groups = [
                make_group(len(given) + i, [rng.random() < 0.5 for _ in range(3)])
                for i in range(rng.randint(0, 5))
            ]
            given += groups
            collector.add(groups)
        mixed = [g for g in given if 0 < sum(r.verdict.correct for r in g) < 3]
        assert collector.groups == mixed[:wanted]
        assert collector.surplus == max(0, len(mixed) - wanted)
        assert collector.all_correct == sum(all(r.verdict.correct for r in g) for g in given)
        assert collector.all_wrong == sum(not any(r.verdict.correct for r in g) for g in given)
        assert collector.missing == 0 or collector.rounds == max_rounds
        assert collector.rounds <= max_rounds


def test_samples_without_a_reward_decide_nothing():
    collector = Collector(3, 1)
    collector.add(
        [
            make_group(0, [True, False], [1.0, math.nan]),
            make_group(1, [False, False, True], [math.nan, 0.0, 1.0]),
            make_group(2, [False, False], [math.nan, math.nan]),
        ]
    )
    assert problems_of(collector) == [1]
    assert (collector.all_correct, collector.all_wrong, collector.unscored) == (1, 0, 1)


def test_a_batch_filled_over_rounds_gives_no_warning(caplog):
    collector = Collector(2, 3)
    collector.add([make_group(0, [True, False])])
    assert (collector.missing, collector.done) == (1, False)
    collector.add([make_group(1, [True, False])])
    assert collector.done
    assert not caplog.records


@pytest.mark.parametrize(
    ("correct", "message"), [([True, False], "partial batch"), ([True, True], "nothing to train")]
)
def test_after_the_last_round_a_partial_batch_is_announced(caplog, correct, message):
    collector = Collector(2, 2)
    collector.add([])
    with caplog.at_level(logging.WARNING):
        collector.add([make_group(0, correct)])
    assert collector.done
    assert message in caplog.text
    assert f"{len(collector.groups)} of 2 groups after 2 rounds" in caplog.text


def test_a_finished_batch_takes_nothing_more():
    collector = Collector(1, 1)
    collector.add([])
    with pytest.raises(ValueError, match="done after 1 rounds"):
        collector.add([make_group(0, [True, False])])


@pytest.mark.parametrize(
    "group",
    [[], make_group(0, [True]), make_group(0, [True]) + make_group(1, [False])],
    ids=["empty", "single", "two problems"],
)
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match="two or more samples of one problem"):
        Collector(1, 1).add([group])


@pytest.mark.parametrize("size", [(0, 1), (1, 0)])
def test_a_batch_that_nothing_fills_is_refused(size):
    with pytest.raises(ValueError, match="at least 1"):
        Collector(*size)
