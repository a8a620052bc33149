"""The corpus builder: what is a document, the split, reuse, and that nothing half-built is ever
used.
"""

import errno
import json
import os
import re
import shutil
import signal
import sys
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from cp_ring.errors import ConfigError
from cp_ring.tools import corpus as corpora
from cp_ring.tools import job as jobs
from cp_ring.tools import train
from tests.rings import refused
from tests.tools.test_bad_input import UNREADABLE


def make(path, cache):
    corpus = corpora.find(path, cache, 300)
    corpora.build(corpus)
    return corpus


def texts_of(corpus, split):
    """Documents of a split, decoded; checks that each one ends with the end-of-document token."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = Tokenizer.from_file(f"{corpus.path('tokenizer')}/tokenizer.json")
    end = tokenizer.token_to_id(corpora.END_OF_DOCUMENT)
    data = IndexedDataset(corpus.path(split))
    assert len(data.document_indices) == len(data) + 1
    texts = []
    for index in range(len(data)):
        ids = data[index].tolist()
        assert ids[-1] == end and end not in ids[:-1]
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "texts"
    (source / "inner").mkdir(parents=True)
    for index in range(7):
        (source / "inner" / f"{index}.txt").write_text(
            f"document {index}: caf\u00e9 \u4e2d\u6587\n" * (index + 1)
        )
    (source / "picture.bin").write_bytes(b"\xff\xfe\x00\x01")
    (source / ".hidden").write_text("not a document")
    (source / "blank.txt").write_text("  \n")
    return source


def test_folder_round_trip_and_split(folder, tmp_path):
    corpus = make(folder, tmp_path / "cache")
    train, valid = texts_of(corpus, "train"), texts_of(corpus, "valid")
    wanted = [(folder / "inner" / f"{index}.txt").read_text() for index in range(7)]
    assert sorted(train + valid) == sorted(wanted)
    assert valid == [wanted[6]]
    summary = corpus.summary()
    assert summary["documents"] == 7 and summary["vocab_size"] <= 300
    # 2 bytes a token
    assert os.path.getsize(corpus.path("train") + ".bin") == 2 * summary["tokens"]["train"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.JSONL", "data.ndjson"])
def test_json_lines(tmp_path, name):
    file = tmp_path / name
    file.write_text(
        "".join(json.dumps({"text": f"line {index}", "other": 1}) + "\n\n" for index in range(4))
    )
    corpus = make(file, tmp_path / "cache")
    assert sorted(texts_of(corpus, "train") + texts_of(corpus, "valid")) == [
        f"line {index}" for index in range(4)
    ]


def test_files_without_text_are_told_and_marks_of_utf_8_are_no_text(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    for name, text in {"a": "one", "b": "\ufefftwo"}.items():
        (source / f"{name}.txt").write_text(text)
    (source / "c.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (source / "d.jsonl.gz").write_bytes(b"\x1f\x8b\xff\x00")
    (source / "e.txt").symlink_to("nowhere")
    corpus = make(source, tmp_path / "cache")
    assert texts_of(corpus, "train") + texts_of(corpus, "valid") == ["one", "two"]
    line = f"2 file(s) left out, no UTF-8 text: first {source}/c.txt"
    assert f"cp_ring: {line}\n" in capsys.readouterr().out
    (source / "a.txt").unlink()
    told = refused(ConfigError, make, source, tmp_path / "cache")
    assert "found 1 document" in told and told.endswith(line)


def test_tokenizer_loads_in_megatron(folder, tmp_path):
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    corpus = make(folder, tmp_path / "cache")
    tokenizer = HuggingFaceTokenizer(corpus.path("tokenizer"))
    assert tokenizer.vocab_size == corpus.summary()["vocab_size"]
    assert tokenizer.eod == tokenizer.tokenizer.convert_tokens_to_ids(corpora.END_OF_DOCUMENT)
    assert tokenizer.ids_to_text(tokenizer.text_to_ids("document 3")) == "document 3"


def test_built_once_and_again_when_the_source_changes(folder, tmp_path):
    cache = tmp_path / "cache"
    first = make(folder, cache)
    made = os.stat(first.path("train") + ".bin").st_mtime_ns
    assert make(folder, cache).folder == first.folder
    assert os.stat(first.path("train") + ".bin").st_mtime_ns == made
    (folder / "new.txt").write_text("one more document")
    second = make(folder, cache)
    assert second.folder != first.folder and second.summary()["documents"] == 8
    assert corpora.find(folder, cache, 301).folder != second.folder


def test_interrupted_build_is_not_used(folder, tmp_path, monkeypatch):
    corpus = corpora.find(folder, tmp_path / "cache", 300)
    # which jobs in the background of a shell ignore
    handled = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patched:
        patched.setattr(corpora, "_tokenize", lambda *args: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            corpora.build(corpus)
    signal.signal(signal.SIGINT, handled)
    assert not corpus.ready and not list((tmp_path / "cache").iterdir())
    corpora.build(corpus)
    assert corpus.ready and len(texts_of(corpus, "train")) == 6


def test_loser_of_a_race_uses_the_winner(folder, tmp_path, monkeypatch):
    corpus = corpora.find(folder, tmp_path / "cache", 300)
    write = corpora._tokenize

    def beaten(*args):
        corpora_winner = corpora.find(folder, tmp_path / "cache", 300)
        monkeypatch.setattr(corpora, "_tokenize", write)
        corpora.build(corpora_winner)
        return write(*args)

    monkeypatch.setattr(corpora, "_tokenize", beaten)
    corpora.build(corpus)
    assert corpus.ready and [path.name for path in (tmp_path / "cache").iterdir()] == [
        corpus.folder.name
    ]


def test_standard_library_is_the_default(tmp_path):
    corpus = corpora.find("", tmp_path)
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "typing.py"} <= names and len(names) > 300
    assert not any({"test", "site-packages"} & set(file.parts) for file in corpus.files)


def lines_of(text):
    """Makes a folder with a .jsonl file."""
    return lambda path: (path.mkdir(), (path / "a.jsonl").write_bytes(text))


@pytest.mark.parametrize(
    "make_source, words",
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: (path.mkdir(), (path / "a.txt").touch()), "is empty"),
        (lambda path: path.write_text("only one document"), "at least 2"),
        (lines_of(b'{"txt": "x"}'), "line 1 is not a JSON object"),
        (lines_of(b'{"text": "x"}\n{"text"'), "line 2 is not a JSON object"),
        (lines_of(b'{"text": "\xff"}'), "line 1 is not a JSON object"),
        (lines_of(b'{"text": 3}'), 'with a "text" key whose value is a string'),
        (lines_of(rb'{"text": "\ud800"}'), "value is a string of Unicode text"),
        (lines_of(b"[" * 100000), "line 1 is not a JSON object"),
        (
            lambda path: (path.mkdir(), (path / "a").symlink_to(UNREADABLE)),
            "source/a: cannot be read: Input/output error",
        ),
    ],
)
def test_rejections(tmp_path, make_source, words):
    make_source(tmp_path / "source")
    if "cannot be read" in words:  # such a file is not empty
        (tmp_path / "source" / "b.txt").write_text("text")
    line = refused(ConfigError, make, tmp_path / "source", tmp_path / "cache")
    assert words in line and "data.path" in line and "\n" not in line


def test_a_folder_that_cannot_be_read_is_not_left_out(folder, tmp_path, monkeypatch):
    closed, listed = folder / "closed", os.scandir
    closed.mkdir()

    def scandir(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"data\.path .*/closed: cannot be read: Permission"):
        make(folder, tmp_path / "cache")


def test_cache_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"data\.cache .*file/cache: cannot be written: Not a directory"
    ):
        make(folder, tmp_path / "file" / "cache")


def test_cache_that_is_full(folder, tmp_path, monkeypatch):
    """However the tokens are written."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(corpora, "_tokenize", Mock(side_effect=full))
    with pytest.raises(
        ConfigError, match=r"data\.cache .*/cache: cannot be written: No space left"
    ):
        make(folder, tmp_path / "cache")


def test_without_tokenizers_one_line_names_them(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # its import fails
    line = refused(ConfigError, make, folder, tmp_path / "cache")
    assert "pip install tokenizers transformers" in line


@pytest.fixture
def run_of(folder, tmp_path):
    """A run with a checkpoint of step 7, trained on `folder`; what prepares to train on another
    folder in the same run.
    """

    def start(path):
        settings = [
            f"data.path={path}",
            f"data.cache={tmp_path / 'cache'}",
            f"launch.run_dir={tmp_path / 'run'}",
        ]
        job = jobs.load("quickstart", [*settings, "data.vocab_size=300"])
        corpus = jobs.find_corpus(job)
        train._prepare(job, corpus)
        return corpus

    first = start(folder)
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("7")
    return start, first


def test_a_run_goes_on_with_its_own_corpus_only(run_of, folder, tmp_path):
    start, first = run_of
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert start(moved).folder != first.folder, (
        "the same texts in another place are the same corpus"
    )
    (moved / "more.txt").write_text("some more words to train on")
    line = refused(ConfigError, start, moved)
    assert re.search(r"another corpus .*, or delete .*run/corpus", line) and "\n" not in line
    assert str(tmp_path / "cache" / "moved-") in line
    (tmp_path / "run" / "corpus").unlink()
    start(moved)
