"""Packs conversations for --sft into rows without padding between them: the data set of
`cp_ring.pretrain_gpt`.

Files and tokens are those of Megatron's own SFT data set: .jsonl files with a list "messages" in
each line, in which every system message begins another conversation, and `tokenize_conversation` of
Megatron's tokenizer. The rows differ: Megatron makes a row of one line, pads each conversation to a
multiple of 2 * cp, and pads the row to its end.

A row depends only on the file, the tokenizer, --split, --seq-length and --cp-ring-pack, and sample
i is row i modulo the number of rows. So a job reads the same samples at any cp and dp, and a
resumed job continues with the next sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training import get_args, print_rank_0

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron import compat
from cp_ring.megatron.data.packing import PADDING, PackedRows, pack
from cp_ring.megatron.rejection import first_line
from cp_ring.megatron.settings import current
from cp_ring.plan.ranges import Ints, expand

Conversation = list[dict[str, Any]]

IGNORED = -100
"""The target of a token that does not count in the loss, as in Megatron."""

FORMAT = 2
"""Part of the file name of cached tokens: raise it when the same files give other tokens."""


class ConversationFile:
    """Reads the lines of a .jsonl file on demand. Raises `ConfigError` that names the file and the
    line.
    """

    def __init__(self, path: str):
        self.path = path
        self._starts = [0]
        try:
            with open(path, "rb") as file:
                for line in file:
                    self._starts.append(self._starts[-1] + len(line))
        except OSError as error:
            raise ConfigError(f"--data-path {path}: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[Conversation]:
        """Return the conversations of line `index`, counted from 0; [] for an empty line."""
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            line = file.read(self._starts[index + 1] - self._starts[index])
        if not line.strip():
            return []
        return conversations_of(line, f"--data-path {self.path}: line {index + 1}")


def conversations_of(line: bytes, where: str) -> list[Conversation]:
    """Return the conversations of a line of JSON; every system message begins another one.

    The content of a message is text, a list of parts, or null for a call of tools: the template of
    the tokenizer decides what it accepts. Raises `ConfigError` that begins with `where`.
    """
    try:
        content = json.loads(line)
        messages = content["messages"]
        conversations: list[Conversation] = []
        for message in messages:
            said = message.get("content")
            calls = said is None and message.get("tool_calls")
            if not isinstance(message["role"], str) or not (isinstance(said, str | list) or calls):
                raise TypeError
            if message["role"] == "system" or not conversations:
                conversations.append([])
            conversations[-1].append({"content": None} | message)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f'{where} is not a JSON object with "messages", a list of {{"role": ..., "content": '
            f"...}}, whose content is text, a list of parts, or null beside tool_calls"
        ) from None
    if not conversations:
        raise ConfigError(f"{where} has no message")
    if content.get("tools"):
        raise ConfigError(
            f"{where} has tools, which Megatron's tokenizers do not take: write them into its "
            "system message"
        )
    return conversations


class Tokens(NamedTuple):
    """The tokens and the targets of all conversations, end to end: int32 [tokens] each, and int64
    offsets [conversations + 1].
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: Ints

    @classmethod
    def make(cls, lines: ConversationFile, indices: Ints, tokenizer: Any) -> Tokens:
        """Tokenize the conversations. Raises `ConfigError` for a conversation that the tokenizer
        rejects, or that has no token.
        """
        tokens: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for index in indices.tolist():
            for conversation in lines[index]:
                where = f"--data-path {lines.path}: line {index + 1}"
                try:
                    ids, wanted = tokenizer.tokenize_conversation(
                        conversation, return_target=True, add_generation_prompt=False
                    )
                except Exception as error:  # templates raise exceptions of any type
                    reason = first_line(error)[:200] or type(error).__name__
                    raise ConfigError(
                        f"{where}: the tokenizer does not take this conversation: {reason}; "
                        f"its prompt format is {_prompt_format()} (--sft-tokenizer-prompt-format; "
                        "default is the tokenizer's own chat template)"
                    ) from None
                if not len(ids):
                    raise ConfigError(f"{where}: a conversation without tokens")
                tokens.append(np.asarray(ids, np.int32))
                targets.append(np.asarray(wanted, np.int32))
        offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int64)
        nothing = np.zeros(0, np.int32)
        return cls(np.concatenate([nothing, *tokens]), np.concatenate([nothing, *targets]), offsets)

    @classmethod
    def kept(cls, path: Path, make: Callable[[], Tokens]) -> Tokens:
        """Return the tokens in the folder, mapped into memory. If they are not there, or are cut
        short, call `make` and write its result there, if the file system allows it.
        """
        try:
            with contextlib.suppress(OSError):  # other jobs may read what this one cannot
                return cls(*(np.load(path / f"{name}.npy", mmap_mode="r") for name in cls._fields))
        except (ValueError, EOFError):  # cut short
            shutil.rmtree(path, ignore_errors=True)
        tokens = make()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=".tokens-", dir=path.parent))
            try:
                for name, array in tokens._asdict().items():
                    np.save(work / f"{name}.npy", array)
                work.chmod(0o755)
                # fails if another process was faster; its tokens are the same
                os.rename(work, path)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return tokens


def _prompt_format() -> str:
    return getattr(compat.arguments(), "sft_tokenizer_prompt_format", None) or "its own"


def _roles_without_tokens(lines: ConversationFile, indices: Ints, tokenizer: Any) -> list[str]:
    """Return the roles of messages that the prompt format leaves out, among the first lines: their
    text changes no token.
    """
    found: dict[str, bool] = {}
    for conversation in (each for index in indices[:100].tolist() for each in lines[index]):
        for at, message in enumerate(conversation):
            role = message["role"]
            said = message["content"]
            if role in found or not isinstance(said, str):
                continue
            changed = [*conversation]
            changed[at] = message | {"content": f"{said} {role}"}
            first, second = (
                tokenizer.tokenize_conversation(each, False, False)
                for each in (conversation, changed)
            )
            found[role] = np.array_equal(first, second)
    return [role for role, left_out in found.items() if left_out]


class PackedConversations(MegatronDataset):
    """Rows of packed conversations. A conversation sees only itself, and its positions begin at 0;
    see the module.

    A sample has tokens, labels and position_ids int64 [n], and loss_mask float32 [n]. The loss mask
    is 0 for the label of a conversation's last token, for labels that do not count, and for
    padding. Padding at the end of a row is like documents of at most `PADDING` tokens.
    """

    def __new__(cls, *given: Any) -> Any:
        """Return None if --split leaves no conversation of a single file to validation or test, or
        none is asked for (--eval-iters 0).
        """
        _, _, indices, samples, index_split, config = given
        split = index_split.name
        blend = config.blend
        wanted = len(indices) and samples != 0
        if wanted or split == "train" or not blend or len(blend[0]) > 1:
            return super().__new__(cls)
        if not len(indices):
            print_rank_0(f"cp_ring: {split}: --split {config.split} leaves it no conversation")
        if split == "valid":  # Megatron would wait for it, also in the test
            get_args().eval_iters = 0
        return None

    def __init__(
        self, dataset: ConversationFile, dataset_path: str | None, indices: np.ndarray, *given: Any
    ) -> None:
        super().__init__(dataset, dataset_path, indices, *given)
        config = self.config
        split = self.index_split.name
        settings = current()
        folder = Path(config.path_to_cache or Path(dataset.path).parent / "cache")
        self._tokens = Tokens.kept(
            folder / self._identity(),
            lambda: Tokens.make(dataset, np.asarray(indices), config.tokenizer),
        )
        counted = np.count_nonzero(self._tokens.targets != IGNORED)
        every = len(self._tokens.tokens)
        silent = _roles_without_tokens(dataset, np.asarray(indices), config.tokenizer)
        print_rank_0(
            f"cp_ring: {split}: prompt format {_prompt_format()}: {counted:,} of {every:,} tokens "
            f"count in the loss, prompts {'too' if counted == every else 'do not'}"
            + (f"; messages of role {', '.join(silent)} give no token" if silent else "")
        )
        try:
            lengths = np.diff(self._tokens.offsets)
            self.packing: PackedRows = pack(
                lengths, config.sequence_length, settings.pack, settings.cut_long
            )
        except PlanError as error:
            hint = " (--seq-length, --cp-ring-cut-long)" if "longer" in str(error) else ""
            raise ConfigError(f"--data-path {dataset.path}, {split}: {error}{hint}") from None
        print_rank_0(f"cp_ring: {split}: {settings.pack} packed {self.packing.describe()}")

    def _identity(self) -> str:
        stat = os.stat(self.dataset.path)
        made_of = {**self.unique_identifiers, "num_samples": None}  # the tokens are all there
        about = (
            FORMAT,
            json.dumps(made_of, default=lambda part: part.unique_identifiers),
            os.path.abspath(self.dataset.path),
            stat.st_size,
            stat.st_mtime_ns,
            _digest_of_tokenizer(getattr(self.config.tokenizer, "path", None)),
        )
        indices = np.ascontiguousarray(self.indices).tobytes()
        return "cp_ring-sft-" + hashlib.sha256(repr(about).encode() + indices).hexdigest()[:24]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ConversationFile) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> ConversationFile:
        return ConversationFile(dataset_path)

    def __len__(self) -> int:
        return self.packing.rows if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        pieces = self.packing.pieces((index or 0) % self.packing.rows)
        document, start, length = np.array(pieces).T
        first = self._tokens.offsets[document] + start
        piece, place = expand(first, length)
        targets = np.append(self._tokens.targets[place][1:], IGNORED)
        targets[np.cumsum(length) - 1] = IGNORED  # of the last token of each piece
        n = self.config.sequence_length
        used = len(place)
        row = {name: torch.zeros(n, dtype=torch.int64) for name in ("tokens", "labels")}
        row["loss_mask"] = torch.zeros(n, dtype=torch.float32)
        row["tokens"][:used] = torch.from_numpy(self._tokens.tokens[place])
        row["labels"][:used] = torch.from_numpy(targets.clip(0))
        row["loss_mask"][:used] = torch.from_numpy(targets != IGNORED)
        positions = [place - first[piece], np.arange(n - used) % PADDING]
        row["position_ids"] = torch.from_numpy(np.concatenate(positions))
        if index is None:  # Megatron pads a batch with such samples
            row["loss_mask"].zero_()
        return row

    def offsets(self, row: int) -> Ints:
        """Return the offsets of a row's conversations and padding, as `PackedRows.cu_seqlens`."""
        return self.packing.cu_seqlens(row % self.packing.rows)


def _digest_of_tokenizer(path: Any) -> str:
    """Return a digest of a tokenizer's files, its chat template included; "" if it has no files on
    this host.
    """
    place = Path(str(path or ""))
    files = [place] if place.is_file() else sorted(place.glob("*")) if path else []
    digest = hashlib.sha256()
    for file in files:
        # a folder may also hold the weights of the model
        if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt", ".tiktoken"):
            digest.update(f"{file.name} ".encode() + file.read_bytes())
    return digest.hexdigest() if files else ""


class PackedWithOffsets(PackedConversations):
    """Adds `cu_seqlens`, int32 [n + 1], and `max_seqlen` to each sample of n tokens, as Megatron's
    `SFTDataset` does for scripts such as pretrain_gpt.py. Entries of `cu_seqlens` after the last
    document are n.
    """

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        offsets = self.offsets(index or 0)
        n = self.config.sequence_length
        filled = torch.full((n + 1,), n, dtype=torch.int32)
        filled[: len(offsets)] = torch.from_numpy(offsets)
        longest = torch.tensor(int(np.diff(offsets).max()), dtype=torch.int32)
        return super().__getitem__(index) | {"cu_seqlens": filled, "max_seqlen": longest}
