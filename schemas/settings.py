"""Settings: one YAML file, overridden by the environment, then by the command line (design §5).

RocketMQ's own names keep their spelling. Durations are integers in ms, or strings with a unit (`500ms`, `2s`, `72h`).
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from schemas.errors import SettingsError
from schemas.security import Security, SettingsGroup, SigningSettings

ENV_PREFIX = "HALFWAY__"
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)?")


def parse_duration_ms(value: object) -> int:
    """Read a duration: an int is ms, a string has a unit of ms, s, m, h or d (none: ms).

    Raises:
        ValueError: if it is neither, or negative.
    """
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) and value is not True else None
    if match is None:
        raise ValueError("a duration is a number of ms or has a unit, such as 500ms, 2s, 5m, 72h or 7d")
    return int(match[1]) * _UNITS_MS[match[2] or "ms"]


DurationMs = Annotated[int, BeforeValidator(parse_duration_ms)]
PositiveDurationMs = Annotated[int, BeforeValidator(parse_duration_ms), Field(gt=0)]


class KafkaSettings(SettingsGroup):
    """Where Kafka is and how its topics are called. Without `bootstrap_servers` the local development broker is meant."""

    bootstrap_servers: str | None = None
    half_topic: str = "transactions.half"
    op_topic: str = "transactions.op"
    check_topic: str = "transactions.check"
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_offsets_per_trigger: Annotated[int, Field(gt=0)] | None = 400_000
    security: Security = Security()
    signing: SigningSettings = SigningSettings()

    @model_validator(mode="after")
    def _topics_differ(self) -> Self:
        if len({self.half_topic, self.op_topic, self.check_topic}) < 3:
            raise ValueError("half_topic, op_topic and check_topic must differ")
        return self

    def servers(self) -> str:
        """Return `bootstrap_servers`.

        Raises:
            SettingsError: if none is set.
        """
        if not self.bootstrap_servers:
            raise SettingsError(
                "no Kafka is configured: set kafka.bootstrap_servers in the configuration file or "
                f"{ENV_PREFIX}KAFKA__BOOTSTRAP_SERVERS=host:port, or start a local one with `halfway broker start`"
            )
        return self.bootstrap_servers

    def as_librdkafka_dict(self) -> dict[str, str]:
        """Return the connection part of a librdkafka configuration; secrets in clear."""
        return {"bootstrap.servers": self.servers(), **self.security.as_librdkafka_dict()}

    def as_spark_options(self) -> dict[str, str]:
        """Return the connection part of Spark's Kafka options; secrets in clear."""
        return {"kafka.bootstrap.servers": self.servers(), **self.security.as_spark_options()}


class ResolutionSettings(SettingsGroup):
    """The rules' numbers (design §3). All times in ms."""

    transactionTimeOut: PositiveDurationMs = 6_000
    transactionCheckInterval: PositiveDurationMs = 30_000
    transactionCheckMax: Annotated[int, Field(ge=1)] = 15
    tick_interval: DurationMs = 1_000
    half_retention: PositiveDurationMs = 72 * 3_600_000
    resolved_retention: DurationMs = 60_000
    max_body_bytes: Annotated[int, Field(gt=0, le=512 * 1024 * 1024)] = 4 * 1024 * 1024


class StateSettings(SettingsGroup):
    """How the state is cut. Both are frozen in a checkpoint once it is made."""

    buckets: Annotated[int, Field(ge=1, le=65_536)] = 64
    shuffle_partitions: Annotated[int, Field(ge=1)] = 8


def _absolute(place: str) -> str:
    """A path of this machine from its root, because Spark's JVM, Delta and other readers differ in what a relative one means."""
    return place if re.match(r"[a-z][a-z0-9+.-]*:", place, re.IGNORECASE) else str(Path(place).absolute())


Place = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]


class StorageSettings(SettingsGroup):
    """Where tables and checkpoint are: URIs that the cluster can write, or paths, relative ones from the current directory.

    The tables are folders below `warehouse`, or, if `catalog_schema` is set, tables of that schema of Spark's catalog.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    warehouse: Place = ".halfway/warehouse"
    catalog_schema: Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)?$")] | None = None
    checkpoint: Place = ".halfway/checkpoint"

    @model_validator(mode="after")
    def _one_place_for_tables(self) -> Self:
        if self.catalog_schema and "warehouse" in self.model_fields_set:
            raise ValueError("the tables are either folders below storage.warehouse or in storage.catalog_schema: set one, not both")
        return self


class TriggerSettings(SettingsGroup):
    """How often a batch starts, or one run over all that is waiting."""

    interval: DurationMs = 1_000
    available_now: bool = False


class MetricsSettings(SettingsGroup):
    """Prometheus metrics: where to listen, port 0 for nowhere."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class Settings(BaseSettings):
    """All settings of Halfway. Make one with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, nested_model_default_partial_update=True
    )

    kafka: KafkaSettings = KafkaSettings()
    resolution: ResolutionSettings = ResolutionSettings()
    state: StateSettings = StateSettings()
    storage: StorageSettings = Field(default_factory=StorageSettings)
    trigger: TriggerSettings = TriggerSettings()
    metrics: MetricsSettings = MetricsSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take what `load_settings` merged, and nothing else."""
        return (init_settings,)


def load_settings(
    path: Path | None = None, *, overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings: the file at `path`, then `HALFWAY__GROUP__NAME` of the environment, then `overrides`.

    Args:
        path: a YAML file; None for the built-in defaults, which `conf/default.yaml` repeats.
        overrides: dotted name (`resolution.tick_interval`) → value.
        environ: the environment; `os.environ` if None.

    Raises:
        SettingsError: an unknown name (the nearest right one is named), a wrong value, or no such file.
    """
    merged: dict[str, Any] = {}
    for dotted, value, origin in [
        *_from_file(path),
        *_from_environment(os.environ if environ is None else environ),
        *((name, value, f"--set {name}") for name, value in (overrides or {}).items()),
    ]:
        _put(merged, dotted, value, origin)
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{name or 'settings'}: {first['msg'].removeprefix('Value error, ')}") from None


def _from_file(path: Path | None) -> Iterator[tuple[str, object, str]]:
    if path is None:
        return
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the configuration {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{path}{where}: this is not YAML") from None
    if content is not None and not isinstance(content, dict):
        raise SettingsError(f"{path}: expected groups of settings ({', '.join(Settings.model_fields)})")
    yield from _flatten(content or {}, (), str(path))


def _flatten(content: Mapping[object, object], prefix: tuple[str, ...], origin: str) -> Iterator[tuple[str, object, str]]:
    for name, value in content.items():
        dotted = (*prefix, str(name))
        if isinstance(value, dict) and not _is_mapping(dotted):
            yield from _flatten(value, dotted, origin)
        else:
            yield ".".join(dotted), value, origin


def _is_mapping(dotted: tuple[str, ...]) -> bool:
    """Whether a setting's value is itself a mapping, whose names are the user's."""
    return ".".join(dotted).lower() in {name for name, field in _all_settings() if get_origin(field.annotation) is Mapping}


def secret_settings() -> frozenset[str]:
    """Return the dotted names, in small letters, of the settings that hold a secret."""
    return frozenset(name for name, field in _all_settings() if _holds_secret(field.annotation))


def _all_settings(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in (model or Settings).model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _all_settings(inner, f"{prefix}{name.lower()}.")
        else:
            yield prefix + name.lower(), field


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(_holds_secret(part) for part in get_args(annotation))


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX):
            yield name[len(ENV_PREFIX) :].replace("__", ".").lower(), environ[name], name


def _put(merged: dict[str, Any], dotted: str, value: object, origin: str) -> None:
    """Set one value under its group, names matched without regard to case as environments demand it."""
    model: type[BaseModel] = Settings
    *groups, last = dotted.split(".")
    for depth, group in enumerate(groups):
        field = _field(model, group, dotted, origin)
        inner = model.model_fields[field].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            raise SettingsError(f"{origin}: {'.'.join(groups[: depth + 1])} is one value, not a group of settings")
        merged, model = merged.setdefault(field, {}), inner
    field = _field(model, last, dotted, origin)
    if _is_group(model.model_fields[field]):
        if value is None:
            return
        raise SettingsError(f"{origin}: {dotted} is a group of settings, not one value")
    merged[field] = None if value == "" and field in ("max_offsets_per_trigger", "catalog_schema") else value


def _is_group(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _field(model: type[BaseModel], name: str, dotted: str, origin: str) -> str:
    by_lower = {field.lower(): field for field in model.model_fields}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"there are: {', '.join(model.model_fields)}"
    raise SettingsError(f"{origin}: unknown setting {dotted!r}; {hint}")
