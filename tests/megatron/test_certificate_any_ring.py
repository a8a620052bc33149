"""The certificate of attention that is not cp_ring's class: a stand-in for TransformerEngine's own
context parallelism, and cp_ring's ring beneath its class. Faults that people found are stopped.
"""

import json
import shlex

import pytest

from cp_ring.errors import ConfigError
from cp_ring.megatron.certificate.batch_probe import NAMES
from cp_ring.patches.install import install
from tests.megatron import any_ring_worker
from tests.megatron.launch import HERE, attempt, fork
from tests.megatron.test_certificate import EVERY
from tests.parity.models import COMMON, UNTIED

OTHERS = {
    *NAMES.values(),
    "dsink",
    "weight of a token that the loss mask hides",
    "label that counts",
    "documents",
    "next token as label",
    "the program's own microbatches (certify takes one as microbatch=)",
}
STOPPED = {
    "labels shifted after the split": "causal: label wrong in",
    "packed, labels shifted after the split": "packed: label wrong in",
    "loss normalized by local tokens": "gradients off by",
    "packed, loss normalized by local tokens": "gradients off by",
    "positions of the wrong rank": "causal: mask wrong in",
    "padded tail attended": "packed: mask wrong in",
    "last token of a padded document lost": "packed: mask wrong in",
    "beneath, window side swapped": "mask wrong in",
    "beneath, sink of another head": "out off by",
}


@pytest.mark.ci
def test_a_program_with_attention_of_its_own(tmp_path):
    """cp 2, windows on alternate layers; rows, and documents with padding; sinks beneath."""
    log = tmp_path / "log"
    code = fork(2, (tmp_path, log), target=any_ring_worker.rank)
    assert not code, log.read_text()[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("right", "packed, right", "beneath, right"):
        assert EVERY | {"token", "label"} <= {*found.pop(name)} <= EVERY | OTHERS
    assert found.keys() == STOPPED.keys()
    for name, line in STOPPED.items():
        assert line in found[name], (name, found[name])


STOCK = shlex.split(
    f"{UNTIED} --num-layers 2 --seq-length 64 --context-parallel-size 2 --bf16 --window-size 5,0 "
    "--window-attn-skip-freq 2 --calculate-per-token-loss --no-create-attention-mask-in-dataloader "
    "--cp-ring-certify only --spec tests.certificate.specs"
)


@pytest.mark.parametrize("ring", ["any_ring", "wrong_ring"])
def test_a_script_without_ring_attention(tmp_path, ring):
    script = str(HERE / "small_script.py")
    done = attempt(2, "stock", [script, *STOCK, ring], tmp_path, COMMON)
    said = (tmp_path / "stock.log").read_text()
    assert not done.losses
    if ring == "wrong_ring":
        assert done.code == 2 and "causal: mask wrong in" in done.rejected
    else:
        assert done.code == 0, done.output
        assert "certificate of StandInRing, without --cp-ring" in said
        assert said.count("not covered: the job's own microbatches; ") == 1
        assert "nothing is trained" in said


@pytest.mark.parametrize("value", ["", "on", "strict"])
def test_other_certificates_need_ring_attention(value):
    flags = ["--cp-ring-cpu", "--cp-ring-certify", *filter(None, [value])]
    with pytest.raises(ConfigError, match=f"--cp-ring-certify {value or 'on'} examines ring att"):
        install(flags)
