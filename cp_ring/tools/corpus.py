"""A text corpus as Megatron's IndexedDataset. It is tokenized and split once, then reused.

The sources are the standard library of this Python (long documents that always exist), a folder of
text files, or .jsonl files with a "text" key. A byte-level BPE tokenizer is trained on them, so
nothing has to be downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import batched, chain
from pathlib import Path
from typing import Any

import numpy as np

from cp_ring.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
FORMAT = 2  # part of the cache key: raise it when the same sources give another result
VALIDATION_STRIDE = 20  # documents, of which one is for validation
# the tokenizer is trained on the first documents up to this size
TOKENIZER_DOCUMENTS_BYTES = 32 << 20
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """The sources of a corpus, and the folder of its tokens, which may not exist yet.

    Its parts `train` and `valid` are prefixes of an IndexedDataset, `tokenizer` is a folder that
    Megatron's HuggingFaceTokenizer loads.
    """

    folder: Path
    files: tuple[Path, ...]
    name: str
    vocab_size: int

    def path(self, name: str) -> str:
        """Where a part of it is: train, valid or tokenizer."""
        return str(self.folder / name)

    @property
    def ready(self) -> bool:
        """True if the corpus is built. The folder gets its name only when it is complete."""
        return self.folder.is_dir()

    def summary(self) -> dict[str, Any]:
        """The numbers of documents and tokens, the vocabulary size and a hash of the contents, as
        written when the corpus was built.
        """
        with _named("data.cache", self.folder):
            return json.loads((self.folder / "corpus.json").read_text())


@contextlib.contextmanager
def _named(key: str, path: Path, done: str = "read") -> Iterator[None]:
    """Let errors of the system name the key, and their file or else `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{key} {error.filename or path}: cannot be {done}: {error.strerror}"
        ) from None


def find(path: str, cache: str, vocab_size: int = 4096) -> Corpus:
    """Find the sources and choose the folder of their corpus. It reads no text and builds nothing.

    path: a folder, a .jsonl file, or "" for the standard library.

    The folder's name contains a hash of the settings and of the sources' names, sizes and times. So
    a change of any of them makes a new corpus.
    Raises `ConfigError` when the path does not exist, has no files or cannot be read.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    with _named("data.path", root):
        if not root.exists():
            raise ConfigError(f"data.path {root}: no such file or folder")
        every = sorted(_source_files(root, only_python=not path))
        files = {file: file.stat() for file in every if file.is_file()}  # no socket, no broken link
    if not any(stat.st_size for stat in files.values()):
        raise ConfigError(
            f'data.path {root}: is empty; it needs text files, or .jsonl files with a "text" key'
        )
    identity = hashlib.sha256(repr((FORMAT, vocab_size, str(root.resolve()))).encode())
    for file, stat in files.items():
        identity.update(
            repr((str(file.relative_to(root)), stat.st_size, stat.st_mtime_ns)).encode()
        )
    name = root.stem if path else "standard-library"
    folder = Path(cache, f"{name}-{identity.hexdigest()[:16]}").absolute()
    return Corpus(folder, tuple(files), name, vocab_size)


def build(corpus: Corpus) -> None:
    """Build the corpus in a temporary folder and rename that at the end, so that a half-built
    corpus is never used.

    Raises `ConfigError` where the sources cannot be read or hold fewer than two documents (one to
    train on, one to validate on), where the cache cannot be written, and where the package
    `tokenizers` is not installed.
    """
    if corpus.ready:
        return
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.path: to build a corpus, cp_ring needs the package tokenizers ({error}): pip "
            "install tokenizers transformers, or give datasets of Megatron (megatron.data_path)"
        ) from None
    cache = corpus.folder.parent
    with _named("data.cache", cache, "written"):
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
        try:
            work.chmod(0o755)
            _build_in(work, corpus)
            try:
                work.rename(corpus.folder)
            except OSError:
                if not corpus.ready:  # otherwise another process made the same corpus first
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _build_in(work: Path, corpus: Corpus) -> None:
    print(f"cp_ring: {corpus.name}: training a tokenizer, then tokenizing", flush=True)
    documents = sampled = 0
    sample: list[str] = []
    left_out: list[Path] = []
    for text in _read_documents(corpus.files, left_out):
        documents += 1
        if sampled < TOKENIZER_DOCUMENTS_BYTES:
            sample.append(text)
            sampled += len(text)
    lines = [f"{len(left_out)} file(s) left out, no UTF-8 text: first {x}" for x in left_out[:1]]
    if documents < 2:
        few = f"data.path: found {documents} document(s) with text, at least 2 are needed"
        raise ConfigError("; ".join([f"{few} (one of them to validate on)", *lines]))
    for line in lines:
        print(f"cp_ring: {line}", flush=True)
    tokenizer = _train_tokenizer(sample, corpus.vocab_size)
    _save_tokenizer(tokenizer, work / "tokenizer")
    stride = min(documents, VALIDATION_STRIDE)
    tokens = _tokenize(work, tokenizer, _read_documents(corpus.files, []), stride)
    summary = {
        "documents": documents,
        "tokens": tokens,
        "vocab_size": tokenizer.get_vocab_size(),
        "digest": _digest(work),
    }
    (work / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")


def _tokenize(work: Path, tokenizer: Any, documents: Iterable[str], stride: int) -> dict[str, int]:
    """Write every `stride`-th document to `valid` and the others to `train`. Return the number of
    tokens in each.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    kind = DType.optimal_dtype(tokenizer.get_vocab_size())
    files = {
        split: IndexedDatasetBuilder(str(work / f"{split}.bin"), dtype=kind)
        for split in ("train", "valid")
    }
    tokens = dict.fromkeys(files, 0)
    encoded = (
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for batch in batched(documents, 64)
    )
    for index, encoding in enumerate(chain.from_iterable(encoded)):
        split = "valid" if index % stride == stride - 1 else "train"
        ids = np.array([*encoding.ids, end])
        files[split].add_document(ids, [len(ids)])
        tokens[split] += len(ids)
    for split, file in files.items():
        file.finalize(str(work / f"{split}.idx"))
    return tokens


def _digest(folder: Path) -> str:
    """Return a hash of the tokenizer and of both splits. The same texts in another folder have the
    same hash.
    """
    whole = hashlib.sha256()
    for name in ("tokenizer/tokenizer.json", "train.bin", "valid.bin"):
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _train_tokenizer(documents: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    return tokenizer


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the two files from which `transformers.AutoTokenizer` loads a tokenizer without a
    network.
    """
    folder.mkdir()
    # its own method to save raises no OSError
    (folder / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=True).encode())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _source_files(root: Path, only_python: bool) -> Iterator[Path]:
    if root.is_file():
        yield root
        return

    def fail(error: OSError) -> None:  # else a folder that cannot be read is left out
        raise error

    for folder, names, files in root.walk(on_error=fail):
        names[:] = [
            name
            for name in names
            if not name.startswith(".") and not (only_python and name in SKIPPED_FOLDERS)
        ]
        for file in files:
            if file.endswith(".py") if only_python else not file.startswith("."):
                yield folder / file


def _read_documents(files: Iterable[Path], left_out: list[Path]) -> Iterator[str]:
    """Yield the documents: one for each text file, one for each line of a .jsonl or .ndjson file.
    Files that are not UTF-8 text are left out, and appended to `left_out`.
    """
    for file in files:
        with _named("data.path", file):
            if file.suffix.lower() in (".jsonl", ".ndjson"):
                yield from _json_lines(file)
                continue
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                left_out.append(file)
            elif text.strip():
                yield text


def _json_lines(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text: str = json.loads(line)["text"]
                text.encode()  # a lone surrogate has no bytes
                if text.strip():
                    yield text
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ConfigError(
                    f'data.path {file}: line {number} is not a JSON object with a "text" key whose '
                    "value is a string of Unicode text"
                ) from None
