import pytest

from bagrpo.config import OptimizerConfig
from bagrpo.train.optimizer import schedule


def rates(updates, **settings):
    rate = schedule(OptimizerConfig(learning_rate=1.0, **settings), updates)
    return [float(rate(i)) for i in range(updates + 1)]


def test_a_constant_rate_rises_during_the_warm_up_only():
    assert rates(6, warmup=4) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1])


def test_decay_ends_with_the_run_at_the_final_fraction():
    linear = rates(10, schedule="linear", warmup=2, final_fraction=0.2)
    assert linear[2] == pytest.approx(1)
    assert linear[6] == pytest.approx(0.6)
    assert linear[10] == pytest.approx(0.2)
    cosine = rates(10, schedule="cosine", final_fraction=0.2)
    assert (cosine[0], cosine[5], cosine[10]) == pytest.approx((1, 0.6, 0.2))


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup = 7 updates is longer than the run of 6"):
        rates(6, warmup=7)
