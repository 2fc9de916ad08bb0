import itertools
import json
import random
from fractions import Fraction

import pytest

from bagrpo.config import ArithmeticSource, DataConfig
from bagrpo.data.stream import Stream, host_share, next_source
from bagrpo.records import Problem

# Sizes and weights of the sources, and whether they are shuffled.
SETUPS = {
    "in order": ([5], [None], False),
    "shuffled": ([7], [None], True),
    "joined": ([4, 3], [None, None], True),
    "one row": ([1], [None], True),
    "mixed": ([7, 5], [0.7, 0.3], True),
    "mixed in order": ([3, 2, 4], [1, 2, 4], False),
}


def make_stream(name, *, seed=3, epochs=None, answer="1"):
    sizes, weights, shuffle = SETUPS[name]
    config = DataConfig(
        sources=tuple(ArithmeticSource(weight=weight) for weight in weights),
        shuffle=shuffle,
        epochs=epochs,
    )
    problems = [
        [Problem(id=100 * s + i, messages=[], answer=answer, kind="math") for i in range(size)]
        for s, size in enumerate(sizes)
    ]
    return Stream(problems, config, seed=seed)


def ids(batch):
    return [problem.id for problem in batch]


def sizes_of(name):
    return SETUPS[name][0]


@pytest.mark.parametrize("name", SETUPS)
def test_a_resumed_stream_goes_on_as_the_unbroken_one(name):
    # 40 problems are three epochs or more of each setup, so cuts fall within and between epochs.
    unbroken = make_stream(name)
    states, straight = [unbroken.state()], []
    for _ in range(40):
        straight += ids(unbroken.next_batch(1))
        states.append(unbroken.state())
    # A resumed stream gives the next problem and gets to the next position: by induction, all.
    for cut in range(40):
        resumed = make_stream(name)
        resumed.restore(json.loads(json.dumps(states[cut])))
        assert ids(resumed.next_batch(1)) == straight[cut : cut + 1]
        assert resumed.state() == states[cut + 1]
    resumed.restore(states[17])
    assert ids(resumed.next_batch(23)) == straight[17:]


@pytest.mark.parametrize("name", SETUPS)
def test_a_resumed_stream_ends_where_the_unbroken_one_ends(name):
    total = 2 * sum(sizes_of(name))
    for cut in (1, total // 2, total - 1, total):
        before, after = make_stream(name, epochs=2), make_stream(name, epochs=2)
        before.next_batch(cut)
        after.restore(before.state())
        assert len(after.next_batch(100)) == total - cut
        assert after.next_batch(1) == []
        assert after.epoch == 2


@pytest.mark.parametrize("name", SETUPS)
def test_the_order_does_not_depend_on_the_batch_size(name):
    stream = make_stream(name)
    batches = [ids(stream.next_batch(size)) for size in (1, 6, 2, 9, 3, 11)]
    assert list(itertools.chain(*batches)) == ids(make_stream(name).next_batch(32))


@pytest.mark.parametrize("name", ["in order", "shuffled", "joined", "one row"])
def test_without_weights_an_epoch_has_every_row_once(name):
    stream, rows = make_stream(name), sum(sizes_of(name))
    everything = sorted(100 * s + i for s, size in enumerate(sizes_of(name)) for i in range(size))
    for _ in range(5):
        assert sorted(ids(stream.next_batch(rows))) == everything


@pytest.mark.parametrize("name", ["mixed", "mixed in order"])
def test_with_weights_each_source_gives_every_row_once_before_it_starts_over(name):
    taken = ids(make_stream(name).next_batch(100))
    for source, size in enumerate(sizes_of(name)):
        own = [item - 100 * source for item in taken if item // 100 == source]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


def test_each_epoch_seed_and_source_has_its_own_order():
    config = DataConfig(sources=(ArithmeticSource(weight=1), ArithmeticSource(weight=1)))
    problems = [
        [Problem(id=i, messages=[], answer="1", kind="math") for i in range(50)] for _ in range(2)
    ]
    orders = []
    for seed in (0, 1, 2):
        taken = ids(Stream(problems, config, seed=seed).next_batch(300))
        for source in (0, 1):
            own = [
                item
                for item, turn in zip(taken, itertools.cycle((0, 1)), strict=False)
                if turn == source
            ]
            orders += [tuple(own[start : start + 50]) for start in (0, 50, 100)]
    assert len(set(orders)) == 18  # 3 seeds x 2 sources x 3 epochs


def test_equal_streams_are_equal_and_unshuffled_ones_keep_the_order_of_the_data():
    assert ids(make_stream("mixed").next_batch(50)) == ids(make_stream("mixed").next_batch(50))
    assert ids(make_stream("in order").next_batch(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_counts_of_a_mixture_keep_to_its_shares_at_every_position():
    rng = random.Random(0)
    cases = [[1], [7, 3], [233, 100], [1, 1, 1], [1, 50, 3], [5, 4, 3, 2, 1], [1, 1000]]
    cases += [[rng.randint(1, 40) for _ in range(rng.randint(2, 7))] for _ in range(40)]
    for shares in cases:
        taken, bound = [0] * len(shares), Fraction(0)
        if len(shares) > 1:
            bound = 1 - Fraction(1, 2 * len(shares) - 2)  # Tijdeman's, the least possible.
        for position in range(1, 2 * sum(shares) + 1):
            taken[next_source(shares, taken)] += 1
            for share, count in zip(shares, taken, strict=True):
                assert abs(count - Fraction(position * share, sum(shares))) <= bound
        assert taken == [2 * share for share in shares]


def test_weights_mean_the_decimals_that_were_written():
    # As binary floats 0.7 and 0.3 are not in the ratio 7 : 3.
    taken = ids(make_stream("mixed").next_batch(200))
    for start in range(0, 200, 10):
        assert sum(item < 100 for item in taken[start : start + 10]) == 7


def test_the_last_batch_is_the_ragged_rest():
    stream = make_stream("in order", epochs=2)
    assert [len(stream.next_batch(4)) for _ in range(4)] == [4, 4, 2, 0]
    assert (stream.taken, stream.epoch) == (10, 2.0)


@pytest.mark.parametrize(
    "other",
    [
        make_stream("mixed", seed=4),
        make_stream("mixed", answer="2"),
        make_stream("mixed in order"),
        make_stream("joined"),
    ],
    ids=["seed", "answers", "sources", "weights"],
)
def test_a_position_in_other_data_is_refused(other):
    with pytest.raises(ValueError, match="position is in training data"):
        other.restore(make_stream("mixed").state())


def test_streams_of_nothing_and_batches_of_nothing_are_refused():
    config = DataConfig(sources=(ArithmeticSource(),))
    with pytest.raises(ValueError, match=r"not lists of \[0\]"):
        Stream([[]], config, seed=0)
    with pytest.raises(ValueError, match="the 0 sources"):
        Stream([], DataConfig(), seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        make_stream("joined").next_batch(0)


def test_hosts_share_every_item_once_and_evenly():
    for count, hosts in itertools.product(range(20), range(1, 8)):
        items = list(range(count))
        shares = [items[host_share(count, host=host, hosts=hosts)] for host in range(hosts)]
        assert list(itertools.chain(*shares)) == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("host", [-1, 2])
def test_a_host_that_is_not_there_has_no_share(host):
    with pytest.raises(ValueError, match="of 2 hosts"):
        host_share(10, host=host, hosts=2)
