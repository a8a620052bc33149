"""The attacks of this package as part of the test run: cp_ring holds in every try, and the canary
notices what it should.
"""

import io
import json
import pickle
import subprocess
import sys
import types
import zipfile

import pytest
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.checkpoints import process_state
from cp_ring.plan.proof import verify
from cp_ring.testing.rank_pool import LIMIT_S
from tests.adversary import ATTACKS, Registered, canary, checkpoints, gadgets, plans
from tests.adversary.__main__ import run

LISTED = "every name of the lists"
RANDOM = [name for name, attack in ATTACKS.items() if attack.cases]


# The default run draws plans at random in `tests/plan` already.
MARKS = {LISTED: [pytest.mark.slow]} | {name: [pytest.mark.ci] for name in RANDOM}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in ATTACKS]
)
def test_holds(name):
    (entry,), failures = run([name])
    assert not failures, failures[:5]
    assert entry["tries"] == entry["held"] > 0


def test_every_name_of_the_lists_in_some_forms(tmp_path):
    tries = list(checkpoints.listed_names(tmp_path, every=31))
    assert len(tries) > 400 and not [one for one in tries if one.problem]


def test_the_snapshot_notices_what_torch_lets_a_pickle_do():
    """The renaming of a member that torch's own reader of `weights_only` carries out."""
    from megatron.core.transformer.enums import AttnMaskType

    def look_up(value):
        return AttnMaskType(value)

    enumeration = "megatron.core.transformer.enums", "AttnMaskType"
    member = AttnMaskType.causal
    data = (
        b"\x80\x02"
        + gadgets.renaming(gadgets.name(*enumeration), member.value, {"_name_": "no_mask"})
        + b"."
    )
    before = process_state.snapshot()
    declared = [(look_up, ".".join(enumeration)), types.SimpleNamespace]
    try:
        with torch.serialization.safe_globals(declared):
            torch.load(io.BytesIO(gadgets.archive(data)), weights_only=True)
        assert member.name == "no_mask" and process_state.first_change(before).endswith(
            "AttnMaskType.causal._name_"
        )
    finally:
        member._name_ = "causal"
    assert process_state.first_change(before) == ""
    for read in checkpoints.READERS.values():
        with pytest.raises(ConfigError):
            read(data)
    assert member.name == "causal"


def test_random_attacks_have_2000_tries():
    assert sum(ATTACKS[name].cases for name in RANDOM) == 2000


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_holds_25_times_as_often(name):
    (entry,), failures = run([name], times=25)
    assert not failures, failures[:5]
    assert entry["tries"] == entry["held"] == 25 * ATTACKS[name].cases


@pytest.mark.parametrize("check", ["check_cover", "check_keys", "check_gradients", "check_sources"])
def test_a_proof_without_one_of_its_checks_does_not_hold(monkeypatch, check):
    monkeypatch.setattr(verify, check, lambda *args: None)
    monkeypatch.setitem(ATTACKS, "short", Registered(plans.named_mutations, 140))
    _, failures = run(["short"])
    assert any("the proof accepts it" in line for line in failures)


def test_an_accepted_plan_that_is_wrong_shows(monkeypatch):
    monkeypatch.setattr(verify, "check_gradients", lambda *args: None)
    monkeypatch.setitem(ATTACKS, "short", Registered(plans.random_corruption, 50))
    _, failures = run(["short"])
    assert any("the proof accepts it, but dk is off by" in line for line in failures)


def test_the_corpus_has_at_least_200_gadgets(tmp_path):
    assert len(list(checkpoints._pickles(tmp_path))) >= 200
    assert len(gadgets.listed()) * len(list(gadgets.forms("collections.OrderedDict"))) >= 400


def test_the_program_prints_entries():
    command = [sys.executable, "-m", "tests.adversary", "--json", "--only", "extension codes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"attack": "extension codes", "tries": 6, "held": 6}]


@pytest.mark.parametrize(
    "target", ["canary", "class of the canary", "os.system", "exec", "open", "import_module"]
)
def test_the_canary_notices_what_a_careless_reader_does(tmp_path, target):
    module, name, args = gadgets.targets(tmp_path)[target]
    sys.modules.pop("this", None)
    ways = {way: data for way, _, data in gadgets.ways(module, name, args)}
    for way in ("reduce", "reduce by names on the stack"):
        sys.modules.pop("this", None)
        with canary.watched() as happened:
            pickle.loads(ways[way])
        assert happened, way


def test_a_try_that_loads_or_trips_is_not_held(tmp_path):
    assert checkpoints.attempt("", dict, tmp_path).problem.startswith("it was loaded")
    assert checkpoints.attempt("", canary.trip, tmp_path).problem == "called"
    assert checkpoints.attempt("", lambda: (tmp_path / "new").touch(), tmp_path).problem
    assert "not for users" in checkpoints.attempt("", lambda: {}[0], tmp_path).problem


def test_python_and_torch_see_another_archive():
    shown, hidden = (
        {"archive/data.pkl": b"a", "archive/version": b"3\n"},
        {"archive/data.pkl": b"b", "archive/constants.pkl": b"c"},
    )
    data = gadgets.two_directories(shown, hidden | {"archive/version": b"3\n"})
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == list(shown)
    assert "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records()
