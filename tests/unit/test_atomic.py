"""Files are written whole or not at all."""

from __future__ import annotations

import pytest

from course_lib.atomic import write_atomically


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_text_is_utf8_with_its_line_ends_and_bytes_stay_bytes(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "块\r\n")
    assert path.read_bytes() == "块\r\n".encode()
    write_atomically(str(path), b"\xff")
    assert path.read_bytes() == b"\xff" and path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]
