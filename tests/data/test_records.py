"""Records in files of all kinds, and what is said about broken ones."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roundpipe_lightning.data.records import DatasetRecords, Record, RecordFiles
from roundpipe_lightning.errors import ConfigurationError, DataError


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(*paths: str, start: int = 0) -> list[Record]:
    files = RecordFiles(paths=paths)
    return [record for part in files.parts() for record in files.read(part, start=start)]


def test_json_lines_skip_blank_ones_and_count_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}', "", '{"text": "two"}')
    first, second = read(path)
    assert (first.fields, second.fields) == ({"text": "one"}, {"text": "two"})
    assert second.place == f"{path}, line 3"
    assert [record.text("text") for record in read(path, start=1)] == ["two"]


def test_csv_and_whole_texts(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", "text,label", '"one, two",x', "three,y")
    assert [record.fields for record in read(table)] == [
        {"text": "one, two", "label": "x"},
        {"text": "three", "label": "y"},
    ]
    assert [record.get("label") for record in read(table, start=1)] == ["y"]
    (whole,) = read(write(tmp_path / "a.txt", "a", "b"))
    assert whole.fields == {"text": "a\nb\n"}
    assert read(str(tmp_path / "a.txt"), start=1) == []


def test_folders_and_patterns_are_read_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        write(tmp_path / name, '{"text": "x"}')
    (tmp_path / "picture.png").touch()
    names = [Path(part).name for part in RecordFiles(paths=[str(tmp_path)]).parts()]
    assert names == ["a.jsonl", "b.jsonl", "c.csv"]
    pattern = RecordFiles(paths=[str(tmp_path / "*.jsonl"), str(tmp_path / "b.jsonl")])
    assert [Path(part).name for part in pattern.parts()] == ["a.jsonl", "b.jsonl"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", '{"text": "x"}', '{"text": "y"', '{"text": "z"}')
    with pytest.raises(DataError, match=r"chat\.jsonl, line 2: this is not JSON .*mend or remove"):
        read(path)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '["x"]')
    with pytest.raises(DataError, match=r"line 1: this is a list, where a JSON object is needed"):
        read(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: this is not JSON"):
        read(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt: this is not a text in UTF-8"):
        read(str(tmp_path / "a.txt"))


def test_a_csv_line_of_another_length_is_named(tmp_path: Path) -> None:
    for line in ("one,x,y", "one"):
        path = write(tmp_path / "a.csv", "text,label", line)
        with pytest.raises(DataError, match=r"line 2: .*'text', 'label'.*Quote fields"):
            read(path)


def test_fields_are_checked() -> None:
    record = Record(fields={"text": " ", "label": 3}, place="a.jsonl, line 7")
    with pytest.raises(DataError, match=r"line 7: there is no field 'words'.*'text', 'label'"):
        record.get("words")
    with pytest.raises(DataError, match=r"line 7: the field 'text' is empty"):
        record.text("text")
    with pytest.raises(DataError, match=r"'label' is a value of type int, where a text is needed"):
        record.text("label")


def test_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing is found at .*none\.jsonl"):
        RecordFiles(paths=[str(tmp_path / "none.jsonl")]).parts()
    with pytest.raises(ConfigurationError, match=r"suffix that is not known\. Known are \.jsonl"):
        RecordFiles(paths=[write(tmp_path / "a.xml", "")]).parts()
    for wrong in ("a.jsonl", ()):
        with pytest.raises(ConfigurationError, match="not a list of paths"):
            RecordFiles(paths=wrong)


def test_parquet_reads_row_groups_from_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for pyarrow, which is optional: it has what is used of pyarrow 26."""
    groups = [[{"text": "a"}, {"text": "b"}], [{"text": "c"}]]
    opened: list[int] = []

    class ParquetFile:
        num_row_groups = len(groups)
        metadata = SimpleNamespace(
            row_group=lambda index: SimpleNamespace(num_rows=len(groups[index]))
        )

        def __init__(self, path: Path) -> None:
            assert path.name == "a.parquet"

        def read_row_group(self, index: int) -> Any:
            opened.append(index)
            return SimpleNamespace(to_pylist=lambda: groups[index])

    module = ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    path = write(tmp_path / "a.parquet")
    assert [record.text("text") for record in read(path)] == ["a", "b", "c"]
    opened.clear()
    (last,) = read(path, start=2)
    assert (last.text("text"), last.place) == ("c", f"{path}, row 2")
    assert opened == [1]


def test_the_datasets_library_is_asked_for_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    asked: dict[str, Any] = {}

    def load_dataset(path: str, **options: Any) -> list[dict[str, str]]:
        asked.update(options, path=path)
        return [{"text": "a"}, {"text": "b"}]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = DatasetRecords(path="json", split="train[:2]", options={"data_files": "x.jsonl"})
    (part,) = source.parts()
    (record,) = source.read(part, start=1)
    assert (record.text("text"), record.place) == ("b", "json, train[:2], row 1")
    assert asked == {"path": "json", "split": "train[:2]", "data_files": "x.jsonl"}


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"needs the package 'pyarrow'.*pip install"):
        read(path)
    with pytest.raises(ConfigurationError, match=r"needs the package 'datasets'"):
        list(DatasetRecords(path="x").read("train"))


def test_records_survive_unusual_text(tmp_path: Path) -> None:
    text = 'line\u2028separator, "quotes" and ünïcode\n'
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}, ensure_ascii=False))
    assert read(path)[0].text("text") == text
