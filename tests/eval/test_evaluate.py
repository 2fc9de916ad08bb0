import json
import random
import threading

import pytest

from bagrpo.config import DataConfig, EvalConfig, FileSource, VerifyConfig
from bagrpo.data import problems as data
from bagrpo.eval.evaluate import Hosts, doubling, evaluate, first
from bagrpo.verify.score import Scorer


def sampler(texts, completion, order=None):
    """Makes a `generate` of the texts of each problem's samples, in any order of rows."""

    def generate(problems, samples):
        rows = [(p, s) for p in range(len(problems)) for s in range(samples)]
        for p, s in rows if order is None else order(rows):
            yield p, s, completion(texts[p][s])

    return generate


class Recorder:
    """A scorer that notes what it was given; a verdict is done when `finished` says so."""

    def __init__(self, scorer, finished=lambda: True):
        self.scorer, self.finished, self.given = scorer, finished, []

    def submit(self, problem, completion):
        self.given.append((problem.id, completion.text))
        return Waiting(self.scorer.submit(problem, completion), self.finished)


class Waiting:
    def __init__(self, pending, finished):
        self.pending, self.finished = pending, finished

    def done(self):
        return self.finished()

    def result(self):
        return self.pending.result()


TEXTS = [["#### 4", "#### 5", "#### 4"], ["#### 5"] * 3, ["#### 4"] * 3]


@pytest.mark.parametrize("order", [None, reversed, lambda rows: random.Random(0).sample(rows, 9)])
def test_results_do_not_depend_on_the_order_of_completions(order, scorer, problem, completion):
    problems = [problem(30), problem(10), problem(20)]
    found = evaluate(problems, sampler(TEXTS, completion, order), scorer, samples=3, ks=[2, 3])
    # 2/3, 0 and 1 of the samples; of two, pass@2 of the first is 1 - 1/3 * 0 = 1.
    values = {name: estimate.value for name, estimate in found.overall.estimates.items()}
    assert values == pytest.approx(
        {
            "avg@3": 5 / 9,
            "pass@2": 2 / 3,
            "pass@3": 2 / 3,
            # Subsets of the first: 4 5, 4 4, 5 4, of which two are ties: 2/3.
            "maj@2": 5 / 9,
            "maj@3": 2 / 3,
        }
    )
    assert [(s.problem.id, s.number) for s in found.samples] == [
        (id, number) for id in (30, 10, 20) for number in range(3)
    ]
    assert [s.completion.text for s in found.samples] == [text for texts in TEXTS for text in texts]


def test_every_sample_is_scored_once(scorer, problem, completion):
    recorder = Recorder(scorer)
    texts = [[f"sample {s} of {p} #### {s}" for s in range(5)] for p in range(7)]
    evaluate(
        [problem(p) for p in range(7)], sampler(texts, completion, reversed), recorder, samples=5
    )
    assert sorted(recorder.given) == sorted((p, t) for p in range(7) for t in texts[p])


def test_verification_begins_while_others_are_still_sampled(scorer, problem, completion):
    recorder = Recorder(scorer, finished=lambda: False)
    asked = []

    def generate(problems, samples):
        for index in range(4):
            asked.append(index)
            yield index, 0, completion("#### 4")
            assert len(recorder.given) == len(asked)

    found = evaluate([problem(i) for i in range(4)], generate, recorder, samples=1)
    assert len(asked) == 4
    assert found.overall.estimates["avg@1"].value == 1.0


def test_a_verifier_that_fails_stops_the_sampling(problem, completion, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def broken(problem, text):\n    raise RuntimeError('out of order')\n")
    kind, asked = f"{path}:broken", []

    def generate(problems, samples):
        for index in range(1000):
            asked.append(index)
            yield index, 0, completion("#### 4")
            # Real completions take longer than the verdict on the first.
            assert index or finished.wait(60)

    finished = threading.Event()
    with Scorer(VerifyConfig(workers=1), [kind]) as scorer:

        class Watching:
            def submit(self, problem, completion):
                pending = scorer.submit(problem, completion)
                ((_, future),) = pending.parts.values()
                future.add_done_callback(lambda _: finished.set())
                return pending

        with pytest.raises(ValueError, match="out of order"):
            evaluate([problem(i, kind=kind) for i in range(1000)], generate, Watching(), samples=1)
    assert len(asked) < 1000


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_share_the_work_and_agree(count, scorer, problem, completion):
    problems = [problem(p) for p in range(5)]
    texts = [["#### 4" if s <= p else "#### 5" for s in range(3)] for p in range(5)]
    alone = evaluate(problems, sampler(texts, completion), scorer, samples=3)
    recorders = [Recorder(scorer) for _ in range(count)]
    parts, found = [""] * count, [None] * count
    barrier = threading.Barrier(count, timeout=60)

    def run(index):
        def gather(mine):
            parts[index] = json.dumps(list(mine))
            barrier.wait()
            return [item for part in parts for item in json.loads(part)]

        found[index] = evaluate(
            problems,
            sampler(texts, completion),
            recorders[index],
            samples=3,
            hosts=Hosts(index, count, gather),
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * count
    # 15 rows: shares differ by one at most, and together they are each row once.
    assert all(len(recorder.given) in (15 // count, -(-15 // count)) for recorder in recorders)
    given = sorted(row for recorder in recorders for row in recorder.given)
    assert given == sorted((p, text) for p in range(5) for text in texts[p])


def test_a_host_whose_verdicts_get_lost_is_noticed(scorer, problem, completion):
    generate = sampler([["#### 4"] * 2], completion)
    with pytest.raises(ValueError, match=r"no verdict of 1 of 2 samples.*sample 1 of problem 0"):
        evaluate([problem(0)], generate, scorer, samples=2, hosts=Hosts(0, 2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0), (0, 1), (1, 0)], "no completion of 1 of 4 samples.*sample 1 of problem 1"),
        ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 0)], "sample 0 of problem 1 came twice"),
        ([(0, 2)], "sample 2 of problem 0 .*was not asked for"),
        ([(2, 0)], "sample 0 of problem 2 .*was not asked for"),
        ([(-1, 1)], "sample 1 of problem -1 .*was not asked for"),
    ],
)
def test_samples_that_are_missing_or_too_many_are_refused(
    rows, message, scorer, problem, completion
):
    def generate(problems, samples):
        return [(p, s, completion("#### 4")) for p, s in rows]

    with pytest.raises(ValueError, match=message):
        evaluate([problem(0), problem(1)], generate, scorer, samples=2)


@pytest.mark.parametrize(
    ("ids", "samples", "ks", "message"),
    [
        ([], 1, [], "0 problems"),
        ([0], 0, [], "0 samples each"),
        ([0], 2, [3], r"k = \[3\]"),
        ([0], 2, [0], r"k = \[0\]"),
        ([0, 0], 1, [], "the same id"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(ids, samples, ks, message, scorer, problem):
    with pytest.raises(ValueError, match=message):
        evaluate([problem(id) for id in ids], lambda *_: [], scorer, samples=samples, ks=ks)


def test_by_default_k_doubles_up_to_the_samples():
    assert [doubling(n) for n in (1, 2, 3, 4, 5, 8, 12)] == [
        [],
        [2],
        [2, 3],
        [2, 4],
        [2, 4, 5],
        [2, 4, 8],
        [2, 4, 8, 12],
    ]


def test_a_limit_is_of_each_source(problem):
    loaded = [[problem(0), problem(1), problem(2)], [problem(3)], [problem(4), problem(5)]]
    assert [p.id for p in first(loaded, 2)] == [0, 1, 3, 4, 5]
    assert [p.id for p in first(loaded, None)] == [0, 1, 2, 3, 4, 5]


def test_gold_solutions_in_the_form_of_gsm8k_are_all_right(tmp_path, scorer, completion):
    answers = ["18", "1,001", "-3", "$200,000", "0.5", "1/2", "12%", "70000"]
    path = tmp_path / "test.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {"question": f"How many, in case {n}?", "answer": f"{n} + 1 = 7\n#### {answer}"}
            )
            + "\n"
            for n, answer in enumerate(answers)
        )
    )
    config = DataConfig(evaluation=(FileSource(path=str(path), form="gsm8k"),))
    loaded, _ = data.load(config, "evaluation", check=scorer.check_answer)

    def generate(problems, samples):
        for index, problem in enumerate(problems):
            yield index, 0, completion(problem.extra["solution"])

    found = evaluate(first(loaded, None), generate, scorer, samples=1)
    assert found.overall.problems == len(answers)
    assert found.overall.estimates["avg@1"].value == 1.0
    assert list(found.benchmarks) == ["test"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 4}, "samples=4 at temperature=0 would be 4 times the same"),
        ({"samples": 4, "temperature": 1.0, "ks": (2, 8)}, "must rise, to samples = 4"),
        ({"samples": 4, "temperature": 1.0, "ks": (4, 2)}, "must rise"),
        ({"samples": 4, "temperature": 1.0, "ks": (2, 2)}, "must rise"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"every": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**settings)


def test_settings_that_make_sense_are_taken():
    assert EvalConfig(samples=4, temperature=0.6, ks=(1, 4)).ks == (1, 4)
    assert EvalConfig().samples == 1
