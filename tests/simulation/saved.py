"""Saves a history in a file, and reads it again, so that it can be judged again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.simulation.history import Act, Decision, Fate, GroupCommit, History, KafkaState, Members, Numbers, Record, Row


def save(history: History, path: Path) -> None:
    """Write a history as JSON."""
    content: dict[str, Any] = {each.name: getattr(history, each.name) for each in dataclasses.fields(history)}
    content["records"] = [_fields(record) for record in history.records]
    content["rows"] = [_fields(row) for row in history.rows]
    content["still_pending"], content["overdue"] = sorted(history.still_pending), sorted(history.overdue)
    path.write_text(json.dumps(content, default=_bytes_as_text))


def load(path: Path) -> History:
    """Read a history that `save` has written."""
    content = json.loads(path.read_text(), object_hook=_text_as_bytes)
    return History(
        records=[_record(*fields) for fields in content["records"]],
        rows=[Row(*fields) for fields in content["rows"]],
        decisions=[Decision(*rest, Fate(fate)) for *rest, fate in content["decisions"]],
        commits=[GroupCommit(*fields) for fields in content["commits"]],
        members=[Members(*fields) for fields in content["members"]],
        acts=[Act(*fields) for fields in content["acts"]],
        numbers=[Numbers(*fields) for fields in content["numbers"]],
        still_pending=set(content["still_pending"]),
        overdue=set(content["overdue"]),
        clocks_jumped=content["clocks_jumped"],
        publisher_set_back_ms=content["publisher_set_back_ms"],
        is_at_rest=content["is_at_rest"],
    )


def _fields(each: Record | Row) -> list[Any]:
    return [getattr(each, field.name) for field in dataclasses.fields(each)]


def _record(*fields: Any) -> Record:
    record = Record(*fields)
    record.headers = tuple((name, value) for name, value in record.headers)
    record.state = KafkaState(record.state)
    return record


def _bytes_as_text(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"{value!r} has no place in a saved history")
    return {"bytes": bytes(value).decode("latin-1")}


def _text_as_bytes(value: dict[str, Any]) -> Any:
    return value["bytes"].encode("latin-1") if value.keys() == {"bytes"} else value
