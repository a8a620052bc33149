"""--sft: conversations packed into rows, and training on them: the same at any split, and without
padding.
"""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cp_ring import Options
from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.adapter.documents import boundaries
from cp_ring.megatron.data import packing, sft
from tests.megatron import conversations
from tests.rings import refused, same_bits

N = 256


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    return folder, *conversations.write(folder, most=60, each=2)


def configure(**values):
    settings.configure(Options.make(enabled=True, **values))


def make(
    files, n=N, lines=None, num_samples=None, split="train", prompt_format="nemotron-h-aligned"
):
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    from cp_ring.megatron.data.sft import ConversationFile, PackedConversations

    folder, file, tokenizer = files
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(tokenizer),
        metadata_path={"library": "sft"},
        prompt_format=prompt_format,
    )
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=n, blend=([str(file)], None), split="1,0,0", path_to_cache=str(folder /
        "cache"),
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    low = ConversationFile(str(file))
    indices = np.arange(len(low)) if lines is None else np.array(lines, np.int64)
    return PackedConversations(low, str(file), indices, num_samples, Split[split], config)


def test_positions_begin_anew_where_the_offsets_say_in_padding_too(files, monkeypatch):
    """Ranks make the mask from positions or from offsets; padding is cut into short documents."""
    for module in (packing, sft):
        monkeypatch.setattr(module, "PADDING", 3)
    configure(pack="first-fit", cut_long=True)
    rows, cut = make(files, n=512), False
    for index in range(rows.packing.rows):
        offsets = rows.offsets(index)
        assert np.array_equal(boundaries(rows[index]["position_ids"][None]), offsets)
        cut |= len(offsets) > len(rows.packing.pieces(index)) + 2
    assert cut  # some padding is longer than one of its documents


@pytest.mark.parametrize("how", ["first-fit", "fill"])
def test_every_conversation_is_in_the_rows_with_its_own_positions_and_labels(files, how, capsys):
    configure(pack=how, cut_long=True)
    rows = make(files, n=512)
    assert f"train: {how} packed 60 documents in " in capsys.readouterr().out
    tokenizer, found, counted = rows.config.tokenizer, {}, 0
    for index in range(rows.packing.rows):
        row, at = rows[index], 0
        for document, start, length in rows.packing.pieces(index):
            here = slice(at, at + length)
            found.setdefault(document, []).append((start, row["tokens"][here]))
            assert torch.equal(row["position_ids"][here], torch.arange(length))
            assert row["loss_mask"][at + length - 1] == 0, (
                "the last token of a document predicts nothing"
            )
            inside = slice(at, at + length - 1)
            counts = row["loss_mask"][inside] > 0
            assert torch.equal(
                row["labels"][inside][counts], row["tokens"][at + 1 : at + length][counts]
            )
            counted += int(counts.sum())
            at += length
        assert (
            not row["loss_mask"][at:].any()
            and (row["position_ids"][at:] == torch.arange(512 - at)).all()
        )
        assert how != "fill" or at == 512 or index == rows.packing.rows - 1
    lines = [json.loads(line)["messages"] for line in files[1].read_text().splitlines()]
    every = [talk for line in lines for talk in (line[:3], line[3:])]
    assert len(found) == len(every) == 60
    possible = 0
    for document, talk in enumerate(every):
        tokens, targets = tokenizer.tokenize_conversation(
            talk, return_target=True, add_generation_prompt=False
        )
        pieces = [piece for _, piece in sorted(found[document], key=lambda piece: piece[0])]
        assert torch.cat(pieces).tolist() == tokens.tolist()
        possible += int((targets[1:] != -100).sum())
    assert (
        counted == possible
        if how == "first-fit" and (np.diff(rows._tokens.offsets) <= 512).all()
        else counted <= possible
    )
    assert 0 < counted < int(rows.packing.length.sum()), "prompts do not count in the loss"


def test_tokens_are_kept_and_samples_repeat(files, monkeypatch):
    configure(cut_long=True)
    rows = make(files, num_samples=1000)
    monkeypatch.setattr("cp_ring.megatron.data.sft.Tokens.make", None)  # what is kept is read
    again = make(files, num_samples=1000)
    assert len(again) == 1000 and isinstance(again._tokens.tokens, np.memmap)
    for index in (0, 3):
        assert same_bits(rows[index].values(), again[index + rows.packing.rows].values())


@pytest.mark.parametrize("size", [0, 200])
def test_kept_tokens_that_are_cut_short_are_made_again(files, monkeypatch, size):
    configure(cut_long=True)
    rows = make(files, num_samples=1000)
    kept = files[0] / "cache" / rows._identity()
    whole = (kept / "tokens.npy").read_bytes()
    os.truncate(kept / "tokens.npy", size)
    make(files, num_samples=1000)
    assert (kept / "tokens.npy").read_bytes() == whole
    assert not [*kept.parent.glob(".tokens-*")]
    monkeypatch.setattr("cp_ring.megatron.data.sft.Tokens.make", None)
    make(files, num_samples=7)  # any number of samples has the same tokens


def test_tokens_that_cannot_be_read_stay_for_other_jobs(files, monkeypatch):
    def unreadable(*_, **__):
        raise OSError("Stale file handle")

    configure(cut_long=True)
    kept = files[0] / "cache" / make(files)._identity()
    before = sorted(kept.iterdir())
    monkeypatch.setattr("cp_ring.megatron.data.sft.np.load", unreadable)
    make(files)
    assert sorted(kept.iterdir()) == before and before


TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' }}{% if message['content'] %}\
{{ message['content'] }}{% else %}{{ message['tool_calls'][0]['function']['name'] }}{% endif %}{% endfor %}"""
CALL = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture
def with_tools(files, tmp_path):
    """A call of a tool, and the tokenizer with a template that knows tools."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(files[2], tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)

    def write(messages):
        file = tmp_path / "talks.jsonl"
        file.write_text(json.dumps({"messages": messages}) + "\n")
        return tmp_path, file, tokenizer

    return write


def test_a_line_says_what_the_prompt_format_makes_of_messages(with_tools, monkeypatch, capsys):
    configure()
    args = SimpleNamespace(sft_tokenizer_prompt_format="nemotron-h-aligned")
    monkeypatch.setattr(sft.compat, "arguments", lambda: args)
    told = [
        {**CALL[1], "content": "I call add."} if message is CALL[1] else message for message in CALL
    ]
    rows = make(with_tools(told))
    line = capsys.readouterr().out.splitlines()[0]
    counts = int((rows._tokens.targets != -100).sum())
    assert line == (
        f"cp_ring: train: prompt format nemotron-h-aligned: {counts} of {len(rows._tokens.tokens)} "
        "tokens count in the loss, prompts do not; messages of role tool give no token"
    )
    line = refused(ConfigError, make, with_tools(CALL))  # without the text that this format needs
    assert "its prompt format is nemotron-h-aligned " in line
    args.sft_tokenizer_prompt_format = "default"
    rows = make(with_tools(CALL), prompt_format="default")
    line = capsys.readouterr().out.splitlines()[0]
    n = len(rows._tokens.tokens)
    assert line == (
        f"cp_ring: train: prompt format default: {n} of {n} tokens count in the loss, prompts too"
    )
    text = rows.config.tokenizer.detokenize(rows._tokens.tokens.tolist())
    assert "add" in text and "tool" in text


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_another_template_in_the_folder_of_the_tokenizer_gives_other_tokens(files, tmp_path, name):
    """The tokens of the old one were kept by the path of the folder alone."""
    configure(cut_long=True)
    folder = tmp_path / "tokenizer"
    shutil.copytree(files[2], folder)
    before = make((tmp_path, files[1], folder))._identity()
    assert make((tmp_path, files[1], folder))._identity() == before
    (folder / name).write_text('{"chat_template": "{{ messages }}"}')
    assert sft._digest_of_tokenizer(folder) != sft._digest_of_tokenizer(files[2])


def test_messages_that_call_tools_are_the_template_s_matter():
    from cp_ring.megatron.data.sft import conversations_of

    def read(*messages, **more):
        line = json.dumps({"messages": messages, **more})
        return conversations_of(line.encode(), "line 1")

    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "what?"}]}
    answer = {"role": "tool", "content": "4"}
    assert read(parts, calls, answer) == [[parts, calls, answer]]
    del calls["content"]
    assert read(parts, calls)[0][1]["content"] is None
    for bad in ({"role": "assistant", "content": None}, {"role": "user", "content": 3}):
        assert "or null beside tool_calls" in refused(ConfigError, read, bad)
    assert "line 1 has tools" in refused(ConfigError, read, parts, tools=[1])


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not a JSON object with \"messages\""),
        ('{"messages": 3}', "line 2 is not a JSON object with"),
        ('{"messages": [{"role": "user"}]}', "line 2 is not a JSON object with"),
        ('{"messages": []}', "line 2 has no message"),
        (json.dumps({"messages": [{"role": "system", "content": "a"}, {"role": "wizard", "content":
            "b"}]}),
         "line 2: the tokenizer does not take this conversation"),
        (json.dumps({"messages": [{"role": "assistant", "content": "hello"}, {"role": "assistant",
            "content":
            ""}]}),
         "line 2: the tokenizer does not take this conversation"),
    ],
)  # fmt: skip
def test_bad_conversations_are_one_line(files, tmp_path, line, message):
    configure()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(files[1].read_text().partition("\n")[0] + "\n" + line + "\n")
    told = refused(ConfigError, make, (tmp_path, bad, files[2]))
    assert message in told and "\n" not in told


def test_long_conversations_are_rejected_unless_cut(files):
    configure()
    with pytest.raises(
        ConfigError,
        match=r"document \d+ has [\d,]+ tokens, more than the 64 of a row.*--cp-ring-cut-long",
    ):
        make(files, n=64)


def test_a_split_without_conversations_is_none(files, monkeypatch, capsys):
    configure(cut_long=True)
    args = SimpleNamespace(eval_iters=3)
    monkeypatch.setattr("cp_ring.megatron.data.sft.get_args", lambda: args)
    assert make(files, lines=[], split="test") is None and args.eval_iters == 3
    assert make(files, lines=[], split="valid") is None and args.eval_iters == 0
    assert "cp_ring: valid: --split 1,0,0 leaves it no conversation" in capsys.readouterr().out
    assert make(files, lines=[0], split="test") is not None


# Training at every split is in tests/parity; here is what the certificate makes of it.
