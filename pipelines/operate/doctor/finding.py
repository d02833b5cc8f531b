"""Defines a finding of `halfway doctor`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from halfway.pipelines.runtime.paths import not_permitted
from halfway.schemas.errors import HalfwayError


class Health(StrEnum):
    """The result of a check. Only a PROBLEM keeps the job from working correctly."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    """The check was not possible from here, or another problem prevented it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: the check, its result, and a text that says how to fix what is wrong."""

    check: str
    health: Health
    text: str


def errors_as_findings(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of `look`. A HalfwayError becomes a problem, because its message says how to fix it.

    So does a file that this user may not use.
    """
    from halfway.pipelines.runtime.session import spark_errors  # noqa: PLC0415  # `halfway --help` needs no Spark

    try:
        with spark_errors():
            yield from look()
    except HalfwayError as error:
        yield Finding(check, Health.PROBLEM, " ".join(str(error).split()))
    except PermissionError as error:
        yield Finding(check, Health.PROBLEM, not_permitted(error))
