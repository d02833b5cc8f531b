"""`halfway messages`: print committed messages, and go on as they come."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer

from halfway.clients.reading.committed import CommittedMessage, MessageBatch
from halfway.clients.reading.message_reader import MessageReader, tags_in
from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption, one_of, parsed_by
from halfway.pipelines.cli.output import printable, say, to_json
from halfway.pipelines.local.command_settings import command_settings
from halfway.pipelines.runtime.signals import exit_code, on_signals
from halfway.pipelines.storage.missing_tables import verify_table_exists
from halfway.schemas.bookmark import Bookmark
from halfway.schemas.settings import Settings

_ROWS = 1_000
_BYTES = 16 * 1024 * 1024
_SHOWN_OF_BODY = 200
_COLUMNS = ("committed at", "topic", "tags", "keys", "transaction", "body")


class BodyForm(StrEnum):
    """How a body is printed."""

    TEXT = "text"
    HEX = "hex"
    NONE = "none"


def _body_form(text: str) -> BodyForm:
    return BodyForm(one_of([*BodyForm])(text))


def _tags(expression: str) -> str:
    tags_in(expression)
    return expression


def messages(
    *,
    after: Annotated[
        Bookmark | None,
        typer.Option(parser=parsed_by(Bookmark.parse), metavar="EPOCH.BATCH", help="Only those after this bookmark. Default: all."),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only those of this topic.")] = None,
    tags: Annotated[
        str | None,
        typer.Option(parser=parsed_by(_tags), metavar="TAGS", help="Only those with this tag, or one of several: 'A || B'."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new ones until Ctrl-C.")] = False,
    body: Annotated[
        BodyForm,
        typer.Option(
            parser=_body_form, metavar="|".join(BodyForm), help="How to print bodies. With text, bytes that are not UTF-8 are escaped."
        ),
    ] = BodyForm.TEXT,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print committed messages in order. At the end, the bookmark to go on with is printed on stderr.

    With --json each message is a line. Reads beside a running job, or without one.
    Needs no Java if the tables are folders.
    """
    settings = command_settings(config, overrides)
    show = _show_json if as_json else _Lines()
    position, shown = None, 0
    received: list[int] = []
    try:
        with _batches(settings, after, topic, tags, received, follow=follow) as batches:
            position = after
            for batch in batches:
                show(batch.messages, body)
                position, shown = batch.bookmark, shown + len(batch)
                if received:
                    break
        if not shown and not received and not follow and (topic or tags or after is None):
            say(_none_found(after, topic, tags))
    finally:
        if position is not None:
            say(f"go on with --after {position}")
    if received and not follow:
        # Whoever asked for all has not got all.
        raise typer.Exit(exit_code(received[0]))


def _none_found(after: Bookmark | None, topic: str | None, tags: str | None) -> str:
    wanted = " or ".join(sorted(tags_in(tags)))
    of = ["" if topic is None else f" of topic {topic}", f" with tag {wanted}" if wanted else ""]
    return f"no message{''.join(of)}{'' if after is None else f' after {after}'}"


def _say_ahead(after: Bookmark, end: Bookmark | None) -> None:
    """Say that a bookmark is not of this table. Going on from it leaves out what comes before it."""
    what = "the table holds no message yet" if end is None else f"the table ends at {end}"
    say(f"warning: {what}: nothing is shown before {after} is passed")


@contextmanager
def _batches(
    settings: Settings, after: Bookmark | None, topic: str | None, tags: str | None, received: list[int], *, follow: bool
) -> Iterator[Iterator[MessageBatch]]:
    """Yield the batches of messages. While they are read, `received` gets the numbers of SIGINT and SIGTERM."""
    verify_table_exists(settings.storage, "messages")
    if settings.storage.catalog_schema is None:
        reader = MessageReader(settings.storage, topic=topic, tags=tags, max_rows=_ROWS, max_bytes=_BYTES).warn_by(_say_ahead)

        def stop(number: int) -> None:
            received.append(number)
            reader.stop()

        with on_signals(stop):
            yield reader.follow(after) if follow else reader.read(after)
        return
    from halfway.clients.reading.message_rows import Wanted
    from halfway.pipelines.operate.catalog_messages import catalog_messages
    from halfway.pipelines.runtime.reader_session import reader_session

    with reader_session(settings, say) as session, on_signals(received.append):
        wanted = Wanted(topic, tags_in(tags), _ROWS, _BYTES)
        yield catalog_messages(
            session(), settings.storage, after, wanted, goes_on=lambda: follow and not received, warn_of_ahead=_say_ahead
        )


def _show_json(found: Sequence[CommittedMessage], form: BodyForm) -> None:
    for message in found:
        typer.echo(to_json(_facts(message, form)))


def _facts(message: CommittedMessage, form: BodyForm) -> dict[str, Any]:
    """Return a message as JSON has it: times as ISO 8601 in UTC, the body as it is to be shown."""
    names = [name for name in CommittedMessage.__dataclass_fields__ if name not in ("body", "bookmark")]
    facts = {name: getattr(message, name) for name in names}
    facts |= {name: value.isoformat() for name, value in facts.items() if name in ("born_at", "half_at", "committed_at")}
    shown = {} if form is BodyForm.NONE else {"body": _body_text(message.body, form)}
    return {**facts, **message.bookmark._asdict(), **shown}


def _body_text(body: bytes, form: BodyForm) -> str:
    return body.hex() if form is BodyForm.HEX else body.decode(errors="backslashreplace")


class _Lines:
    """A table without an end: each column is as wide as the first messages need. Long bodies are cut."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def __call__(self, found: Sequence[CommittedMessage], form: BodyForm) -> None:
        rows = [_row(message, form) for message in found]
        if not rows:
            return
        if not self._widths:
            rows.insert(0, _COLUMNS[: len(rows[0])])
            self._widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        for row in rows:
            typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, self._widths, strict=False)), row[-1]]).rstrip())


def _row(message: CommittedMessage, form: BodyForm) -> tuple[str, ...]:
    at = message.committed_at.isoformat(" ", "milliseconds")
    cells = [at, message.topic, message.tags or "", message.keys or "", message.transaction_id]
    if form is not BodyForm.NONE:
        text = _body_text(message.body[: 4 * _SHOWN_OF_BODY], form)
        is_cut = len(text) > _SHOWN_OF_BODY or len(message.body) > 4 * _SHOWN_OF_BODY
        cells.append(f"{text[:_SHOWN_OF_BODY]} … {len(message.body):,} bytes" if is_cut else text)
    return tuple(printable(cell) for cell in cells)
