"""`halfway status`: show the state of the job on one page."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from halfway.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from halfway.pipelines.cli.output import say, show_first, show_json, show_table, utc_text
from halfway.pipelines.local.command_settings import command_settings
from halfway.schemas.settings import Settings
from halfway.transforms.views.durations import duration_text
from halfway.transforms.views.quiet import quiet_text
from halfway.transforms.views.totals import QUARANTINED, counted, quarantined_in

if TYPE_CHECKING:
    from halfway.pipelines.kafka.open_transactions import OpenTransaction
    from halfway.pipelines.operate.status import Status
    from halfway.pipelines.relay.relay_status import RelayStatus

_SHOWN_ROWS = 20


def status(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Show the job's horizon, lag, pending transactions, counts, rates and last batch.

    A running job is not disturbed.
    """
    from halfway.pipelines.operate.status import job_status
    from halfway.pipelines.runtime.reader_session import reader_session
    from halfway.pipelines.storage.state_reader import no_batch_yet

    settings = command_settings(config, overrides)
    with reader_session(settings, say) as session:
        now_ms = time.time_ns() // 1_000_000
        now = job_status(session, settings, now_ms)
    if as_json:
        show_json(_json_facts(now))
        return
    if now.batch_id is None:
        say(no_batch_yet(settings.storage))
    show_table(["job", ""], _rows(now, settings, now_ms))
    if now.kafka_error is not None:
        say(f"warning: {now.kafka_error}")
    if now.totals:
        rates = now.rates or {}
        last = "its last" if now.is_running is False else "last"
        over = f"per second, {last} {now.rates_over_s:.0f} s" if now.rates_over_s else ""
        rows = [
            (f"  {line.name}" if line.is_reason else line.name.replace("_", " "), f"{line.total:,}", _rate(rates.get(line.name)))
            for line in counted(now.totals)
        ]
        show_table(["since the checkpoint began", "", over], rows)
    if now.pending_by_group:
        _show_groups(now)
    if now.relays:
        _show_relays(now.relays)


def _json_facts(now: "Status") -> dict[str, object]:
    """Return the facts for `--json`: groups have no `most_checks`, and totals have the sum of the quarantined."""
    groups = [{name: value for name, value in asdict(group).items() if name != "most_checks"} for group in now.pending_by_group]
    quarantined = quarantined_in(now.totals)
    totals = {**now.totals, **({QUARANTINED: quarantined} if quarantined else {})}
    return {**asdict(now), "totals": totals, "pending_by_group": groups}


def _show_groups(now: "Status") -> None:
    rows = [
        (group.producer_group, f"{group.pending:,}", duration_text(group.oldest_age_ms), "away or behind" if group.is_absent else "")
        for group in now.pending_by_group
    ]
    show_first(["group", "pending", "oldest", ""], rows, "smaller groups", at_most=_SHOWN_ROWS)


def _show_relays(relays: "list[RelayStatus]") -> None:
    from halfway.pipelines.relay.positions import BEFORE_THE_FIRST

    rows = [(each.name, each.after or BEFORE_THE_FIRST, _instances(each)) for each in relays]
    show_table(["relay", "bookmark", "instances"], rows)
    stopped = [(topic.topic, topic.transaction_id, topic.cause) for each in relays for topic in each.stopped]
    if stopped:
        show_first(["stopped topic", "at message", ""], stopped, "more stopped topics", at_most=_SHOWN_ROWS)


def _instances(relay: "RelayStatus") -> str:
    lost = f"; another one does not start, because Kafka has lost {relay.lost} of its stopped topics" if relay.lost else ""
    return f"{relay.instances or 'none: nothing is relayed'}{lost}"


def _rows(now: "Status", settings: Settings, now_ms: int) -> list[tuple[str, str]]:
    running = {True: "yes", False: "no: time stands still", None: "unknown: only the job's machine and user can tell"}[now.is_running]
    if now.is_running is not False and (quiet := quiet_text(now.last_batch, settings, now_ms)):
        running += f", but {quiet}"
    if now.horizon_ms is None:
        horizon = "none yet: nothing is due until every partition has a tick"
    else:
        horizon = f"{utc_text(now.horizon_ms)}, {_lag(now.horizon_lag_ms)}"
    if now.unread is None:
        unread = "unknown, as Kafka does not tell"
    else:
        unread = ", ".join(f"{topic} {records:,}" for topic, records in now.unread.items() if records) or "none"
    held = [("held by a transaction", _held(each, now_ms)) for each in now.open_transactions]
    rows = [("running", running), ("horizon", horizon), *held, ("not read yet", unread), ("last batch", _last_batch(now))]
    rows += [("pending", f"{now.pending:,}"), ("verdicts without a half", f"{now.waiting:,}")]
    return [*rows, ("groups away or behind", _away(now))]


def _away(now: "Status") -> str:
    """Return the groups that somebody may miss, and how many have nothing pending, such as scripts that have ended."""
    missed = [group.producer_group for group in now.pending_by_group if group.is_absent]
    others = len(now.absent_groups) - len(missed)
    return ", ".join([*missed, *([f"{others} with nothing pending"] if others > 0 else [])]) or "none"


def _lag(lag_ms: int | None) -> str:
    if lag_ms is not None and lag_ms < 0:
        return f"{duration_text(-lag_ms)} ahead of the clock here"
    return f"{duration_text(lag_ms)} ago"


def _rate(per_second: float | None) -> str:
    """Return a rate to a tenth, or one below 1 to two digits: one message a minute is 0.017."""
    if per_second is None:
        return ""
    return f"{per_second:,.1f}" if per_second >= 1 else f"{per_second:.2g}"


def _held(transaction: "OpenTransaction", now_ms: int) -> str:
    """Return a transaction that is open and holds the horizon (R18), with its age."""
    age = "" if transaction.since_ms is None else f", open for {duration_text(now_ms - transaction.since_ms)}"
    return f"{transaction}{age}"


def _last_batch(now: "Status") -> str:
    if now.last_batch is None:
        return "none yet"
    return f"{now.last_batch.batch_id} took {now.last_batch.seconds:.2f} s, until {utc_text(now.last_batch.written_at_ms)}"
