"""The settings of a command line: which file they come from, and which overrides are refused."""

from pathlib import Path

import pytest

from halfway.pipelines.local.command_settings import command_settings
from halfway.schemas.errors import SettingsError

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_conf_local_yaml_is_the_default_if_it_exists(tmp_path: Path) -> None:
    assert command_settings(None, None).resolution.transactionTimeOut == 6_000
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "local.yaml").write_text("resolution: {transactionTimeOut: 3s}")
    assert command_settings(None, None).resolution.transactionTimeOut == 3_000
    (tmp_path / "own.yaml").write_text("state: {buckets: 8}")
    assert command_settings(Path("own.yaml"), None).resolution.transactionTimeOut == 6_000


def test_set_keeps_what_comes_after_the_first_equals_sign() -> None:
    assert command_settings(None, ["storage.warehouse=s3://a/b?c=d"]).storage.warehouse == "s3://a/b?c=d"


@pytest.mark.parametrize("text", ["no-equals-sign", "=1"])
def test_an_override_without_name_or_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is not GROUP\.NAME=VALUE"):
        command_settings(None, [text])
