"""Files are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from course_lib.atomic import check_writable, write_atomically


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


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    for text in ("first", "second"):  # also through a link whose file is not there yet
        write_atomically(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert sorted(tmp_path.rglob("*")) == [link, target.parent, target]


@pytest.mark.parametrize("name", ["", ".", "new/", "loop", "pipe", "/dev/null", "/dev/full",
                                  "no/such", "n" * 256])
@pytest.mark.parametrize("act", [check_writable, lambda path: write_atomically(path, "new")])
def test_what_is_no_file_is_refused_and_left_alone(name, act, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    os.mkfifo("pipe")
    with pytest.raises(OSError) as caught:
        act(name)
    assert caught.value.strerror and "\n" not in caught.value.strerror
    assert sorted(os.listdir()) == ["loop", "pipe"]


def test_a_name_of_any_length_that_a_folder_takes_is_written(tmp_path):
    path = tmp_path / ("块" * 85)
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_atomically(path, "new")
    assert list(tmp_path.iterdir()) == [path]
