"""The settings: names, types, defaults and limits. conf/default.yaml describes each; `conf/loader.py` loads them.

RocketMQ's names keep their spelling. A duration is an integer in ms, or a string with a unit (`500ms`, `2s`, `72h`).
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from halfway.schemas.errors import SettingsError
from halfway.schemas.headers import CHECK_OVERHEAD_BYTES, MAX_INT, RECORD_OVERHEAD_BYTES
from halfway.schemas.security import Security, SettingsGroup, SigningSettings, by_group, parse_text

ENV_PREFIX = "HALFWAY__"
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_CENTURY_MS = 36_500 * _UNITS_MS["d"]
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)?")


def parse_duration_ms(value: object) -> int:
    """Parse a duration: an int in ms, or a string with the unit ms, s, m, h or d. Without a unit it is in ms.

    Raises:
        ValueError: the value is neither, or negative, or more than a century: the job adds it to times.
    """
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    if match is None:
        raise ValueError("a duration is a number of ms or has a unit, such as 500ms, 2s, 5m, 72h or 7d")
    duration_ms = int(match[1]) * _UNITS_MS[match[2] or "ms"]
    if duration_ms > _CENTURY_MS:
        raise ValueError("a duration is at most 36500d")
    return duration_ms


def _no_switch(value: object) -> object:
    """Refuse a bool, which pydantic would read as 0 or 1: in YAML `on` and `yes` are bools too."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Number = Annotated[int, BeforeValidator(_no_switch)]
DurationMs = Annotated[int, BeforeValidator(parse_duration_ms)]
PositiveDurationMs = Annotated[int, BeforeValidator(parse_duration_ms), Field(gt=0)]


def _matching(form: str, told: str) -> AfterValidator:
    """Return a validator of texts of one form, whose error says it in words: pydantic's would be the expression."""

    def verify(text: str) -> str:
        if not re.fullmatch(form, text):
            raise ValueError(told)
        return text

    return AfterValidator(verify)


_TOPIC = r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}"
Topic = Annotated[str, _matching(_TOPIC, "the name of a topic has 1 to 249 letters of ASCII, digits, `.`, `_` or `-`")]
TopicOfGroup = Annotated[Mapping[str, Topic], BeforeValidator(by_group)]


def is_topic_name(name: str) -> bool:
    """Return True if a topic of Kafka can have this name."""
    return re.fullmatch(_TOPIC, name) is not None


_ADDRESS = re.compile(r"(\[[\dA-Fa-f:.%\w]+\]|[\w.-]+):(\d{1,5})")


def _addresses(servers: str | None) -> str | None:
    """Refuse what is no list of addresses: a client would look for a host of that name until it times out."""
    for address in servers.split(",") if servers else ():
        found = _ADDRESS.fullmatch(address.strip())
        if found is None or not 0 < int(found[2]) < 65_536:
            raise ValueError("expected host:port, or several with commas between them, such as kafka-1:9092,kafka-2:9092")
    return servers


class KafkaSettings(SettingsGroup):
    """The Kafka cluster and its topics. Without `bootstrap_servers`, commands use the local development broker."""

    bootstrap_servers: Annotated[str | None, AfterValidator(_addresses)] = None
    half_topic: Topic = "transactions.half"
    op_topic: Topic = "transactions.op"
    check_topic: Topic = "transactions.check"
    check_topics: TopicOfGroup = Field(default_factory=dict)
    relay_topic: Topic = "transactions.relay"
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_offsets_per_trigger: Annotated[Number, Field(gt=0)] | None = 400_000
    security: Security = Security()
    signing: SigningSettings = SigningSettings()

    @model_validator(mode="after")
    def _topics_differ(self) -> Self:
        if len(self.own_topics()) < 3 + len(self.all_check_topics()):
            raise ValueError("half_topic, op_topic, relay_topic and check topics must differ")
        return self

    def own_topics(self) -> frozenset[str]:
        """Return the topics that Halfway writes for itself. No message goes to one of them."""
        return frozenset((self.half_topic, self.op_topic, self.relay_topic, *self.all_check_topics()))

    def check_topic_of(self, producer_group: str) -> str:
        """Return the topic of a producer group's check requests."""
        return self.check_topics.get(producer_group, self.check_topic)

    def all_check_topics(self) -> list[str]:
        """Return the topics of check requests, each once: the shared one first."""
        return [*dict.fromkeys((self.check_topic, *self.check_topics.values()))]

    def job_topics(self) -> list[str]:
        """Return the half topic, the op topic and the topics of check requests."""
        return [self.half_topic, self.op_topic, *self.all_check_topics()]

    def servers(self) -> str:
        """Return `bootstrap_servers`.

        Raises:
            SettingsError: it is not set.
        """
        if not self.bootstrap_servers:
            raise SettingsError(
                f"no Kafka is configured: `export {ENV_PREFIX}KAFKA__BOOTSTRAP_SERVERS=host:port`, or set kafka.bootstrap_servers in the "
                "configuration file; `halfway broker start` starts a local one, and `halfway broker status` shows its address"
            )
        return self.bootstrap_servers

    def as_librdkafka_dict(self) -> dict[str, str]:
        """Return the connection part of a librdkafka configuration, with secrets in clear text."""
        return {"bootstrap.servers": self.servers(), **self.security.as_librdkafka_dict()}


class ResolutionSettings(SettingsGroup):
    """The numbers of the rules (docs/rules.md). All times are in ms."""

    transactionTimeOut: PositiveDurationMs = 6_000
    transactionCheckInterval: PositiveDurationMs = 30_000
    transactionCheckMax: Annotated[Number, Field(ge=1, le=MAX_INT)] = 15
    tick_interval: DurationMs = 1_000
    max_clock_skew: PositiveDurationMs = 5 * 60_000
    half_retention: PositiveDurationMs = 72 * 3_600_000
    resolved_retention: DurationMs = 60_000
    max_body_bytes: Annotated[Number, Field(gt=0, le=512 * 1024 * 1024)] = 4 * 1024 * 1024

    @property
    def max_record_bytes(self) -> int:
        """Return the size of the largest record: a body, its key and its headers."""
        return self.max_body_bytes + RECORD_OVERHEAD_BYTES

    @property
    def max_check_bytes(self) -> int:
        """Return the size of the largest check request: the largest record and the check's own headers."""
        return self.max_record_bytes + CHECK_OVERHEAD_BYTES


class StateSettings(SettingsGroup):
    """How the state is partitioned: fixed when a checkpoint is made, but other `shuffle_partitions` are not refused."""

    buckets: Annotated[Number, Field(ge=1, le=65_536)] = 64
    shuffle_partitions: Annotated[Number, Field(ge=1)] = 8


def _absolute(location: str) -> str:
    """Return a path in absolute form, and a URI as it is.

    Spark's JVM, Delta and other readers resolve relative paths differently. A shell replaces `~` only where a word
    begins with it.
    """
    if re.match(r"[a-z][a-z0-9+.-]*:", location, re.IGNORECASE):
        return location
    with suppress(RuntimeError):  # There is no such home.
        location = str(Path(location).expanduser())
    return str(Path(location).absolute())


Location = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]


class StorageSettings(SettingsGroup):
    """Where tables and checkpoint are: URIs that the cluster can write, or paths.

    A relative path starts at the current directory. The tables are folders below `warehouse`; if `catalog_schema` is
    set, they are tables of that schema of Spark's catalog.
    """

    model_config = ConfigDict(validate_default=True)

    warehouse: Location = ".halfway/warehouse"
    catalog_schema: Annotated[str, _matching(r"[\w-]+(\.[\w-]+)?", "expected SCHEMA or CATALOG.SCHEMA")] | None = None
    checkpoint: Location = ".halfway/checkpoint"

    @model_validator(mode="after")
    def _one_place_for_tables(self) -> Self:
        if self.catalog_schema and "warehouse" in self.model_fields_set:
            raise ValueError("the tables are either below storage.warehouse or in storage.catalog_schema: set one, not both")
        return self


class TriggerSettings(SettingsGroup):
    """How often a batch starts, or a single run over all records that are waiting."""

    interval: DurationMs = 500
    available_now: bool = False


class MetricsSettings(SettingsGroup):
    """Where the job, or the relay, serves Prometheus metrics. Port 0 switches them off."""

    port: Annotated[Number, Field(ge=0, le=65_535)] = 0
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class RelaySettings(SettingsGroup):
    """Which committed messages `halfway relay` sends on, to which Kafka topics (docs/relay.md)."""

    name: Annotated[str, _matching(r"[\w.-]{1,100}", "expected 1 to 100 letters, digits, `.`, `_` or `-`")] = "relay"
    allow: Annotated[tuple[str, ...], BeforeValidator(parse_text('JSON, such as ["orders", "shop.*"]'))] = ("*",)
    topics: Annotated[Mapping[str, Topic], BeforeValidator(parse_text('JSON, such as {"orders": "shop.orders"}'))] = {}
    poll_interval: PositiveDurationMs = 100
    retry_interval: PositiveDurationMs = 10_000
    transaction_timeout: Annotated[int, BeforeValidator(parse_duration_ms), Field(ge=1_000, le=900_000)] = 60_000


class Settings(SettingsGroup):
    """All settings of Halfway. `load_settings` makes them."""

    kafka: KafkaSettings = KafkaSettings()
    resolution: ResolutionSettings = ResolutionSettings()
    state: StateSettings = StateSettings()
    storage: StorageSettings = Field(default_factory=StorageSettings)
    trigger: TriggerSettings = TriggerSettings()
    metrics: MetricsSettings = MetricsSettings()
    relay: RelaySettings = RelaySettings()

    @model_validator(mode="after")
    def _relay_writes_no_own_topic(self) -> Self:
        own = sorted(set(self.relay.topics.values()) & self.kafka.own_topics())
        if own:
            raise ValueError(f"relay.topics sends messages to {own[0]}, which is one of Halfway's own topics: name another one")
        return self
