"""Rows of problems: read from files, or generated.

`rows` reads any source of the configuration. A row is not a problem yet: nothing is checked,
dropped or put into a prompt here. Only a malformed file stops it, naming file, line and column.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagrpo.config import ArithmeticSource, FileSource, GymSource, SourceConfig
from bagrpo.data import arithmetic
from bagrpo.records import Message


@dataclasses.dataclass(frozen=True)
class Row:
    """A question and its gold answer, as the source has them."""

    index: int
    """Of the row in its source; what is dropped elsewhere in it doesn't change it."""
    where: str
    """For a person: file and line."""
    messages: Sequence[Message]
    """The conversation that ends with the question."""
    answer: str
    """Empty when the source has none."""
    kind: str
    """The verifier."""
    extra: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Form:
    """Where a file keeps question and answer, and what it holds beside the final answer."""

    question: str
    answer: str | tuple[str, ...]
    """A column, or several that make one object together."""
    kind: str = "math"
    split: Callable[[str], tuple[str, dict[str, Any]]] = lambda answer: (answer, {})


def rows(source: SourceConfig, *, evaluation: bool) -> Iterator[Row]:
    """Yields the rows of a source in their order.

    Args:
        source: its settings.
        evaluation: generated problems come from the held-out side, which training never sees.
            Files are read as they are.

    Raises:
        ValueError: a missing file, column or package, a malformed line, an unknown task.
    """
    return _ROWS[source.source](source, evaluation)


def name(source: SourceConfig) -> str:
    """Returns what metrics and reports call the source."""
    if source.name is not None:
        return source.name
    if isinstance(source, FileSource):
        return Path(source.path).stem
    return source.task if isinstance(source, GymSource) else source.source


def kind(source: SourceConfig) -> str:
    """Returns the verifier of the source's problems."""
    if isinstance(source, FileSource):
        return source.kind or _FORMS[source.form].kind
    return "reasoning_gym" if isinstance(source, GymSource) else "math"


def _file_rows(source: FileSource, evaluation: bool) -> Iterator[Row]:
    path = Path(source.path)
    if path.suffix not in _READERS:
        raise ValueError(
            f"data file {source.path!r} ends with {path.suffix!r}; {' and '.join(_READERS)} files "
            f"can be read: convert or rename it"
        )
    if not path.is_file():
        raise ValueError(
            f"there is no data file {source.path!r}; check `path` in the configuration"
        )
    form = _FORMS[source.form]
    question = source.question or form.question
    answer = source.answer or form.answer
    parts = (answer,) if isinstance(answer, str) else answer
    columns = (question, *parts, *source.columns)
    for index, where, record in _READERS[path.suffix](path, columns):
        values = {column: _value(record, column, where) for column in columns}
        gold = values[answer] if isinstance(answer, str) else {part: values[part] for part in parts}
        gold, extra = form.split(_text(gold, where, ", ".join(parts)))
        extra |= {column: values[column] for column in source.columns}
        messages = _messages(values[question], where, question)
        yield Row(index, where, messages, gold, kind(source), extra)


def _arithmetic_rows(source: ArithmeticSource, evaluation: bool) -> Iterator[Row]:
    for index in range(source.rows):
        question, answer, solution = arithmetic.draw(source, index, evaluation=evaluation)
        extra = {"solution": solution}
        yield Row(index, f"arithmetic row {index}", _user(question), answer, kind(source), extra)


def _gym_rows(source: GymSource, evaluation: bool) -> Iterator[Row]:
    try:
        with warnings.catch_warnings():
            # A dependency has `is "text"` in its source, and says so when it is first compiled.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"task {source.task!r} needs reasoning-gym: pip install 'bagrpo[gym]'"
        ) from error
    # One draw in HELD_OUT is held out, so this is 60 % more than the smaller side needs.
    draws = 8 * source.rows + 100
    try:
        dataset = reasoning_gym.create_dataset(
            source.task, seed=source.seed, size=draws, **source.options
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"reasoning-gym makes no task {source.task!r} of {draws} draws with options "
            f"{source.options}: {error}"
        ) from error
    found = 0
    for index in range(draws):
        entry = dataset[index]
        if arithmetic.held_out(entry["question"]) == evaluation:
            yield Row(
                index=index,
                where=f"{source.task} row {index}",
                messages=_user(entry["question"]),
                answer=entry["answer"] or "",  # Tasks with many right answers name none.
                kind=kind(source),
                extra={"task": source.task, "options": source.options, "entry": entry},
            )
            found += 1
        if found == source.rows:
            return
    raise ValueError(
        f"{draws} draws of task {source.task!r} with options {source.options} held {found} "
        f"{'held-out' if evaluation else 'training'} questions where rows={source.rows} are asked "
        f"for: its questions vary too little, ask for fewer or make them harder"
    )


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    with path.open("rb") as lines:  # Bytes: text mode would also break lines at U+2028.
        for index, line in enumerate(lines):
            where = f"{path} line {index + 1}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {error}; mend or delete it") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where} holds {_short(record)}; each line must be an object")
            yield index, where, record


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"data file {str(path)!r} needs pyarrow: pip install 'bagrpo[tasks]'"
        ) from error
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            fields = file.schema_arrow.names
            wanted = [column if column in fields else column.split(".")[0] for column in columns]
            # With a column missing all are read, for `_value` to say which there are.
            complete = set(wanted).issubset(fields)
            for batch in file.iter_batches(columns=wanted if complete else None):
                for record in batch.to_pylist():
                    yield index, f"{path} row {index + 1}", record
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} row {index + 1} is not parquet: {error}") from error


def _value(record: Mapping[str, Any], column: str, where: str) -> Any:
    """Returns a column, or what lies in a nested one at the end of a dotted path."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"{where} has no column {column!r}, it has {', '.join(map(repr, record))}: set "
                f"`form`, `question`, `answer` or `columns` to what the file holds"
            )
        value = value[part]
    return value


def _messages(value: Any, where: str, column: str) -> list[Message]:
    if value is None or isinstance(value, str):
        return _user(_text(value, where, column))
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where} column {column!r} is {_short(value)}; it must be text or a list of messages"
        )
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"{where} column {column!r} holds {_short(message)}; a message has a role and a "
                f"content, both text"
            )
    if value[-1]["role"] != "user":
        raise ValueError(
            f"{where} column {column!r} ends with a message of role {value[-1]['role']!r}; the "
            f"question comes last, from the user"
        )
    return [
        {"role": message["role"], "content": _text(message["content"], where, column)}
        for message in value
    ]


def _user(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def _text(value: Any, where: str, column: str) -> str:
    """Returns text as it is, null as no text, and anything else as JSON."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.encode()  # A lone surrogate passes JSON, and no tokenizer.
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} column {column!r} holds {_short(value)}, neither text nor JSON: {error}"
        ) from error
    return "" if value is None else text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _after_hashes(answer: str) -> tuple[str, dict[str, Any]]:
    _, hashes, gold = answer.rpartition("####")
    return gold.strip() if hashes else "", {"solution": answer}


_FORMS = {
    "plain": _Form("prompt", "answer"),
    "gsm8k": _Form("question", "answer", split=_after_hashes),
    "dapo": _Form("prompt", "reward_model.ground_truth"),
    "humaneval": _Form("prompt", ("prompt", "test", "entry_point"), "code"),
}
_READERS = {".jsonl": _jsonl, ".parquet": _parquet}
_ROWS: dict[str, Callable[[Any, bool], Iterator[Row]]] = {
    "file": _file_rows,
    "arithmetic": _arithmetic_rows,
    "reasoning_gym": _gym_rows,
}
