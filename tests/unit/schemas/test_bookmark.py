import pytest

from halfway.schemas.bookmark import BEGINNING, Bookmark


def test_bookmarks_are_ordered_and_have_a_text() -> None:
    assert Bookmark(0, 900) < Bookmark(1, 0) < Bookmark(1, 1)
    for bookmark in (BEGINNING, Bookmark(0, 0), Bookmark(3, 2**62)):
        assert Bookmark.parse(str(bookmark)) == bookmark
    assert Bookmark.parse(" 2.17\n") == Bookmark(2, 17)


@pytest.mark.parametrize("text", ["", "7", "1.", ".1", "1.2.3", "-1.2", "1.-2", "1,2", "a.b", "1.2e3", f"{2**31}.0", f"0.{2**63}"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no bookmark: give EPOCH.BATCH .* such as 0.1234$"):
        Bookmark.parse(text)
