"""`MessageReader` on an object store: a real server of S3's protocol, with credentials from the environment alone."""

import os
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from halfway import Bookmark, MessageReader
from halfway.schemas.errors import TableError
from tests.support.message_tables import append, row


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server is a thread of this process: it answers only if the reader lets other threads run while it waits."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=environ["AWS_ENDPOINT_URL"], region_name="us-east-1").create_bucket(Bucket="shop")
    yield "s3://shop/warehouse"
    server.stop()


def test_a_table_in_s3_is_read_and_followed(bucket: str) -> None:
    table = f"{bucket}/messages"
    for batch_id in range(3):
        append(table, [row((0, batch_id), batch_id)])
    assert [batch.bookmark.batch_id for batch in MessageReader(table, max_rows=1).read(Bookmark(0, 0))] == [1, 2]
    follow = MessageReader(table).follow(Bookmark(0, 1), poll_s=0.05)
    assert [message.body for message in next(follow).messages] == [b"2"]
    append(table, [row((0, 3), 3)])
    assert next(follow).bookmark == Bookmark(0, 3)


def test_the_options_of_the_store_may_be_given_in_place_of_the_environment(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = f"{bucket}/of-options"
    append(table, [row((0, 0), 0)])
    options = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    for name in options:
        monkeypatch.delenv(name)
    follow = MessageReader(table, storage_options=options).follow(poll_s=0.05)
    assert next(follow).bookmark == Bookmark(0, 0)
    append(table, [row((0, 1), 1)], options)
    assert next(follow).bookmark == Bookmark(0, 1)


def test_what_s3_refuses_is_one_line_without_a_secret(bucket: str) -> None:
    with pytest.raises(TableError, match="there is no table s3://shop/warehouse/nothing yet") as caught:
        list(MessageReader(f"{bucket}/nothing").read())
    assert "very-secret" not in str(caught.value)
