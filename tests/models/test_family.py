import math

import numpy as np
import pytest
from reference import NAMES, spelled

from bagrpo.models.family import FULL, Rope, architecture
from bagrpo.models.rope import frequencies

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
}


def test_every_family_has_a_golden_model():
    from bagrpo.models.family import FAMILIES

    assert {spelled(name, "config.json").family for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "relu"}, "relu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        architecture(LLAMA | change)


def test_the_released_qwen2_5_math_configuration_is_read():
    """Its window is there but switched off: the attributes are those of the model card's file."""
    arch = architecture(
        LLAMA
        | {
            "model_type": "qwen2",
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 1,
            "use_mrope": False,
            "tie_word_embeddings": False,
        }
    )
    assert arch.windows == (FULL, FULL)


def test_qwen_windows_start_at_the_layer_named():
    arch = architecture(
        LLAMA
        | {
            "model_type": "qwen2",
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 1,
        }
    )
    assert arch.windows == (FULL, 8)


def test_gemma3_without_layer_types_is_full_in_every_sixth_layer():
    arch = architecture(
        LLAMA
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 13,
            "query_pre_attn_scalar": 16,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert [w == FULL for w in arch.windows] == [(i + 1) % 6 == 0 for i in range(13)]
    assert arch.ropes == (Rope(10_000.0, "linear", factor=8.0), Rope(10_000.0))


def test_linear_scaling_divides_every_frequency():
    plain, _ = frequencies(Rope(10_000.0), 16)
    slow, factor = frequencies(Rope(10_000.0, "linear", factor=4.0), 16)
    np.testing.assert_allclose(slow, plain / 4, rtol=1e-7)
    assert factor == 1


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    """arXiv:2309.00071 with Qwen2.5's settings: factor 4 over 32,768 positions, base 1e6, H 128.

    A pair i turns original / (2 pi base^(2i/128)) times. 32 turns are at pair
    128 ln(32768 / (64 pi)) / (2 ln 1e6) = 23.6 and 1 turn at 39.7, so pairs up to 23 are kept,
    those from 40 on are stretched fourfold, and pair 30 is blended at (30 - 23) / (40 - 23).
    """
    rope = Rope(1e6, "yarn", factor=4.0, original_positions=32_768)
    plain, _ = frequencies(Rope(1e6), 128)
    found, factor = frequencies(rope, 128)
    np.testing.assert_allclose(found[:24], plain[:24], rtol=1e-6)
    np.testing.assert_allclose(found[40:], plain[40:] / 4, rtol=1e-6)
    blend = 7 / 17
    np.testing.assert_allclose(found[30], plain[30] * (1 - blend + blend / 4), rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_llama3_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    """Llama 3.1: factor 8 over 8192 positions; wavelengths above 8192 are stretched, below 2048
    kept."""
    rope = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, original_positions=8192)
    plain, _ = frequencies(Rope(500_000.0), 128)
    found, _ = frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(found[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    np.testing.assert_allclose(found[wavelength < 2048], plain[wavelength < 2048], rtol=1e-6)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert (found[between] < plain[between]).all()
    assert (found[between] > plain[between] / 8).all()
