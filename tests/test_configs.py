import itertools
import re
from pathlib import Path

import pytest

from bagrpo import config
from bagrpo.data import sources
from bagrpo.train import assemble
from bagrpo.verify import kinds

FOLDER = Path(__file__).parents[1] / "configs"
PATHS = sorted(FOLDER.glob("*.yaml"))
FIELDS = ("Paper", "Command", "Hardware", "Expect", "Run")


def header(path):
    """The comment that a configuration begins with, as its fields by name."""
    lines = path.read_text().splitlines()
    comment = [
        line.removeprefix("#").strip() for line in lines[: lines.index("")] if line.startswith("#")
    ]
    assert len(comment) == lines.index("")
    fields = re.split(rf"^({'|'.join([*FIELDS, 'Data'])}): ", "\n".join(comment), flags=re.M)
    return dict(zip(fields[1::2], fields[2::2], strict=True))


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request):
    return request.param


@pytest.fixture
def run(path):
    return config.load(config.RunConfig, path)


def test_there_are_configurations():
    assert PATHS
    assert all(path.suffix == ".yaml" for path in FOLDER.iterdir())


def test_the_head_says_what_a_reader_must_know(path):
    fields = header(path)
    assert set(FIELDS) <= set(fields)
    assert re.search(r"arXiv:\d{4}\.\d{5}", fields["Paper"])
    assert fields["Command"].strip() == f"launch/local.sh train configs/{path.name}"
    assert all(text.strip() for text in fields.values())


def test_the_head_says_which_files_are_needed_from_where(path, run):
    for source in (*run.data.sources, *run.data.evaluation):
        if isinstance(source, config.FileSource):
            assert Path(source.path).name in header(path)["Data"]


def test_what_is_resolved_loads_as_the_same(run, tmp_path):
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.dump(run))
    assert config.load(config.RunConfig, resolved) == run


def test_the_longest_row_fits_into_a_microbatch(run):
    for shape in assemble.shapes(run.batch, row_shards=1):
        # Where no row fits, a micro-batch is one row, and larger than it was meant to be.
        assert shape.tokens <= run.batch.microbatch_tokens


def test_buckets_waste_at_most_three_quarters_of_a_row_and_are_few(run):
    for buckets in (assemble.prompt_buckets(run.batch), assemble.response_buckets(run.batch)):
        assert all(after <= 4 * before for before, after in itertools.pairwise(buckets))
    assert len(assemble.shapes(run.batch, row_shards=1)) <= 16


def test_a_group_can_have_a_baseline(run):
    assert run.batch.group >= 2


def test_nothing_is_evaluated_that_is_trained_on(run):
    files = [
        {source.path for source in part if isinstance(source, config.FileSource)}
        for part in (run.data.sources, run.data.evaluation)
    ]
    assert run.data.sources
    assert run.data.evaluation
    assert not files[0] & files[1]


def test_benchmarks_have_names_of_their_own(run):
    names = [sources.name(source) for source in run.data.evaluation]
    assert len(set(names)) == len(names)


def test_every_answer_has_a_verifier(run):
    for source in (*run.data.sources, *run.data.evaluation):
        if isinstance(source, config.FileSource) and source.kind:
            kinds.find(source.kind)


def test_the_overlong_punishment_leaves_room_for_a_response(run):
    if run.verify.overlong:
        assert run.verify.overlong.buffer < run.batch.max_response


def test_an_instruction_is_given_once(run):
    # A file whose questions hold the instruction (DAPO's form) must not get the general one too.
    for source in (*run.data.sources, *run.data.evaluation):
        if isinstance(source, config.FileSource) and source.form == "dapo":
            assert (source.prompt or run.data.prompt).template == "{question}"
