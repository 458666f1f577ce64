"""Readers of documents: files of the project, installed packages, the standard library, Hugging Face data sets.

A path is `package:<distribution>/<glob>`, `stdlib:<glob>`, the id of a data set (reader `hub`), or a path or glob
relative to the project. Packages are found through their metadata and never imported.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata
import json
import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipeline.core.artifacts import fingerprint
from pipeline.core.errors import PipelineError
from pipeline.core.prompts import Document

logger = logging.getLogger(__name__)

ROW_FIELDS = ("text", "prompt", "messages", "conversations")
CHAT_ROLES = {"human": "user", "gpt": "assistant"}  # as `conversations` call them
MIN_LICENCE_WORDS = 40
DOCSTRING_WORDS = range(12, 31)
CHAT_MIN_TURNS = 6
CHAT_PROMPT_TURNS = 5  # the opening of a chat: odd, so that it begins and ends with the user
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
LICENCE_FILE = re.compile(r"---\r?\n(?P<header>.*?)\r?\n---[ \t]*(?:\r?\n(?P<text>.*))?", re.DOTALL)
DEMO_REMEDY = "pip install -e '.[demo]'"


@dataclass
class SourceConfig:
    name: str  # first part of the document ids
    domain: str
    reader: str  # a key of READERS
    path: str  # where the documents lie: see the module's docstring
    split: Optional[str] = None  # split of a data set: reader `hub` only, which needs it


def read_documents(sources: list[SourceConfig], root: Path) -> list[Document]:
    """Read all sources in order; relative paths start at `root`.

    Raises `PipelineError` naming the file (and the line or row), the pattern or the package at fault.
    """
    documents = [document for source in sources for document in _read_source(source, root)]
    repeats: Counter[str] = Counter()
    unique = []
    for document in documents:
        repeats[document.document_id] += 1
        number = repeats[document.document_id]
        name = document.document_id if number == 1 else f"{document.document_id}#{number}"
        unique.append(replace(document, document_id=name))
    return unique


def _read_source(source: SourceConfig, root: Path) -> list[Document]:
    reader = READERS.get(source.reader)
    if reader is None:
        raise PipelineError(
            f"Source {source.name} names the unknown reader {source.reader!r}.", f"choose one of {', '.join(READERS)}."
        )
    documents = list(reader(source, root))
    if not documents:
        raise PipelineError(
            f"Source {source.name} ({source.path}) holds no document that reader {source.reader!r} can use.",
            "check the path and the contents of the files.",
        )
    return documents


def find_files(path: str, root: Path) -> list[Path]:
    """The files that a source path names, sorted; `PipelineError` if there are none or the package is missing."""
    kind, separator, rest = path.partition(":")
    if separator and kind == "package":
        distribution, _, pattern = rest.partition("/")
        try:
            base = Path(str(importlib.metadata.distribution(distribution).locate_file("")))
        except importlib.metadata.PackageNotFoundError:
            raise PipelineError(f"The package {distribution} is not installed.", f"{DEMO_REMEDY}.") from None
    elif separator and kind == "stdlib":
        base, pattern = Path(sysconfig.get_paths()["stdlib"]), rest
    else:
        base, pattern = root, path
    found = [Path(name) for name in glob.glob(str(Path(glob.escape(str(base))) / pattern), recursive=True)]
    if separator and kind == "stdlib":
        found = [file for file in found if not STDLIB_SKIPPED & set(file.relative_to(base).parts)]
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise PipelineError(f"No file matches {path}.", "put the files there or correct the source's path.")
    return files


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PipelineError(f"{file} is not UTF-8 ({error}).", "convert the file to UTF-8.") from None


def _file_id(source: SourceConfig, file: Path) -> str:
    """The source's name and the path of the file below the last folder without a wildcard."""
    folders = Path(source.path).parent.parts
    wild = next((depth for depth, part in enumerate(folders) if glob.has_magic(part)), len(folders))
    return "/".join((source.name, *file.parts[-1 - (len(folders) - wild) :]))


def _row_documents(source: SourceConfig, rows: Iterator[tuple[str, Any]]) -> Iterator[Document]:
    """Documents out of (place, row) pairs; a place, such as a file and its line, stands in error messages."""
    blank = 0
    for place, row in rows:
        if not isinstance(row, dict) or not any(name in row for name in ROW_FIELDS):
            raise PipelineError(f"{place}: no field {', '.join(ROW_FIELDS)}.", "give each row one of them.")
        name = next((name for name in ROW_FIELDS if row.get(name)), None)
        document = None if name is None else _row_document(source, place, name, row[name])
        if document is None:
            blank += 1
        else:
            yield document
    if blank:
        logger.warning("Source %s: %d rows without content were skipped.", source.name, blank)


def _row_document(source: SourceConfig, place: str, name: str, value: Any) -> Document | None:
    """The document of one row (content-based id), or None for blank content."""
    if name in ("messages", "conversations"):
        messages = _messages(place, value if name == "messages" else _chat_messages(value))
    elif isinstance(value, str):
        messages = ({"role": "user", "content": value},) if name == "prompt" else None
    else:
        raise PipelineError(f"{place}: {name} is {type(value).__name__}, not text.", "correct the row.")
    text = value if messages is None else "\n".join(message["content"] for message in messages)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PipelineError(f"{place}: {name} holds half a surrogate pair.", "remove the broken character.") from None
    if not text.strip():
        return None
    identity = fingerprint(text if messages is None else messages)
    return Document(f"{source.name}/{identity}", source.name, source.domain, text, messages)


def _chat_messages(conversations: Any) -> Any:
    """A conversation with the fields `from` and `value`, as many public chat sets have them, as `messages`."""
    from trl.data_utils import maybe_convert_to_chatml

    messages = maybe_convert_to_chatml({"conversations": conversations})["messages"]
    if not isinstance(messages, list):
        return messages
    return [
        {**turn, "role": CHAT_ROLES.get(turn.get("role"), turn.get("role"))} if isinstance(turn, dict) else turn
        for turn in messages
    ]


def _messages(place: str, value: Any) -> tuple[dict[str, str], ...]:
    """Role and content of each message; other keys and trailing assistant turns, which are answers, are left out."""
    wellformed = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
    if not wellformed:
        raise PipelineError(
            f"{place}: the chat is not a list of {{role, content}} (or {{from, value}}) with text in both.",
            "correct the row.",
        )
    messages = [{"role": message["role"], "content": message["content"]} for message in value]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise PipelineError(f"{place}: the chat holds no turn to answer.", "add a user turn or remove the row.")
    return tuple(messages)


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    empty = True
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):  # a binary file is cut at \n only
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip(" \t\r\n"):
                    continue
                row = json.loads(text)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise PipelineError(
                    f"{file}, line {number}: not a JSON object in UTF-8 ({error}).", "correct or remove the line."
                ) from None
            empty = False
            yield f"{file}, line {number}", row
    if empty:
        raise PipelineError(f"{file} holds no rows.", "fill the file or remove it.")


def read_jsonl(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per line: `text` (cut into prompts), or `prompt`, `messages` or `conversations` (used as they are)."""
    for file in find_files(source.path, root):
        yield from _row_documents(source, _jsonl_rows(file))


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with pq.ParquetFile(file) as parquet:
            columns = [name for name in ROW_FIELDS if name in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(columns=columns) if columns else ():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise PipelineError(f"{file} is not a whole Parquet file ({reason}).", "copy or write it anew.") from None
    if not columns:
        raise PipelineError(f"{file}: no column {', '.join(ROW_FIELDS)}.", "give the file one of them.")
    if number == 0:
        raise PipelineError(f"{file} holds no rows.", "fill the file or remove it.")


def read_parquet(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per row, from the columns `text`, `prompt`, `messages` or `conversations`; others are not read."""
    for file in find_files(source.path, root):
        yield from _row_documents(source, _parquet_rows(file))


def read_text(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per text file."""
    for file in find_files(source.path, root):
        text = _read_text(file)
        if not text.strip():
            raise PipelineError(f"{file} is empty.", "fill the file or remove it.")
        yield Document(_file_id(source, file), source.name, source.domain, text, title=file.name)


def read_paragraphs(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per paragraph of a text file (content-based id): for a single long text."""
    for whole in read_text(source, root):
        for paragraph in whole.text.replace("\r\n", "\n").split("\n\n"):
            if paragraph.strip():
                name = f"{whole.document_id}/{fingerprint(paragraph)}"
                yield Document(name, source.name, source.domain, paragraph, title=whole.title)


def read_licences(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per English licence file (a YAML header between `---` lines, the text), unless deprecated or short."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in find_files(source.path, root):
        parts = LICENCE_FILE.fullmatch(_read_text(file))
        if parts is None:
            raise PipelineError(f"{file} has no YAML header between --- lines.", "use the reader 'text'.")
        text = parts["text"] or ""
        try:
            facts = yaml.load(parts["header"], Loader=loader)
        except yaml.YAMLError as error:
            raise PipelineError(f"{file}: the header is not YAML ({error}).", "correct the header.") from None
        if not isinstance(facts, dict):
            raise PipelineError(f"{file}: the header holds no keys.", "correct the header.")
        if facts.get("language", "en") != "en" or facts.get("is_deprecated") or len(text.split()) < MIN_LICENCE_WORDS:
            continue
        yield Document(_file_id(source, file), source.name, source.domain, text, title=facts.get("name"))


def read_python(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per Python file, cut at definitions and lines."""
    return (replace(document, is_code=True) for document in read_text(source, root))


def read_docstrings(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One chat prompt per docstring of Python files: its first paragraph, unless that is very short or long."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in find_files(source.path, root):
        try:
            nodes = list(ast.walk(ast.parse(_read_text(file))))
        except SyntaxError as error:
            raise PipelineError(f"{file} is not Python of this interpreter ({error}).", "narrow the path.") from None
        for node in nodes:
            docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
            paragraph = (docstring or "").split("\n\n")[0].strip()
            if len(paragraph.split()) in DOCSTRING_WORDS:
                name = f"{_file_id(source, file)}/{fingerprint(paragraph)}"
                messages = ({"role": "user", "content": paragraph},)
                yield Document(name, source.name, source.domain, paragraph, messages, file.name)


def read_chitchat(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One chat prompt per conversation of six turns or more between two people: its opening, from user to user."""
    for file in find_files(source.path, root):
        try:
            conversations = json.loads(_read_text(file))
        except json.JSONDecodeError as error:
            raise PipelineError(f"{file} is not valid JSON ({error}).", f"{DEMO_REMEDY} anew.") from None
        for name, conversation in conversations.items():
            turns = ["\n".join(part["text"].strip() for part in turn).strip() for turn in conversation["messages"]]
            opening = turns[:CHAT_PROMPT_TURNS]
            if len(turns) < CHAT_MIN_TURNS or not all(opening):
                continue
            messages = tuple(
                {"role": "assistant" if number % 2 else "user", "content": turn} for number, turn in enumerate(opening)
            )
            yield Document(f"{source.name}/{name}", source.name, source.domain, "\n".join(opening), messages)


def read_hub(source: SourceConfig, root: Path) -> Iterator[Document]:
    """One document per row of a data set on the Hugging Face hub, from the fields `text`, `prompt` or `messages`."""
    if source.split is None:
        raise PipelineError(
            f"Source {source.name} names no split of {source.path}.", "add `split: train` to the source."
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(source.path, split=source.split)
    except Exception as error:  # the library raises many kinds: network, missing data set, unknown split
        reason = str(error).strip().split("\n")[0]
        raise PipelineError(
            f"The data set {source.path} (split {source.split}) did not load: {reason}",
            "check the id, the split, the network and, for a gated data set, `hf auth login`.",
        ) from error
    rows = rows.select_columns([name for name in ROW_FIELDS if name in rows.column_names])
    places = (f"{source.path}, row {number}" for number in range(1, len(rows) + 1))
    yield from _row_documents(source, zip(places, rows))


READERS: dict[str, Callable[[SourceConfig, Path], Iterator[Document]]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "text": read_text,
    "paragraphs": read_paragraphs,
    "licences": read_licences,
    "python": read_python,
    "docstrings": read_docstrings,
    "chitchat": read_chitchat,
    "hub": read_hub,
}
