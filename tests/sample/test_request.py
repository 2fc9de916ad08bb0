import pydantic
import pytest

from bagrpo.config import SampleConfig
from bagrpo.sample.request import Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("stop", ("a", "")),
        ("eos_ids", tuple(range(9))),
        ("max_tokens", 0),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"slot_buckets": (8, 4), "slots": 4}, "slot_buckets"),
        ({"slot_buckets": (4, 8), "slots": 16}, "slots = 16"),
        ({"cache_buckets": (64, 64)}, "cache_buckets"),
        ({"prompt_buckets": (64, 32)}, "prompt_buckets"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_configurations_that_mean_nothing_are_refused_by_name(settings, named):
    with pytest.raises(pydantic.ValidationError, match=named):
        SampleConfig(**settings)


def test_the_configuration_says_how_training_samples():
    config = SampleConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("a", "b"))
    want = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("a", "b"))
    assert Sampling.of(config) == want
