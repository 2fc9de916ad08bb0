import pytest

from bagrpo.config import ArithmeticSource, DataConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sources": [ArithmeticSource(weight=1), ArithmeticSource()]},
            r"sources\[1\] has no weight",
        ),
        ({"evaluation": [ArithmeticSource(weight=1)]}, "evaluation sources take no weight"),
        ({"prompt": {"template": "{problem}"}}, "doesn't say where the question goes"),
        ({"sources": [{"source": "arithmetic", "low": 5, "high": 4}]}, "low=5 is above high=4"),
        ({"sources": [{"source": "file", "path": "x", "columns": ["source"]}]}, "`extra` has the"),
        ({"sources": [{"source": "web"}]}, "'file', 'arithmetic', 'reasoning_gym'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)
