"""A small set of conversations made from text on this machine: what does this function do? its
documentation.
"""

import ast
import json
import sysconfig
from itertools import chain
from pathlib import Path

from cp_ring.tools.corpus import _save_tokenizer, _train_tokenizer

FILES = "argparse ast calendar configparser csv dis fractions heapq inspect textwrap"
SPECIAL = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>", "<unk>"]


def documented():
    """(name, documentation) of each documented function and class of some modules of the standard
    library.
    """
    for name in FILES.split():
        tree = ast.parse((Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                yield f"{name}.{node.name}", ast.get_docstring(node)


def conversation(name, text):
    system = {"role": "system", "content": f"You know the module {name.partition('.')[0]}."}
    return [
        system,
        {"role": "user", "content": f"What is {name}?"},
        {"role": "assistant", "content": text},
    ]


def write(folder, most=120, each=1):
    """A .jsonl file of at most `most` conversations, `each` in a line, and a tokenizer for it:
    (file, folder).
    """
    pairs = list(documented())[:most]
    file = folder / "conversations.jsonl"
    lines = [
        list(chain(*(conversation(*pair) for pair in pairs[i : i + each])))
        for i in range(0, len(pairs), each)
    ]
    file.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    tokenizer = _train_tokenizer([text for _, text in pairs], 500)
    tokenizer.add_special_tokens(SPECIAL)
    if not (folder / "tokenizer").exists():
        _save_tokenizer(tokenizer, folder / "tokenizer")
    return file, folder / "tokenizer"


def data(folder, **more):
    """Megatron's flags for the data set."""
    file, tokenizer = write(folder, **more)
    return ["--sft", "--data-path", str(file), "--tokenizer-type", "SFTTokenizer",
        "--tokenizer-model", str(tokenizer),
            "--split", "100,0,0", "--data-cache-path", str(folder / "cache")]  # fmt: skip
