"""Files that are whole, and what tells one version of them from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from goal.files import ENDS, fingerprint, write_atomically


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "a", b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and [item.name for item in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("size", [0, 1, ENDS, ENDS + 1, 2 * ENDS, 3 * ENDS])
def test_fingerprint_sees_either_end_and_the_size(size: int, tmp_path: Path) -> None:
    content = bytes(size)
    versions = [content, content + b"0", b"1" + content[1:], content[:-1] + b"2"]
    found = []
    for version in versions:
        (tmp_path / "file").write_bytes(version)
        found.append(fingerprint([tmp_path / "file"]))
    assert len(set(found)) == len(set(versions))
    (tmp_path / "file").write_bytes(content)
    assert fingerprint([tmp_path / "file"]) == found[0]


def test_fingerprint_sees_names(tmp_path: Path) -> None:
    (tmp_path / "country=at").write_bytes(b"content")
    before = fingerprint([tmp_path / "country=at"])
    (tmp_path / "country=at").rename(tmp_path / "country=de")
    assert fingerprint([tmp_path / "country=de"]) != before
