"""The values that the generator draws from: keys, header names, header values and tick values, good and bad."""

NOT_TEXT = (b"\xc3(", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xf0\x9f\x98", b"ab\x80cd", b"\xe2\x82")
NUMBERS = (
    *(b"0", b"1", b"7", b"-1", b"-0", b"007", b"0" * 25 + b"7", b"600", b"2147483647", b"2147483648", b"-2147483648", b"-2147483649"),
    *(b"9223372036854775807", b"9223372036854775808", b"9" * 30, b"253402300799999", b"253402300800000", b"1699999999999"),
    *(b"+5", b" 5", b"5 ", b"5\n", b"\n5", b"\t5", b"5\x00", b"1_000", b"1e3", b"0x10", b"1.0", b"--1", b"-", b"five"),
    *("٣".encode(), "５".encode(), "−5".encode(), "5\u00a0".encode(), "\u20285".encode()),
)
BAD_NUMBERS = (None, b"", b"-1", b"+5", b" 5", b"5\n", b"1e3", b"five", b"9" * 30, b"9223372036854775807", "٣".encode(), *NOT_TEXT)
TEXTS = (
    b"",
    b" ",
    b"a",
    b"a\x00b",
    "größe €😀".encode(),
    b"COMMIT",
    b"ROLLBACK",
    b"UNKNOWN",
    b"UNKNOW",
    b"commit",
    b"null",
    b"x" * 300,
    b'{"a": 1}',
)
VALUES: tuple[bytes | None, ...] = (None, *NOT_TEXT, *NUMBERS, *TEXTS)
HALF_NAMES = (
    *("REAL_TOPIC", "PGROUP", "REAL_QID", "TAGS", "KEYS", "CHECK_IMMUNITY_TIME_IN_SECONDS", "BORN_TIMESTAMP", "INCARNATION"),
    *("SIGNED_AT", "SIGNATURE"),
)
OP_NAMES = ("ACTION", "PGROUP", "INCARNATION", "FROM_CHECK", "CHECK_TIMES", "REMARK", "HALF_SIGNATURE")
DELAYS = ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")
OWN_NAMES = (
    "",
    "own",
    "größe",
    "a b",
    " REAL_TOPIC",
    "PGROUP ",
    "real_topic",
    "名",
    "\n",
    "'",
    '"',
    "`x`",
    "a.b",
    "%s",
    "😀",
    "n" * 300,
    "TICKS",
    ",",
    "\u200b",
)
ODD_NAMES = (*HALF_NAMES, *OP_NAMES, *DELAYS, "TRANSACTION_CHECK_TIMES", "CHECK_ID", "PARTITIONS", "HALF_LOST", "bad\ufffdname")
KEYS = (
    None,
    b"",
    b"k",
    b"k" * 255,
    b"k" * 256,
    b"k" * 2_000,
    "ü".encode() * 127,
    "ü".encode() * 128,
    *NOT_TEXT,
    b"\x00",
    b"a\nb",
    b"'; --",
    "😀".encode(),
)
GROUPS = (b"g", b"h", "größe".encode(), b"ghost")
TICK_VALUES = (
    b"{}",
    b'{"absent_groups": []}',
    b'{"absent_groups": [], "asked_ms": 5}',
    b'{"absent_groups": ["ghost", "\xc3\xa9"]}',
    b'{"other": 1}',
    b"",
    None,
)
BAD_TICK_VALUES = (
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"7",
    b" ",
    b"{'absent_groups': []}",
    b'{"absent_groups": "g"}',
    b'{"absent_groups": {}}',
    b'{"asked_ms": 1.5}',
    *NOT_TEXT,
)
BAD_NOTICES: tuple[bytes | None, ...] = (
    None,
    b"",
    b"1",
    b":",
    b"1:",
    b":1",
    b"-1:2",
    b"1:2:3",
    b" 1:2",
    b"1:2\n",
    b"a:b",
    b"1:2 ",
    "١:٢".encode(),
    *NOT_TEXT,
)
