import importlib
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.sources import SourceConfig, read_documents
from pipeline.core.errors import PipelineError


def read(root, reader, path, split=None):
    return read_documents([SourceConfig("own", "legal", reader, path, split)], root)


def write_rows(path, rows):
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))


def test_unicode_line_separators_do_not_cut_rows(tmp_path):
    texts = ["One\u2028two\u2029three", "Four\u0085five"]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    documents = read(tmp_path, "jsonl", "rows.jsonl")
    assert [document.text for document in documents] == texts
    assert documents[0].messages == ({"role": "user", "content": texts[0]},)


def test_late_types_extra_keys_and_differing_columns_load(tmp_path):
    rows = [{"text": f"row {number}", "meta": None} for number in range(20_000)]
    chat = {"messages": [{"role": "user", "content": "hello there", "loss": True}], "text": None}
    write_rows(tmp_path / "a.jsonl", [*rows, {"text": "late", "meta": "now a string"}, chat])
    write_rows(tmp_path / "b.jsonl", [{"text": "other", "extra": {"nested": [1]}}])
    documents = read(tmp_path, "jsonl", "*.jsonl")
    assert len(documents) == 20_003
    assert documents[20_001].messages == ({"role": "user", "content": "hello there"},)


def test_row_ids_depend_on_content_and_repeats_stay_apart(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"prompt": "same"}, {"prompt": "same"}, {"prompt": "other"}])
    first = [document.document_id for document in read(tmp_path, "jsonl", "a.jsonl")]
    assert len(set(first)) == 3 and first[1] == f"{first[0]}#2"
    write_rows(tmp_path / "a.jsonl", [{"prompt": "new"}, {"prompt": "other"}])
    assert read(tmp_path, "jsonl", "a.jsonl")[1].document_id == first[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "ok"}\n{"prompt": \n', "a.jsonl, line 2: not a JSON"),
        (b'{"prompt": "ok"}\n\xff\n', "a.jsonl, line 2: not a JSON object in UTF-8"),
        (b'{"question": "?"}\n', "a.jsonl, line 1: no field text, prompt, messages"),
        (b"[1]\n", "a.jsonl, line 1: no field"),
        (b'{"text": 5}\n', "a.jsonl, line 1: text is int"),
        (b'{"text": "\\ud800"}\n', "a.jsonl, line 1: text holds half a surrogate"),
        (b'{"conversations": "hello"}\n', "a.jsonl, line 1: the chat is not a list"),
        (b'{"conversations": [7, {"from": "human"}]}\n', "a.jsonl, line 1: the chat is not a list"),
        (b'{"messages": [{"role": "user"}]}\n', "a.jsonl, line 1: the chat is not a list"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "a.jsonl, line 1: the chat holds no turn"),
        (b"", "a.jsonl holds no rows"),
        (b"\n\n", "a.jsonl holds no rows"),
        (b'{"text": null}\n', r"a.jsonl\) holds no document"),
    ],
)
def test_faulty_jsonl_names_file_and_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(PipelineError, match=message):
        read(tmp_path, "jsonl", "a.jsonl")


def test_conversations_are_chats_under_other_names(tmp_path):
    turns = [("human", "hello"), ("gpt", "hi"), ("human", "draft a clause"), ("gpt", "whereas")]
    write_rows(tmp_path / "a.jsonl", [{"conversations": [{"from": who, "value": text} for who, text in turns]}])
    (document,) = read(tmp_path, "jsonl", "a.jsonl")
    assert [message["role"] for message in document.messages] == ["user", "assistant", "user"]
    assert document.text == "hello\nhi\ndraft a clause"


def test_blank_rows_and_trailing_answers_are_left_out(tmp_path, caplog):
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    write_rows(tmp_path / "a.jsonl", [{"text": None}, {"prompt": "  "}, {"messages": turns}])
    (document,) = read(tmp_path, "jsonl", "a.jsonl")
    assert document.messages == ({"role": "user", "content": "question"},)
    assert "2 rows without content" in caplog.text


def test_parquet_reads_the_needed_columns(tmp_path):
    messages = [[{"role": "user", "content": "hello", "loss": True}], None]
    table = pa.table({"messages": messages, "text": [None, "a document"], "blob": [b"x", b"y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["question"], "more": [1]}), tmp_path / "b.parquet")
    documents = read(tmp_path, "parquet", "*.parquet")
    assert [document.text for document in documents] == ["hello", "a document", "question"]
    assert documents[0].messages == ({"role": "user", "content": "hello"},)


def test_truncated_empty_and_rowless_parquet_name_the_file(tmp_path):
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"text": [f"row {number}" for number in range(1000)]}), whole)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[: int(whole.stat().st_size * 0.6)])
    (tmp_path / "zero.parquet").write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rowless.parquet")
    pq.write_table(pa.table({"question": ["?"]}), tmp_path / "other.parquet")
    messages = {"cut": "not a whole", "zero": "not a whole", "rowless": "no rows", "other": "no column"}
    for name, message in messages.items():
        with pytest.raises(PipelineError, match=f"{name}.parquet.*{message}"):
            read(tmp_path, "parquet", f"{name}.parquet")


def test_text_files_and_paragraphs(tmp_path):
    (tmp_path / "2020").mkdir()
    (tmp_path / "2020" / "lease.txt").write_bytes("\ufeffFirst part.\r\n\r\nSecond part.".encode())
    (document,) = read(tmp_path, "text", "*/lease.txt")
    assert document.document_id == "own/2020/lease.txt" and document.text.startswith("First")
    assert [item.text for item in read(tmp_path, "paragraphs", "2020/lease.txt")] == ["First part.", "Second part."]
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(PipelineError, match="blank.txt is empty"):
        read(tmp_path, "text", "blank.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    with pytest.raises(PipelineError, match="latin.txt is not UTF-8"):
        read(tmp_path, "text", "latin.txt")


def test_licences_in_english_that_are_neither_short_nor_deprecated(tmp_path):
    body = "The licence grants rights. " * 12
    headers = {
        "good": "name: Good Licence",
        "english": "name: English\nlanguage: en",
        "french": "name: Licence\nlanguage: fr",
        "old": "name: Old\nis_deprecated: yes",
    }
    for name, header in headers.items():
        (tmp_path / f"{name}.LICENSE").write_text(f"---\nkey: {name}\n{header}\n---\n\n{body}")
    (tmp_path / "bare.LICENSE").write_text("---\nkey: bare\nname: Bare\n---")
    documents = read(tmp_path, "licences", "*.LICENSE")
    assert [document.title for document in documents] == ["English", "Good Licence"]
    assert all(document.text.strip() == body.strip() for document in documents)
    (tmp_path / "none.LICENSE").write_text(body)
    with pytest.raises(PipelineError, match="none.LICENSE has no YAML header"):
        read(tmp_path, "licences", "*.LICENSE")


def test_chats_of_six_turns_alternate_and_end_with_the_user(tmp_path):
    def chat(turns):
        return {"messages": [[{"text": f"turn {turn}"}, {"text": "more"}] for turn in range(turns)]}

    (tmp_path / "chats.json").write_text(json.dumps({"long": chat(8), "short": chat(5)}))
    (document,) = read(tmp_path, "chitchat", "chats.json")
    assert [message["role"] for message in document.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert document.messages[-1]["content"] == "turn 4\nmore"
    assert document.document_id == "own/long"


def test_standard_library_without_its_tests(tmp_path):
    code = read(tmp_path, "python", "stdlib:*.py")
    assert {"own/os.py", "own/json.py"} & {document.document_id for document in code} == {"own/os.py"}
    assert all(document.is_code for document in code)
    with pytest.raises(PipelineError, match="No file matches stdlib:test/"):
        read(tmp_path, "python", "stdlib:test/*.py")
    chats = read(tmp_path, "docstrings", "stdlib:calendar.py")
    assert chats and all(12 <= len(document.text.split()) <= 30 for document in chats)


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "own_corpus").mkdir()
    (tmp_path / "own_corpus" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "own_corpus" / "one.txt").write_text("text of the package")
    information = tmp_path / "own_corpus-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-corpus\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    (document,) = read(tmp_path / "elsewhere", "text", "package:own-corpus/own_corpus/*.txt")
    assert document.text == "text of the package"


def test_missing_package_files_and_reader_name_the_remedy(tmp_path):
    with pytest.raises(PipelineError, match=r"no-such-corpus is not installed.*pip install -e '.\[demo\]'"):
        read(tmp_path, "text", "package:no-such-corpus/*.txt")
    with pytest.raises(PipelineError, match=r"No file matches data/raw/\*.jsonl"):
        read(tmp_path, "jsonl", "data/raw/*.jsonl")
    with pytest.raises(PipelineError, match="unknown reader 'csv'.*jsonl"):
        read(tmp_path, "csv", "rows.csv")


class FakeRows(list):
    column_names = ["prompt", "score"]

    def select_columns(self, names):
        return FakeRows({name: row[name] for name in names} for row in self)


def test_hub_data_sets_load_lazily(tmp_path, monkeypatch):
    calls = []

    def load_dataset(name, split):
        calls.append((name, split))
        if name == "team/missing":
            raise FileNotFoundError("no such data set\nmore lines")
        return FakeRows([{"prompt": "question", "score": 1.0}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (document,) = read(tmp_path, "hub", "team/prompts", "train[:10]")
    assert calls == [("team/prompts", "train[:10]")] and document.text == "question"
    with pytest.raises(PipelineError, match="team/missing .*no such data set Remedy"):
        read(tmp_path, "hub", "team/missing", "train")
    with pytest.raises(PipelineError, match="names no split"):
        read(tmp_path, "hub", "team/prompts")
