import json

import pytest

from bagrpo.train.resume import check_settings

SETTINGS = {
    "steps": 100,
    "seed": 0,
    "mesh": {"data": 1, "fsdp": -1},
    "optimizer": {"learning_rate": 1e-6, "schedule": "constant"},
    "batch": {"problems": 8, "microbatch_tokens": 4096},
    "checkpoint": {"every": 50},
}


def changed(**changes):
    settings = json.loads(json.dumps(SETTINGS))
    for key, value in changes.items():
        *path, name = key.split("__")
        section = settings
        for part in path:
            section = section[part]
        section[name] = value
    return settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"steps": 200}, ["steps: 100 -> 200"]),
        ({"mesh__fsdp": 2}, ["mesh.fsdp: -1 -> 2"]),
        ({"batch__microbatch_tokens": 1}, ["batch.microbatch_tokens: 4096 -> 1"]),
        ({"checkpoint__every": 1, "report": {"quiet": True}}, None),
    ],
)
def test_settings_that_do_not_shape_the_result_may_change(changes, said):
    found = check_settings(SETTINGS, changed(**changes))
    assert found == said or (said is None and len(found) == 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"batch__problems": 4, "seed": 1}, "seed: 0 -> 1; batch.problems: 8 -> 4"),
        ({"optimizer__learning_rate": 1e-5}, "optimizer.learning_rate: 1e-06 -> 1e-05"),
        # Under a schedule that decays until the last step, their number shapes each of them.
        ({"steps": 200, "optimizer__schedule": "linear"}, "steps: 100 -> 200"),
        ({"verify": {"workers": 1}}, "verify: None -> {'workers': 1}"),
        ({"meshes": 1}, "meshes: None -> 1"),
    ],
)
def test_settings_that_shape_the_result_may_change_only_if_that_is_accepted(changes, named):
    with pytest.raises(ValueError, match="changed since its checkpoint") as caught:
        check_settings(SETTINGS, changed(**changes))
    assert named in str(caught.value)
    assert any(part in named for part in check_settings(SETTINGS, changed(**changes), accept=True))
