"""How completions end: end-of-sequence ids, stop strings, limits; and their text."""

import pytest
from engines import MAX_RESPONSE, alone, engine, generate, requests, tokenizer

from bagrpo.sample.request import Sampling
from bagrpo.sample.transcript import Transcript

# A model's greedy continuation of each prompt, from which the ends are taken.
PLAIN = {request.problem: alone("qwen2", request.prompt) for request in requests()}


def first_of(*wanted, among):
    return min((i for i, token in enumerate(among) if token in wanted), default=len(among) - 1)


def test_an_immediate_end_of_sequence_is_a_response_of_one_token():
    wanted = requests()
    eos = PLAIN[wanted[2].problem][0]
    found = generate(engine(text=True), wanted, Sampling(0.0, eos_ids=(eos,)))
    completion = found[wanted[2].problem, 0]
    assert (list(completion.tokens), completion.finish, completion.text) == ([eos], "stop", "")


def test_whichever_of_several_end_ids_comes_first_ends_a_response_and_is_part_of_it():
    wanted = requests()
    ends = tuple(PLAIN[request.problem][3 * i] for i, request in enumerate(wanted))
    found = generate(engine(), wanted, Sampling(0.0, eos_ids=ends))
    for request in wanted:
        plain = PLAIN[request.problem]
        length = first_of(*ends, among=plain) + 1
        completion = found[request.problem, 1]
        assert list(completion.tokens) == plain[:length]
        assert len(completion.logps) == length
        assert completion.finish == ("stop" if plain[length - 1] in ends else "length")


@pytest.mark.parametrize("limit", [1, 6, MAX_RESPONSE, None])
def test_a_response_has_as_many_tokens_as_are_allowed(limit):
    found = generate(engine(), requests(), Sampling(0.0, max_tokens=limit))
    for (problem, _), completion in found.items():
        assert list(completion.tokens) == PLAIN[problem][:limit]
        assert completion.finish == "length"


def test_an_end_id_at_the_limit_is_a_stop():
    (request,) = requests(1, samples=1)
    plain = PLAIN[request.problem]
    length = first_of(plain[4], among=plain) + 1
    (completion,) = generate(
        engine(), [request], Sampling(0.0, eos_ids=(plain[4],), max_tokens=length)
    ).values()
    assert (len(completion.tokens), completion.finish) == (length, "stop")


@pytest.mark.parametrize("slots", [4, 16])
def test_a_stop_string_is_cut_from_the_text_and_its_tokens_are_kept(slots):
    """Strings of two tokens, one of which never comes; steps are 5, so the host looks late."""
    wanted = requests()
    shared = engine(text=True, slots=slots)
    spell = tokenizer(320).decode
    plain = PLAIN[wanted[1].problem]
    stop = spell(plain[6:8])
    found = generate(shared, wanted, Sampling(0.0, stop=("\N{SNOWMAN}", stop)))
    for request in wanted:
        whole = spell(PLAIN[request.problem])
        text, separator, _ = whole.partition(stop)
        completion = found[request.problem, 0]
        assert completion.text == text
        assert completion.finish == ("stop" if separator else "length")
        assert len(completion.logps) == len(completion.tokens)
        kept = PLAIN[request.problem][: len(completion.tokens)]
        assert list(completion.tokens) == kept
        assert spell(kept) == text + separator
    assert found[wanted[1].problem, 0].finish == "stop"


def transcript(text_tokenizer, ids, **options):
    made = Transcript(text_tokenizer, **{"stop": (), "eos_ids": (2,), **options})
    for token in ids:
        made.feed([token], [-1.0])
    return made.completion()


LETTERS = dict(zip("abcdef", range(3, 9), strict=True))


@pytest.mark.parametrize(
    ("written", "stop", "text", "kept"),
    [
        ("abcdef", ("cd",), "ab", "abcd"),
        ("abcdef", ("cd", "bcd"), "a", "abcd"),  # the one that starts first
        ("abcdef", ("bcde", "cd"), "ab", "abcd"),  # the one that is complete first
        ("aaab", ("aab",), "a", "aaab"),  # overlaps itself
        ("abc", ("x",), "abc", "abc"),
        ("ab\0", ("b\0", "c"), "ab", "ab\0"),  # \0 stands for the end-of-sequence id
        ("ab\0cd", (), "ab", "ab\0"),
    ],
)
def test_text_and_tokens_of_a_completion(written, stop, text, kept):
    spelling = tokenizer_of("abcdef")
    ids = [LETTERS.get(letter, 2) for letter in written]
    completion = transcript(spelling, ids, stop=stop)
    assert completion.text == text
    assert completion.tokens == [LETTERS.get(letter, 2) for letter in kept]


def tokenizer_of(alphabet):
    from bagrpo.text.tokenizer import Tokenizer

    return Tokenizer.characters(alphabet)


def test_an_end_id_that_has_a_text_is_not_in_the_completions():
    spelling = tokenizer_of("abcdef")
    for stop in ((), ("x",)):
        assert transcript(spelling, [3, 4, 5], eos_ids=(5,), stop=stop).text == "ab"
