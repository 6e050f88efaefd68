"""Which files are read, and how much of them."""

from pathlib import Path

import pytest

from roundpipe_lightning.data import TextFolder
from roundpipe_lightning.data.corpus import find_files, standard_library
from roundpipe_lightning.errors import ConfigurationError


def fill(folder: Path) -> None:
    for number in range(20):
        path = folder / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + number]) * 10)
    (folder / "notes.txt").write_text("not Python")
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "module.py").write_text("skipped")


def test_the_standard_library_is_found_and_the_same_twice() -> None:
    folder = standard_library()
    files = find_files(folder, pattern="*.py")
    assert folder / "argparse.py" in files
    assert files == find_files(folder, pattern="*.py")
    assert not any("site-packages" in path.parts for path in files)


def test_the_order_depends_on_the_paths_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    files = find_files(tmp_path, pattern="*.py")
    assert len(files) == 20
    assert files != sorted(files)
    moved = tmp_path / "moved"
    moved.mkdir()
    fill(moved)
    names = [path.relative_to(tmp_path) for path in files]
    assert [path.relative_to(moved) for path in find_files(moved, pattern="*.py")] == names


def test_budgets_hold_exactly_and_no_file_is_in_both_parts(tmp_path: Path) -> None:
    fill(tmp_path)
    corpus = TextFolder(folder=str(tmp_path), train_bytes=43, validation_bytes=25).read()
    assert sum(map(len, corpus.validation)) == 25
    assert sum(map(len, corpus.train)) == 43
    assert not {text[:1] for text in corpus.validation} & {text[:1] for text in corpus.train}


def test_less_text_than_the_budget_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path)
    corpus = TextFolder(folder=str(tmp_path), train_bytes=10_000, validation_bytes=20).read()
    assert sum(map(len, corpus.train)) == 180


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_bytes": 0}, "data.text.train_bytes=0"),
        ({"validation_bytes": -1}, "data.text.validation_bytes=-1"),
    ],
)
def test_refuses_empty_budgets(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TextFolder(**options)  # type: ignore[arg-type]


def test_names_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        TextFolder(folder=str(tmp_path / "nowhere")).read()


def test_names_the_pattern_that_no_file_matches(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigurationError, match=r"data.text.pattern='\*.rs'"):
        TextFolder(folder=str(tmp_path), pattern="*.rs").read()


def test_says_when_validation_takes_all_files(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Lower data\.text\.validation_bytes"):
        TextFolder(folder=str(tmp_path), validation_bytes=200).read()
