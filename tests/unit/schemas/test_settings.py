"""The settings: precedence, durations, names, secrets, and the files in conf/."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from halfway.conf.loader import load_settings
from halfway.pipelines.kafka.spark_options import security_options, spark_options
from halfway.schemas.errors import SettingsError
from halfway.schemas.settings import KafkaSettings, Settings, parse_duration_ms
from tests.support.paths import ROOT

CONF = ROOT / "conf"
PASSWORD = 'p"a\\ss;word'
SASL = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.security.sasl_mechanism": "SCRAM-SHA-512",
    "kafka.security.user": 'o"hara',
    "kafka.security.password": PASSWORD,
}


def load(path: Path | None = None, **more: object) -> Settings:
    """Load settings without the environment that the tests run in."""
    return load_settings(path, **{"environ": {}, **more})  # type: ignore[arg-type]


def refused(text: str, **more: object) -> str:
    """Return the message of the error that loading raises. It is one line and contains `text`."""
    with pytest.raises(SettingsError) as caught:
        load(**more)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text("resolution: {transactionTimeOut: 1s, transactionCheckMax: 4}\nstate: {buckets: 8}\ntrigger:\n")
    return path


def test_defaults_are_rocketmqs() -> None:
    resolution = load().resolution
    assert (resolution.transactionTimeOut, resolution.transactionCheckInterval, resolution.transactionCheckMax) == (6_000, 30_000, 15)
    assert (resolution.half_retention, resolution.max_body_bytes) == (72 * 3_600_000, 4 * 1024 * 1024)
    assert resolution.max_clock_skew == 5 * 60_000


def test_file_overrides_defaults_and_leaves_the_rest_of_a_group(file: Path) -> None:
    settings = load(file)
    assert (settings.resolution.transactionTimeOut, settings.state.buckets) == (1_000, 8)
    assert settings.resolution.transactionCheckInterval == 30_000
    assert settings.trigger == Settings().trigger


def test_environment_overrides_file_and_command_line_overrides_both(file: Path) -> None:
    environ = {"HALFWAY__RESOLUTION__TRANSACTIONTIMEOUT": "2s", "HALFWAY__STATE__BUCKETS": "16", "HALFWAY_HOME": "x", "PATH": "y"}
    settings = load(file, environ=environ, overrides={"state.buckets": "32"})
    assert settings.resolution.transactionTimeOut == 2_000
    assert settings.resolution.transactionCheckMax == 4
    assert settings.state.buckets == 32


def test_the_processs_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWAY__KAFKA__BOOTSTRAP_SERVERS", "example:9092")
    assert load_settings().kafka.servers() == "example:9092"


@pytest.mark.parametrize(
    "name",
    [
        "HALFWAY__RESOLUTION__TRANSACTIONTIMEOUT",
        "HALFWAY__resolution__transactionTimeOut",
        "HALFWAY__Resolution__TransactionTimeout",
        "halfway__resolution__transactiontimeout",
    ],
)
def test_rocketmqs_names_are_known_in_any_case(name: str) -> None:
    assert load(environ={name: "9s"}).resolution.transactionTimeOut == 9_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (0, 0),
        (250, 250),
        ("250", 250),
        ("500ms", 500),
        ("2s", 2_000),
        (" 2 s ", 2_000),
        ("5m", 300_000),
        ("72h", 259_200_000),
        ("7d", 604_800_000),
    ],
)
def test_durations(text: object, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "s", "-1", -1, "1.5s", 1.5, "2 weeks", "2S", True, None, [1], "1h30m"])
def test_invalid_durations(text: object) -> None:
    with pytest.raises(ValueError, match="500ms"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["36501d", "300000000000d", 2**63])
def test_a_duration_has_an_end_so_that_no_batch_fails_on_a_time_that_no_state_holds(text: object) -> None:
    """It would fail for good: a batch is repeated under the settings that it began with (R16)."""
    assert parse_duration_ms("36500d") == 3_153_600_000_000
    with pytest.raises(ValueError, match="at most 36500d"):
        parse_duration_ms(text)


def test_zero_is_a_valid_tick_interval_and_no_valid_timeout() -> None:
    assert load(overrides={"resolution.tick_interval": "0"}).resolution.tick_interval == 0
    refused("resolution.transactionTimeOut", overrides={"resolution.transactionTimeOut": "0"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resolution.transactionTimeout2", "did you mean transactionTimeOut?"),
        ("resolution.transactionCheckMx", "did you mean transactionCheckMax?"),
        ("kafka.bootstrap_server", "did you mean bootstrap_servers?"),
        ("resolutoin.tick_interval", "did you mean resolution?"),
        ("transactionTimeout", "did you mean resolution.transactionTimeOut or relay.transaction_timeout?"),
        ("resolution.transaction_timeout", "did you mean transactionTimeOut?"),
        ("relay.transactionTimeOut", "did you mean transaction_timeout?"),
        ("kafka.half_retention", "did you mean resolution.half_retention?"),
        ("state.topics", "did you mean kafka.signing.topics or relay.topics?"),
        ("kafka.transactionCheckMx", "did you mean resolution.transactionCheckMax?"),
        ("zzz.y", "there are: kafka, resolution, state, storage, trigger, metrics"),
    ],
)
def test_the_message_for_an_unknown_name_suggests_the_nearest_one(name: str, hint: str) -> None:
    assert repr(name) in refused(hint, overrides={name: "1"})


def test_the_name_of_an_unknown_login_is_not_shown(tmp_path: Path) -> None:
    """It may be the secret, as in `password:SECRET`."""
    path = tmp_path / "own.yaml"
    path.write_text("kafka: {security: {sasl_mechanisms: PLAIN}}")
    assert "mechanisms" not in refused("own.yaml: an unknown setting in kafka.security; did you mean sasl_mechanism?", path=path)


def test_the_message_for_an_unknown_name_tells_where_it_was_set(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("state: {bucket: 8}")
    refused(f"{path}: unknown setting 'state.bucket'; did you mean buckets?", path=path)
    refused("HALFWAY__STATE__BUCKET: unknown", environ={"HALFWAY__STATE__BUCKET": "8"})
    refused("--set state.bucket: unknown", overrides={"state.bucket": "8"})


@pytest.mark.parametrize(
    "variable",
    [
        "HALFWAY_KAFKA_BOOTSTRAP_SERVERS",
        "HALFWAY_KAFKA__BOOTSTRAP_SERVERS",
        "HALFWAY_kafka_bootstrap_server",
        "halfway_kafka_bootstrapservers",
    ],
)
def test_a_variable_that_lacks_an_underscore_is_refused(variable: str) -> None:
    assert variable in refused("did you mean HALFWAY__KAFKA__BOOTSTRAP_SERVERS?", environ={variable: "kafka:9092"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HALFWAY_HOME", "x"),
        ("HALFWAY_SPARK_LOG", "INFO"),
        ("HALFWAY_BENCH_TASKS", "2"),
        ("HALFWAY_KEY", "x"),
        ("HALFWAY_METRICS_PORT", "tcp://10.0.0.1:9464"),
        ("HALFWAY_METRICS_SERVICE_HOST", "10.0.0.1"),
        ("HALFWAY_METRICS_SERVICE_PORT", "9464"),
    ],
)
def test_halfways_other_variables_and_those_of_kubernetes_are_no_settings(variable: str, value: str) -> None:
    assert load(environ={variable: value}) == load()


def test_the_message_for_a_wrong_value_has_the_value_and_tells_where_it_was_set(file: Path) -> None:
    refused("'abc' of HALFWAY__METRICS__PORT", environ={"HALFWAY__METRICS__PORT": "abc"})
    refused("99999 of --set metrics.port", overrides={"metrics.port": 99999})
    file.write_text("resolution: {transactionTimeOut: soon}")
    refused(f"such as 500ms, 2s, 5m, 72h or 7d, not 'soon' of {file}", path=file)


def test_a_group_is_no_value_and_a_value_no_group() -> None:
    refused("is a group of settings", overrides={"kafka.security": "SSL"})
    refused("is one value", overrides={"state.buckets.x": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resolution.transactionCheckMax", "0"),
        ("resolution.half_retention", "soon"),
        ("state.buckets", "0"),
        ("state.buckets", "many"),
        ("kafka.starting_offsets", "middle"),
        ("kafka.max_offsets_per_trigger", "0"),
        ("kafka.security.protocol", "TLS"),
        ("metrics.port", "65536"),
        ("trigger.available_now", "perhaps"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    refused(f"{name}: ", overrides={name: value})


@pytest.mark.parametrize("servers", ["kafka:9092", "a-1.b:9092, a_2:9093", "[::1]:9092", "10.0.0.1:1,[fe80::1%eth0]:65535"])
def test_addresses_of_kafka(servers: str) -> None:
    assert load(overrides={"kafka.bootstrap_servers": servers}).kafka.servers() == servers


@pytest.mark.parametrize(
    "servers", ["http://kafka:9092", "kafka", "kafka:", "kafka:0", "kafka:65536", "a:1,", "a:1;b:1", ":9092", "::1:9092", "a b:1"]
)
def test_what_is_no_address_of_kafka_is_refused(servers: str) -> None:
    told = "kafka.bootstrap_servers: expected host:port, or several with commas between them, such as kafka-1:9092,kafka-2:9092, not "
    refused(f"{told}{servers!r} of --set", overrides={"kafka.bootstrap_servers": servers})


@pytest.mark.parametrize("value", ["12345", "1.5", "true", "2024-01-31"])
def test_text_that_yaml_takes_for_something_else_needs_quotes(file: Path, value: str) -> None:
    file.write_text(f"kafka: {{security: {{password: {value}}}}}")
    assert value not in refused(
        f"kafka.security.password: Input should be a valid string, not the value of {file}: put it in quotes", path=file
    )
    file.write_text(f"kafka: {{half_topic: {value}}}")
    refused(": put it in quotes", path=file)
    file.write_text("kafka: {half_topic: null}")
    assert "quotes" not in refused("kafka.half_topic: Input should be a valid string", path=file)


def test_an_empty_rate_limit_is_none() -> None:
    assert load(environ={"HALFWAY__KAFKA__MAX_OFFSETS_PER_TRIGGER": ""}).kafka.max_offsets_per_trigger is None


def test_topics_must_differ() -> None:
    refused("must differ", overrides={"kafka.op_topic": "transactions.half"})


@pytest.mark.parametrize(
    ("content", "text"),
    [("kafka: [", "line 1: this is not YAML"), ("- a\n- b\n", "expected groups of settings"), ("kafka: 3", "is a group of settings")],
)
def test_the_message_for_a_broken_file_tells_what_is_wrong(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    refused(text, path=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(f"cannot read the configuration {tmp_path}/none.yaml", path=tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match=r"none\.yaml"):
        load_settings(f"{tmp_path}/none.yaml", environ={})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().state.buckets = 3  # type: ignore[misc]


def test_the_message_without_a_kafka_tells_what_to_do() -> None:
    for servers in (None, ""):
        with pytest.raises(SettingsError, match=r"`export HALFWAY__KAFKA__BOOTSTRAP_SERVERS=host:port`.*`halfway broker status` shows its"):
            load(overrides={"kafka.bootstrap_servers": servers}).kafka.servers()


def test_secrets_are_not_printed() -> None:
    settings = load(overrides={**SASL, "kafka.security.key_password": "hush"})
    for shown in (str(settings), repr(settings), repr(settings.kafka.security), settings.model_dump_json(), str(settings.model_dump())):
        assert PASSWORD not in shown
        assert "hush" not in shown


def test_secrets_are_not_in_error_messages() -> None:
    assert "hush" not in refused("password", overrides={**SASL, "kafka.security.password": "hush\nhush"})
    assert "hush" not in refused(
        "sasl_mechanism", overrides={**SASL, "kafka.security.sasl_mechanism": "GUESS", "kafka.security.password": "hush"}
    )


def test_secrets_are_not_in_the_errors_of_the_models_either() -> None:
    """A service makes them itself, and logs what they raise."""
    for wrong in ({"password": ["hush"]}, {"protocol": "SASL_SSL", "password": "hush"}, {"passwort": "hush"}):
        with pytest.raises(ValidationError) as raised:
            KafkaSettings(security=cast(Any, wrong))
        assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        "kafka: {signing: {cluster: c, keys: {order-service:SECRET}}}",
        "kafka: {signing: {cluster: c, keys: {SECRET: order-service}}}",
        "kafka: {security: {user: x, password:SECRET}}",
        "kafka: {security: {user: x, oauth: {client_secret:SECRET}}}",
        "kafka: {security: {SECRET: password}}",
    ],
)
def test_a_secret_in_the_place_of_a_name_is_not_in_the_error(tmp_path: Path, content: str) -> None:
    """As where YAML wants a space after the colon, or bash has taken the quotes away."""
    path = tmp_path / "own.yaml"
    path.write_text(content.replace("SECRET", "0123456789abcdef" * 4))
    assert "0123" not in refused("kafka.", path=path)
    signing = {"HALFWAY__KAFKA__SIGNING__KEYS": "{order-service:" + "0123456789abcdef" * 4 + "}", "HALFWAY__KAFKA__SIGNING__CLUSTER": "c"}
    assert "0123" not in refused("kafka.signing.keys: ", environ=signing)


GROUP_KEYS = {"a": ("a" * 32,), "b": ("b" * 32,)}


def signing_keys(**more: object) -> dict[str, tuple[str, ...]]:
    keys = load(**more).kafka.signing.keys  # type: ignore[arg-type]
    return {group: tuple(key.get_secret_value() for key in of_group) for group, of_group in keys.items()}


def test_mappings_of_several_sources_are_united(tmp_path: Path) -> None:
    """A key that one source drops silently would let anybody forge its group's records."""
    path = tmp_path / "own.yaml"
    path.write_text("kafka: {signing: {cluster: c, keys: {a: " + "a" * 32 + ", b: " + "x" * 32 + "}}}")
    environ = {"HALFWAY__KAFKA__SIGNING__KEYS": json.dumps({"b": "b" * 32})}
    assert signing_keys(path=path, environ=environ) == GROUP_KEYS
    assert signing_keys(path=path, environ={}, overrides={"kafka.signing.keys": {"b": "b" * 32}}) == GROUP_KEYS
    assert signing_keys(path=path, environ=environ, overrides={"kafka.signing.keys": "{}"}) == {}


@pytest.mark.parametrize("value", ["1:30", "0x10", "1_000", "1e400"])
def test_a_number_of_yaml_1_1_is_no_duration(file: Path, value: str) -> None:
    """`1:30` would be 90 ms."""
    file.write_text(f"resolution: {{transactionTimeOut: {value}}}")
    refused("resolution.transactionTimeOut: ", path=file)
    file.write_text("resolution: {transactionTimeOut: 90}")
    assert load(path=file).resolution.transactionTimeOut == 90


@pytest.mark.parametrize("group", ["007", "0x10", "1_000", "1:30"])
def test_a_group_may_look_like_a_number_of_yaml_1_1(tmp_path: Path, group: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"kafka: {{signing: {{cluster: c, keys: {{{group}: {'k' * 32}}}}}}}")
    assert signing_keys(path=path) == {group: ("k" * 32,)}


@pytest.mark.parametrize("group", ["no", "on", "7", "1.5", "2026-01-01"])
def test_a_group_that_yaml_takes_for_something_else_needs_quotes(tmp_path: Path, group: str) -> None:
    path = tmp_path / "own.yaml"
    for name, value in (("keys", "k" * 32), ("topics", "[invoices]")):
        path.write_text(f"kafka: {{signing: {{cluster: c, {name}: {{{group}: {value}}}}}}}")
        assert "put it in quotes" in refused(f"kafka.signing.{name}: YAML reads a name such as", path=path)
    path.write_text(f"kafka: {{signing: {{cluster: c, keys: {{'{group}': {'k' * 32}}}}}}}")
    assert signing_keys(path=path) == {group: ("k" * 32,)}


@pytest.mark.parametrize(
    ("content", "line"),
    [("kafka: {signing: {keys: {a: x, a: y}}}", 1), ("kafka: {}\nkafka: {}", 1), ("state:\n  buckets: 8\n  buckets: 9", 2)],
)
def test_a_name_that_occurs_twice_is_refused(tmp_path: Path, content: str, line: int) -> None:
    """PyYAML takes the last one, so that a key, or a whole group of settings, would be gone."""
    path = tmp_path / "own.yaml"
    path.write_text(content)
    refused(f"own.yaml line {line}: a name occurs twice", path=path)
    refused("kafka.signing.keys: expected", environ={"HALFWAY__KAFKA__SIGNING__KEYS": '{"a": "x", "a": "y"}'})


@pytest.mark.parametrize(
    "content",
    [
        "resolution: {half_retention: 72h, Half_Retention: 1h}",
        "resolution: {half_retention: 72h}\nResolution: {half_retention: 1h}",
        "resolution: {half_retention: 72h}\nresolution.half_retention: 1h",
    ],
)
def test_a_setting_that_is_spelled_in_two_ways_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    refused("occurs twice: case does not matter in names", path=path)


def test_a_variable_that_is_spelled_in_two_ways_is_refused() -> None:
    environ = {"HALFWAY__KAFKA__HALF_TOPIC": "a", "halfway__kafka__half_topic": "b"}
    refused("kafka.half_topic occurs twice", environ=environ)


def test_what_is_no_yaml_is_not_taken_for_a_tag(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("kafka: {bootstrap_servers: {{ servers }}}")
    refused("own.yaml line 1: this is not YAML", path=path)
    path.write_text("kafka:\n  bootstrap_servers: !servers\n")
    refused("own.yaml line 2: put a value that begins with `!` in quotes", path=path)


@pytest.mark.parametrize("value", ["!S3cret", "!!int S3cret", "!!bool S3cret", "!!timestamp S3cret", "!!float S3cret", "2026-13-45"])
def test_a_value_that_yaml_cannot_make_is_not_said(tmp_path: Path, value: str) -> None:
    """It may be a password."""
    path = tmp_path / "own.yaml"
    path.write_text(f"kafka: {{security: {{password: {value}}}}}")
    assert "S3cret" not in refused("own.yaml", path=path)
    assert "S3cret" not in refused("expected", environ={"HALFWAY__KAFKA__SIGNING__KEYS": f"{{a: {value}, b: [}}"})
    assert "S3cret" not in refused("kafka.signing.keys", environ={"HALFWAY__KAFKA__SIGNING__KEYS": f"{{a: {value}}}"})


def test_a_login_in_an_address_is_not_said() -> None:
    told = refused(
        "kafka.bootstrap_servers: expected host:port", overrides={"kafka.bootstrap_servers": "SASL_SSL://svc:S3cret@kafka-1:9093"}
    )
    assert "S3cret" not in told


@pytest.mark.parametrize(
    "name", ["kafka.signing.keys", "kafka.signing.job_keys", "kafka.signing.topics", "kafka.check_topics", "relay.topics", "relay.allow"]
)
@pytest.mark.parametrize("blank", ["", " ", "null", "~", "# to do"])
def test_a_variable_that_says_nothing_replaces_no_mapping(name: str, blank: str) -> None:
    """So is one whose secret or template value is missing: nothing would be verified, or bodies would go elsewhere."""
    told = "is shorter than" if name.endswith("job_keys") and blank.strip() else "it is blank"
    refused(told, environ={f"HALFWAY__{name.replace('.', '__').upper()}": blank})


@pytest.mark.parametrize("name", ["ca", "certificate", "key", "kerberos.keytab", "user", "password"])
def test_an_empty_variable_is_no_path_and_no_login(name: str) -> None:
    """As a path it would be the current folder."""
    security = load(environ={f"HALFWAY__KAFKA__SECURITY__{name.replace('.', '__').upper()}": ""}).kafka.security
    assert security == load().kafka.security


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("kafka: &itself {security: *itself}")
    refused("own.yaml: a group contains itself, by an alias", path=path)
    path.write_text("kafka: " + 5_000 * "[")
    refused("own.yaml: this is not YAML", path=path)


def test_a_location_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell replaces `~` only where a word begins with it, as it does not in `--set storage.warehouse=~/tables`."""
    monkeypatch.setenv("HOME", "/home/ann")
    assert load(overrides={"storage.warehouse": "~/tables"}).storage.warehouse == "/home/ann/tables"


def test_sasl_needs_mechanism_user_and_password() -> None:
    for missing in ("sasl_mechanism", "user", "password"):
        some = {name: value for name, value in SASL.items() if name != f"kafka.security.{missing}"}
        refused("SASL_SSL needs sasl_mechanism, user and password", overrides=some)


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_login_that_would_not_be_used_is_refused(protocol: str) -> None:
    refused(f"{protocol} has no login", overrides={**SASL, "kafka.security.protocol": protocol})


@pytest.mark.parametrize("name", ["kafka.max_offsets_per_trigger", "resolution.transactionCheckMax", "state.buckets", "metrics.port"])
def test_a_switch_is_no_number(name: str, tmp_path: Path) -> None:
    group, last = name.split(".")
    path = tmp_path / "own.yaml"
    path.write_text(f"{group}: {{{last}: yes}}")
    refused(f"{name}: expected a number, not True of {path}", path=path)


def test_certificate_and_key_go_together() -> None:
    refused("certificate and key go together", overrides={"kafka.security.certificate": "a.pem"})


def test_security_for_librdkafka_is_in_clear() -> None:
    assert load(overrides={**SASL, "kafka.bootstrap_servers": "h:1", "kafka.security.ca": "/ca.pem"}).kafka.as_librdkafka_dict() == {
        "bootstrap.servers": "h:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": 'o"hara',
        "sasl.password": PASSWORD,
        "ssl.ca.location": "/ca.pem",
    }


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [("PLAIN", "plain.PlainLoginModule"), ("SCRAM-SHA-256", "scram.ScramLoginModule"), ("SCRAM-SHA-512", "scram.ScramLoginModule")],
)
def test_jaas_quotes_what_would_end_its_strings(mechanism: str, module: str) -> None:
    options = security_options(load(overrides={**SASL, "kafka.security.sasl_mechanism": mechanism}).kafka.security)
    login = r'username="o\"hara" password="p\"a\\ss;word"'
    assert options["kafka.sasl.jaas.config"] == f"org.apache.kafka.common.security.{module} required {login};"
    assert options["kafka.sasl.mechanism"] == mechanism


def test_certificates_for_spark_are_pem(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"-----BEGIN {name}-----")
    own = {"protocol": "SSL", "ca": tmp_path / "ca", "certificate": tmp_path / "cert", "key": tmp_path / "key", "key_password": "hush"}
    security = load(overrides={f"kafka.security.{name}": value for name, value in own.items()}).kafka.security
    assert security_options(security) == {
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": "-----BEGIN ca-----",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": "-----BEGIN cert-----",
        "kafka.ssl.keystore.key": "-----BEGIN key-----",
        "kafka.ssl.key.password": "hush",
    }


LIBRDKAFKA = {
    "bootstrap.servers",
    "security.protocol",
    "sasl.mechanism",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
}
SPARK = {
    "kafka.bootstrap.servers",
    "kafka.security.protocol",
    "kafka.sasl.mechanism",
    "kafka.sasl.jaas.config",
    "kafka.ssl.truststore.type",
    "kafka.ssl.truststore.certificates",
    "kafka.ssl.keystore.type",
    "kafka.ssl.keystore.certificate.chain",
    "kafka.ssl.keystore.key",
    "kafka.ssl.key.password",
}


def test_kafka_clients_get_only_the_listed_options(tmp_path: Path) -> None:
    """Other options could load classes (`sasl.login.callback.handler.class`) or switch checks off."""
    (tmp_path / "pem").write_text("-----BEGIN …")
    own = {name: str(tmp_path / "pem") for name in ("ca", "certificate", "key")}
    every = {**SASL, "kafka.bootstrap_servers": "h:1", **{f"kafka.security.{name}": value for name, value in own.items()}}
    kafka = load(overrides={**every, "kafka.security.key_password": "hush"}).kafka
    assert set(kafka.as_librdkafka_dict()) == LIBRDKAFKA
    assert set(spark_options(kafka)) == SPARK
    others = {"ssl.endpoint.identification.algorithm", "sasl.login.callback.handler.class", "options"}
    for name in (LIBRDKAFKA | SPARK | others) - {"security.protocol"}:
        refused("unknown setting", overrides={f"kafka.{name}": "x"})
        refused("unknown setting", overrides={f"kafka.security.{name}": "x"})


@pytest.mark.parametrize("name", ["user", "password", "key_password"])
@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x7f"], ids=["line feed", "carriage return", "nul", "delete"])
def test_control_characters_are_refused_and_not_shown(name: str, character: str) -> None:
    told = refused(f"{name} has a line break", overrides={**SASL, f"kafka.security.{name}": f"hush{character}hush"})
    assert "hush" not in told


def test_default_yaml_is_the_defaults() -> None:
    assert load(CONF / "default.yaml") == load()


def test_default_yaml_has_every_setting() -> None:
    def names(model: type[BaseModel]) -> dict[str, object]:
        return {
            name: names(field.annotation) if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
            for name, field in model.model_fields.items()
        }

    def without_values(content: dict[str, object]) -> dict[str, object]:
        return {name: without_values(value) if isinstance(value, dict) else None for name, value in content.items()}

    assert without_values(yaml.safe_load((CONF / "default.yaml").read_text())) == names(Settings)


def test_local_yaml_has_short_times() -> None:
    settings = load(CONF / "local.yaml")
    resolution = settings.resolution
    assert (resolution.transactionTimeOut, resolution.transactionCheckInterval, resolution.transactionCheckMax) == (2_000, 2_000, 3)
    assert (settings.state.buckets, settings.state.shuffle_partitions) == (16, 2)
    here = Path.cwd() / ".halfway"
    assert (settings.storage.warehouse, settings.storage.checkpoint) == (str(here / "warehouse"), str(here / "checkpoint"))


def test_paths_become_absolute_and_uris_stay() -> None:
    settings = load_settings(environ={}, overrides={"storage.warehouse": "tables", "storage.checkpoint": "s3a://bucket/checkpoint"})
    assert settings.storage.warehouse == str(Path.cwd() / "tables")
    assert settings.storage.checkpoint == "s3a://bucket/checkpoint"


def test_databricks_yaml_takes_its_secrets_from_the_environment() -> None:
    refused("needs sasl_mechanism, user and password", path=CONF / "databricks.yaml")
    environ = {"HALFWAY__KAFKA__SECURITY__USER": "u", "HALFWAY__KAFKA__SECURITY__PASSWORD": "p"}
    assert load(CONF / "databricks.yaml", environ=environ).kafka.security.user == "u"


def test_tables_are_folders_or_in_a_catalog_not_both() -> None:
    assert load(overrides={"storage.catalog_schema": "main.payments"}).storage.catalog_schema == "main.payments"
    assert load(overrides={"storage.catalog_schema": "", "storage.warehouse": "tables"}).storage.catalog_schema is None
    refused("set one, not both", overrides={"storage.catalog_schema": "main.payments", "storage.warehouse": "tables"})


@pytest.mark.parametrize("name", ["main.payments.messages", "main.", "a b", "main.`x`", "x'; DROP"])
def test_invalid_catalog_schemas(name: str) -> None:
    refused("storage.catalog_schema", overrides={"storage.catalog_schema": name})


def test_databricks_has_kafkas_classes_under_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    security = load(overrides=SASL).kafka.security
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert security_options(security)["kafka.sasl.jaas.config"].startswith("org.apache.kafka.common.security.scram.ScramLoginModule ")
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "19.0")
    assert security_options(security)["kafka.sasl.jaas.config"].startswith("kafkashaded.org.apache.kafka.common.security.scram.")


def test_groups_have_check_topics_of_their_own() -> None:
    environ = {"HALFWAY__KAFKA__CHECK_TOPICS": '{"payments": "money.check", "billing": "money.check", "a.b": "c"}'}
    kafka = load(environ=environ).kafka
    topics = [kafka.check_topic_of(group) for group in ("payments", "billing", "a.b", "shop")]
    assert topics == ["money.check", "money.check", "c", "transactions.check"]
    assert kafka.all_check_topics() == ["transactions.check", "money.check", "c"]
    assert kafka.job_topics() == ["transactions.half", "transactions.op", *kafka.all_check_topics()]


@pytest.mark.parametrize("topic", ["transactions.half", "transactions.op"])
def test_a_check_topic_of_a_group_is_no_other_topic(topic: str) -> None:
    refused("half_topic, op_topic, relay_topic and check topics must differ", overrides={"kafka.check_topics": {"g": topic}})
    refused("kafka.check_topics.g", overrides={"kafka.check_topics": {"g": ""}})


OAUTH = {
    "kafka.bootstrap_servers": "h:1",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.security.sasl_mechanism": "OAUTHBEARER",
    "kafka.security.ca": "/ca.pem",
    "kafka.security.oauth.token_endpoint": "https://login/token",
    "kafka.security.oauth.client_id": "job",
    "kafka.security.oauth.client_secret": 'hush"; \\',
    "kafka.security.oauth.scope": "kafka",
    "kafka.security.oauth.extensions": {"a": "1", "b": "x y"},
}
KERBEROS = {
    "kafka.bootstrap_servers": "h:1",
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.security.sasl_mechanism": "GSSAPI",
    "kafka.security.kerberos.principal": "job@REALM",
    "kafka.security.kerberos.keytab": "/job.keytab",
}


def test_oauth_for_both_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN ca-----")
    kafka = load(overrides={**OAUTH, "kafka.security.ca": str(ca)}).kafka
    assert kafka.as_librdkafka_dict() == {
        "bootstrap.servers": "h:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://login/token",
        "sasl.oauthbearer.client.id": "job",
        "sasl.oauthbearer.client.secret": 'hush"; \\',
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "a=1,b=x y",
        "https.ca.location": str(ca),
        "ssl.ca.location": str(ca),
    }
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    package = "org.apache.kafka.common.security.oauthbearer"
    said = r'clientId="job" clientSecret="hush\"; \\" scope="kafka" extension_a="1" extension_b="x y"'
    assert security_options(kafka.security) == {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "OAUTHBEARER",
        "kafka.sasl.jaas.config": f'{package}.OAuthBearerLoginModule required {said} ssl.truststore.type="PEM" '
        f'ssl.truststore.location="{ca}";',
        "kafka.sasl.login.callback.handler.class": f"{package}.OAuthBearerLoginCallbackHandler",
        "kafka.sasl.oauthbearer.token.endpoint.url": "https://login/token",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": "-----BEGIN ca-----",
    }
    assert kafka.security.login == "job"
    assert "hush" not in repr(kafka) + kafka.model_dump_json()


def test_kerberos_for_both_clients() -> None:
    kafka = load(overrides=KERBEROS).kafka
    own = {"sasl.kerberos.principal": "job@REALM", "sasl.kerberos.keytab": "/job.keytab", "sasl.kerberos.service.name": "kafka"}
    assert kafka.as_librdkafka_dict() == {
        "bootstrap.servers": "h:1",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "GSSAPI",
        **own,
    }
    login = 'useKeyTab="true" storeKey="true" keyTab="/job.keytab" principal="job@REALM"'
    assert security_options(kafka.security) == {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "GSSAPI",
        "kafka.sasl.jaas.config": f"com.sun.security.auth.module.Krb5LoginModule required {login};",
        "kafka.sasl.kerberos.service.name": "kafka",
    }
    assert kafka.security.login == "job@REALM"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("oauth.client_secret", None, "OAUTHBEARER needs oauth.token_endpoint, oauth.client_id and oauth.client_secret"),
        ("oauth.token_endpoint", "login/token", "kafka.security.oauth.token_endpoint"),
        ("oauth.client_id", "a\nb", "oauth.client_id has a line break"),
        ("oauth.extensions", {"a": "1,b=2"}, "the names of extensions are letters"),
        ("oauth.extensions", {"a b": "1"}, "the names of extensions are letters"),
    ],
)
def test_a_wrong_oauth_login_is_refused_by_name(name: str, value: object, told: str) -> None:
    assert "hush" not in refused(told, overrides={**OAUTH, f"kafka.security.{name}": value})


def test_kerberos_needs_principal_and_keytab() -> None:
    refused("GSSAPI needs kerberos.principal and kerberos.keytab", overrides={**KERBEROS, "kafka.security.kerberos.keytab": None})
