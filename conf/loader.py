"""Loads the settings: one YAML file, overridden by the environment, then by the command line (conf/default.yaml)."""

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from halfway.schemas.errors import SettingsError, SetupError
from halfway.schemas.settings import ENV_PREFIX, Settings
from halfway.schemas.yaml_text import NameTwiceError, read_yaml

PACKAGED = Path(__file__).resolve().parent
# Kubernetes names its own variables after services: HALFWAY_METRICS_PORT=tcp://10.0.0.1:9464.
_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://")
_NEAR = 0.85
# Besides the secrets, their values may hold what others need not see.
_LOGINS = ("kafka.security.", "kafka.signing.")
_NO_SEPARATORS = str.maketrans("", "", "._")


def conf_file(name: str) -> Path:
    """Return the file `conf/<name>` of this package.

    What lies in the current directory does not count: others may have put it there.

    Raises:
        SetupError: the file does not exist.
    """
    if not (PACKAGED / name).is_file():
        raise SetupError(f"conf/{name} is missing: install Halfway's wheel again")
    return PACKAGED / name


def load_settings(
    path: Path | str | None = None, *, overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of the file at `path`, overridden by the environment, then by `overrides`.

    Args:
        path: a YAML file; None for the built-in defaults, which `conf/default.yaml` repeats.
        overrides: dotted name (`resolution.tick_interval`) → value.
        environ: variables `HALFWAY__GROUP__NAME` among others; `os.environ` if None.

    Raises:
        SettingsError: a name is unknown (the message suggests the nearest one), a value is wrong, a variable lacks an
            underscore, or the file cannot be read.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, tuple[str, object]] = {}
    for dotted, value, origin in [
        *_once(_from_file(None if path is None else Path(path))),
        *_once(_from_environment(os.environ if environ is None else environ)),
        *_once((name, value, f"--set {name}") for name, value in (overrides or {}).items()),
    ]:
        _put(merged, dotted, value, origin)
        origins[dotted.lower()] = (origin, value)
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = _shown(first["loc"])
        told = f"{name or 'settings'}: {first['msg'].removeprefix('Value error, ')}"
        if name.lower() in origins:
            origin, value = origins[name.lower()]
            may_be_secret = name.lower().startswith(_LOGINS) or "@" in str(value)  # as in `user:password@host`
            shown = "the value" if may_be_secret else repr(value)
            told += f", not {shown} of {origin}"
        if first["type"] == "string_type" and isinstance(first["input"], bool | int | float | date):
            told += ": put it in quotes"
        raise SettingsError(told) from None


def _shown(place: Sequence[int | str]) -> str:
    """Return the dotted name of a setting. What the user has named below a login may be a secret in a wrong place."""
    names = [str(part) for part in place]
    whole = ".".join(names)
    if not whole.lower().startswith(_LOGINS):
        return whole
    known = {name.lower() for name, _ in _all_settings()}
    return next((short for end in range(1, len(names)) if (short := ".".join(names[:end])).lower() in known), whole)


def _from_file(path: Path | None) -> Iterator[tuple[str, object, str]]:
    if path is None:
        return
    try:
        content = read_yaml(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        told = "this is not YAML"
        if isinstance(error, NameTwiceError):
            told = "a name occurs twice"
        elif "constructor for the tag" in str(getattr(error, "problem", "")):
            told = "put a value that begins with `!` in quotes"
        raise SettingsError(f"{path}{where}: {told}") from None
    if content is not None and not isinstance(content, dict):
        raise SettingsError(f"{path}: expected groups of settings ({', '.join(Settings.model_fields)})")
    try:
        yield from list(_flatten(content or {}, (), str(path)))
    except RecursionError:
        raise SettingsError(f"{path}: a group contains itself, by an alias") from None


def _once(found: Iterable[tuple[str, object, str]]) -> Iterator[tuple[str, object, str]]:
    """Yield what one source sets, and refuse two spellings of one name: one value would be dropped."""
    names = set[str]()
    for dotted, value, origin in found:
        if dotted.lower() in names:
            raise SettingsError(f"{origin}: {_shown(dotted.split('.'))} occurs twice: case does not matter in names")
        names.add(dotted.lower())
        yield dotted, value, origin


def _flatten(content: Mapping[object, object], prefix: tuple[str, ...], origin: str) -> Iterator[tuple[str, object, str]]:
    for name, value in content.items():
        dotted = (*prefix, str(name))
        if isinstance(value, dict) and not _is_mapping(dotted):
            yield from _flatten(value, dotted, origin)
        else:
            yield ".".join(dotted), value, origin


def _is_mapping(dotted: tuple[str, ...]) -> bool:
    """Return True if a setting's value is a mapping, whose keys the user chooses."""
    return ".".join(dotted).lower() in {name.lower() for name, field in _all_settings() if get_origin(field.annotation) is Mapping}


def secret_settings() -> frozenset[str]:
    """Return the dotted names, in lower case, of the settings that hold a secret."""
    return frozenset(name.lower() for name, field in _all_settings() if _holds_secret(field.annotation))


def _all_settings(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        group = _group(field)
        if group is not None:
            yield from _all_settings(group, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a group of settings; None for a single setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(_holds_secret(part) for part in get_args(annotation))


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    for name in sorted(environ):
        if name.upper().startswith(ENV_PREFIX):
            yield name[len(ENV_PREFIX) :].replace("__", ".").lower(), environ[name], name
        elif name.upper().startswith(ENV_PREFIX[:-1]):
            _refuse_near_setting(name, environ[name])


def _refuse_near_setting(variable: str, value: str) -> None:
    """Refuse a variable that means a setting and lacks an underscore. It would be ignored."""
    plain = {_plain(name): name for name, _ in _all_settings()}
    near = difflib.get_close_matches(_plain(variable[len(ENV_PREFIX) - 1 :]), plain, n=1, cutoff=_NEAR)
    if near and not _OF_KUBERNETES.match(value):
        meant = ENV_PREFIX + plain[near[0]].replace(".", "__").upper()
        raise SettingsError(f"{variable} is not the name of a setting, and would be ignored: did you mean {meant}?")


def _put(merged: dict[str, Any], dotted: str, value: object, origin: str) -> None:
    """Set one value in its group. Case does not matter in names, because environments often have upper case only."""
    model: type[BaseModel] = Settings
    *groups, last = dotted.split(".")
    for depth, name in enumerate(groups):
        field = _field(model, name, dotted, origin)
        group = _group(model.model_fields[field])
        if group is None:
            raise SettingsError(f"{origin}: {'.'.join(groups[: depth + 1])} is one value, not a group of settings")
        merged, model = merged.setdefault(field, {}), group
    field = _field(model, last, dotted, origin)
    if _group(model.model_fields[field]) is None:
        # An environment variable cannot be null, so an empty one is. As a path it would be the current folder.
        given = None if value == "" and type(None) in get_args(model.model_fields[field].annotation) else value
        merged[field] = _united(merged.get(field), given) if _is_mapping((*groups, last)) else given
    elif value is not None:
        raise SettingsError(f"{origin}: {dotted} is a group of settings, not one value")


def _united(former: object, value: object) -> object:
    """Return a mapping with the names of two sources: without those of a former one it may lack keys that must verify.

    An empty mapping removes all.
    """
    try:
        both = [read_yaml(each) if isinstance(each, str) else each for each in (former, value)]
    except yaml.YAMLError:
        return value
    return {**both[0], **both[1]} if all(isinstance(each, dict) and each for each in both) else value  # type: ignore[dict-item]


def _called(name: str, cutoff: float) -> list[str]:
    """Return the dotted names of the settings that are called like this in their groups; with cutoff 1 exactly so."""
    settings = defaultdict(list)
    for dotted, _ in _all_settings():
        settings[_plain(dotted.rpartition(".")[2])].append(dotted)
    return [dotted for found in difflib.get_close_matches(_plain(name), settings, n=1, cutoff=cutoff) for dotted in settings[found]]


def _plain(name: str) -> str:
    """Return a name as people remember it: without its case and its separators."""
    return name.lower().translate(_NO_SEPARATORS)


def _field(model: type[BaseModel], name: str, dotted: str, origin: str) -> str:
    """Return the field with this name in any case."""
    by_lower = {field.lower(): field for field in model.model_fields}
    if name.lower() in by_lower:
        return by_lower[name.lower()]

    def in_group(cutoff: float) -> list[str]:
        return [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)]

    near = in_group(_NEAR) or _called(name, 1) or in_group(0.5) or _called(name, _NEAR)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(model.model_fields)}"
    # A secret may have come to the place of a name, as in `password:SECRET`.
    is_shown = not dotted.lower().startswith(_LOGINS)
    told = f"unknown setting {dotted!r}" if is_shown else f"an unknown setting in {dotted[: dotted.rindex('.')]}"
    raise SettingsError(f"{origin}: {told}; {hint}")
