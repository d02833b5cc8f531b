"""Phases, outcomes, reasons and counts: the words that the protocol, the tables and the commands share."""

from enum import IntEnum, StrEnum


class Phase(IntEnum):
    """The phase of a transaction. All but PENDING are settled, and are remembered for `resolved_retention` (R11)."""

    PENDING = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    DISCARDED = 3
    LOST = 4


class Kind(IntEnum):
    """The kind of an outcome."""

    COMMIT = 1
    CHECK = 2
    DISCARD = 3
    QUARANTINE = 4
    REPORT = 5
    """A bucket's report after a batch, for the progress line and the metrics. It is not about one message."""


class Reason(StrEnum):
    """Why a message is in `discarded` or a record in `quarantine`."""

    CHECK_MAX = "check_max"
    EXPIRED = "expired"

    CONFLICTING_VERDICT = "conflicting_verdict"
    LATE_VERDICT = "late_verdict"
    ORPHAN_OP = "orphan_op"
    GROUP_MISMATCH = "group_mismatch"
    ID_CONFLICT = "id_conflict"
    STALE_INCARNATION = "stale_incarnation"
    INCARNATION_REFUSED = "incarnation_refused"
    HALF_LOST = "half_lost"

    # The job names the first of these that holds for a record (R14).
    MISSING_KEY = "missing_key"
    KEY_TOO_LONG = "key_too_long"
    KEY_NOT_UTF8 = "key_not_utf8"
    HEADERS_TOO_LARGE = "headers_too_large"
    MISSING_HEADER = "missing_header"
    BAD_HEADER = "bad_header"
    DUPLICATE_HEADER = "duplicate_header"
    UNKNOWN_ACTION = "unknown_action"
    DELAY_NOT_SUPPORTED = "delay_not_supported"
    BODY_TOO_LARGE = "body_too_large"
    BAD_TICK = "bad_tick"
    BAD_SIGNATURE = "bad_signature"


DISCARD_REASONS = (Reason.CHECK_MAX, Reason.EXPIRED)

MAX_DETAIL = 500
"""The most characters of `detail` in `quarantine`. It may quote what a record says."""


class Count(StrEnum):
    """What is counted besides quarantined records, which are counted by their reason."""

    HALVES = "halves"
    OPS = "ops"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    CHECKED = "checked"
    DISCARDED = "discarded"
    UNKNOWN = "unknown"
    DUPLICATE_HALF = "duplicate_half"
    DUPLICATE_OP = "duplicate_op"
    PUT_OFF = "put_off"
    LOST = "lost"
    ADOPTED = "adopted"
    """Records whose end the adopted tables hold: discarded halves, quarantined records (decision 6)."""
    AGED_OUT = "aged_out"
    """Verdicts that a new checkpoint reads, of halves that the half topic has deleted long ago (decision 6)."""


COUNTED_QUARANTINE = {
    reason: str(Count.LOST if reason is Reason.HALF_LOST else reason) for reason in Reason if reason not in DISCARD_REASONS
}
"""Reason of a quarantine → the name under which it is counted."""
