"""Text for training: windows across files, the split, and what is refused before anything starts."""

import os

import pytest
import torch

from retrograde.training.data import END, Text, open_data
from retrograde.training.errors import TrainingError


def whole(parts):
    return b"".join(part.path.read_bytes()[part.begin : part.end] + bytes([END]) for part in parts)


@pytest.fixture
def folder(tmp_path):
    for i in range(23):
        (tmp_path / f"{i:02d}.txt").write_text(f"file {i} " * (i + 1))
    return tmp_path


def test_windows_are_the_text(folder):
    text = open_data([folder], 16).train
    all_of_it = whole(text.parts)
    assert len(text) == len(all_of_it)
    for start in range(0, len(text) - 40, 7):
        assert bytes(text.window(start, 40).tolist()) == all_of_it[start : start + 40]
    assert bytes(text.window(0, len(text)).tolist()) == all_of_it


def test_split_by_file(folder):
    data = open_data([folder], 16)
    train, held_out = ({part.path.name for part in text.parts} for text in (data.train, data.held_out))
    assert held_out == {"09.txt", "19.txt"}
    assert len(train) == 21
    assert not train & held_out
    assert data.mark == open_data([folder], 16).mark
    (folder / "05.txt").write_text("longer " * 99)
    assert data.mark != open_data([folder], 16).mark


def test_one_file_is_cut(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("0123456789" * 100)
    data = open_data([path], 16)
    assert (len(data.train), len(data.held_out)) == (901, 101)
    assert bytes(data.train.window(898, 3).tolist()) == b"89\0"


def test_batches_depend_on_seed_and_step_alone(folder):
    text = open_data([folder], 16).train
    one = text.batch(seed=1, step=7, rows=4, context=16)
    assert one.shape == (4, 17)
    assert torch.equal(one, text.batch(1, 7, 4, 16))
    assert torch.equal(one[2:3], text.batch(1, 7, 4, 16, mine=slice(2, 3)))
    assert not torch.equal(one, text.batch(1, 8, 4, 16))
    assert not torch.equal(one, text.batch(2, 7, 4, 16))


def test_held_out_windows_do_not_overlap(folder):
    text = open_data([folder], 16).held_out
    every = text.spread(0, 16)
    assert every == list(range(0, (len(text) - 1) // 16 * 16, 16))
    few = text.spread(5, 16)
    assert len(few) == 5
    assert set(few) <= set(every)
    text.window(every[-1], 17)


def test_the_standard_library():
    data = open_data([], 128)
    assert len(data.train) > 5e6
    assert len(data.held_out) > 5e5
    assert not any("site-packages" in str(part.path) for part in data.train.parts)


def test_files_larger_than_what_is_read(tmp_path):
    """A sparse file far larger than memory: only the windows are read."""
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(b"a" * (1 << 17))
        file.truncate(1 << 42)
        file.seek((1 << 42) - 100)
        file.write(b"b" * 100)
    data = open_data([path], 64)
    assert bytes(data.held_out.window(len(data.held_out) - 50, 50).tolist()) == b"b" * 49 + b"\0"
    assert data.train.batch(0, 1, 4, 64).shape == (4, 65)


def test_folders_leave_out_what_is_no_text(folder):
    (folder / "empty.txt").touch()
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("secret " * 50)
    data = open_data([folder, folder / "00.txt"], 16)
    assert data.skipped == 2
    assert len(data.train.parts) + len(data.held_out.parts) == 23
    assert "2 empty or binary files left out" in data.summary()


def test_a_file_that_changes_is_told(folder):
    text = Text(open_data([folder], 16).train.parts)
    for path in folder.glob("*.txt"):
        path.write_text("short")
    with pytest.raises(TrainingError, match="has changed its size since training began"):
        text.batch(0, 0, 4, 16)
    for path in folder.glob("*.txt"):
        path.unlink()
    with pytest.raises(TrainingError, match="No such file"):
        text.batch(0, 0, 4, 16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", b"", "is empty"),
        ("binary", b"GIF\0\1\2" * 99, "is not text: it has zero bytes"),
        ("short", b"ten bytes.", "9 bytes to train on in .* are too few for a context of 64"),
        ("half", b"x" * 100, "10 bytes to hold out in .* are too few"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=message):
        open_data([path], 64)


def test_bad_paths(tmp_path):
    with pytest.raises(TrainingError, match="there is no file or folder"):
        open_data([tmp_path / "nowhere"], 16)
    with pytest.raises(TrainingError, match="no text files in"):
        open_data([tmp_path], 16)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TrainingError, match="neither a file nor a folder"):
        open_data([tmp_path / "pipe"], 16)


def test_unreadable(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("text " * 99)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything

        def refuse(self, *_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(TrainingError, match=r"cannot read .*secret.txt: Permission denied"):
        open_data([path], 16)
    with pytest.raises(TrainingError, match="Permission denied"):
        open_data([tmp_path], 16)


def test_a_folder_inside_that_cannot_be_read(folder, monkeypatch):
    (folder / "inner").mkdir()
    original = os.scandir

    def refuse(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(TrainingError, match=r"cannot read .*inner: Permission denied"):
        open_data([folder], 16)
