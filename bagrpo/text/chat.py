"""Messages to prompt ids, through the Jinja chat template that a model comes with.

A template is foreign code: it runs in Jinja's sandbox, sees plain JSON values only, and what goes
wrong in it comes back as a `ValueError`. The rendered text is encoded with its special tokens,
while those that stand in a message are kept plain text.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from bagrpo.records import Message
from bagrpo.text.tokenizer import Tokenizer


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    **variables: Any,
) -> list[int]:
    """Returns the ids of `messages` as the model is to read them.

    The template alone decides what stands where, as in transformers, with two exceptions. A model
    whose texts begin with a begin-of-sequence token gets it even if the template forgot it, once.
    And a special token's string in a message becomes ordinary text, except in an assistant's
    message, where a template may look for one.

    Args:
        tokenizer: Whose ids, and by default whose template.
        messages: The conversation, in order.
        template: Jinja source, or the name of one of `TEMPLATES`; None: the tokenizer's own.
        add_generation_prompt: End with what opens the assistant's turn.
        now: Passed to `render`.
        **variables: Passed to the template, e.g. `enable_thinking=False`.

    Raises:
        ValueError: There is no template; or as for `render` and `Tokenizer.encode`.
    """
    template = tokenizer.chat_template if template is None else template
    if template is None:
        raise ValueError(
            "the tokenizer has no chat template (a base model?): give the key model.chat_template, "
            f"a Jinja template or one of {sorted(TEMPLATES)}, e.g. model.chat_template=plain"
        )
    shield = _unused(messages)
    text = render(
        [_shielded(message, tokenizer, shield) for message in messages],
        TEMPLATES.get(template, template),
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        add_generation_prompt=add_generation_prompt,
        now=now,
        **variables,
    )
    ids = tokenizer.encode(text, special=True, shield=shield)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def render(
    messages: Sequence[Message],
    template: str,
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    **variables: Any,
) -> str:
    """Returns the text that the Jinja source `template` makes of `messages`.

    The template finds what transformers would give it: `messages`, `bos_token`, `eos_token`,
    `add_generation_prompt`, `tools` and `documents` (None unless in `variables`), the functions
    `raise_exception` and `strftime_now`, the filter `tojson`, `break`, `continue` and `generation`.

    Args:
        messages: The conversation, in order.
        template: Jinja source.
        bos: Text of the begin-of-sequence token.
        eos: Text of the end-of-sequence token.
        add_generation_prompt: Whether to open the assistant's turn.
        now: What `strftime_now` tells; None: the time of the call. Llama 3 writes the date into
            every prompt, so a run that is to be repeated exactly gives the moment it first started.
        **variables: More values for the template, plain JSON only.

    Raises:
        ValueError: The template raises, isn't Jinja or reaches for what the sandbox forbids;
            there are no messages; a message has no role or content; a value is not plain JSON.
    """
    if not messages or any({"role", "content"} - {*message} for message in messages):
        raise ValueError(
            f"messages {messages!r} are not a conversation: give at least one "
            "{'role': ..., 'content': ...}"
        )
    values = {"tools": None, "documents": None, **variables, "messages": [*map(dict, messages)]}
    try:
        plain = json.loads(json.dumps(values))
    except TypeError as error:
        raise ValueError(
            f"a value for the chat template is not plain JSON ({error}): give strings, numbers, "
            "lists and dictionaries"
        ) from error
    moment = now or datetime.datetime.now()
    try:
        return _compiled(template).render(
            **plain,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
            strftime_now=moment.strftime,
        )
    except Exception as error:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"the chat template failed on messages of the roles {roles} "
            f"({type(error).__name__}: {error}): change the messages or give another template"
        ) from error


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Fails where Jinja's own would go on with an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(
            f"{attribute!r} of a {type(obj).__name__} is off limits"
        )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said; here it is just text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    # Jinja's own escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _unused(messages: Sequence[Message]) -> str:
    """Returns one of Unicode's noncharacters that no message holds."""
    held = "".join(str(value) for message in messages for value in message.values())
    for code in range(0xFDD0, 0xFDF0):
        if chr(code) not in held:
            return chr(code)
    raise ValueError("the messages hold all of U+FDD0 to U+FDEF, which mean nothing: remove them")


def _shielded(message: Message, tokenizer: Tokenizer, shield: str) -> Message:
    if message.get("role") == "assistant" or "content" not in message:
        return message
    return {**message, "content": tokenizer.shielded(message["content"], shield)}


TEMPLATES = {"plain": "{{ messages | map(attribute='content') | join('\\n') }}"}
"""Templates by name. `plain`, for base models: the contents, a line each, and nothing else."""
