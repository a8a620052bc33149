"""Each patch does what it says, fails to be there without it, and is undone without a trace."""

import argparse
import inspect
import os
import pkgutil
import sys
from contextlib import nullcontext

import pytest
import torch

from cp_ring import patches
from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from cp_ring.megatron.wrapping import loaded_modules
from cp_ring.patches.patch import Patch, parameters_of, signatures
from tests.integrations.te_stand_in import installed
from tests.patches.signatures import upstream
from tests.rank_pool import python
from tests.rings import refused


def test_the_table_describes_every_patch():
    for entry in patches.table():
        assert all(entry[key] for key in ("name", "what", "why", "state")), entry


def test_rows_are_compared_before_packed_batches_are_split():
    assert patches.get("packed_batches").order < patches.get("equal_rows").order


def test_an_unknown_patch_is_rejected():
    assert "no patch 'nothing'" in refused(ConfigError, patches.get, "nothing")


@pytest.mark.parametrize("name", patches.patches_by_name())
def test_apply_and_revert_leave_no_trace(name):
    patch = patches.get(name)
    if patch.unneeded():
        pytest.skip(patch.unneeded())
    with installed() if name == "beneath_te" else nullcontext():
        _apply_and_revert(patch)


def _apply_and_revert(patch):
    name = patch.name
    before = [
        (owner, attribute, vars(owner).get(attribute, "absent"), new)
        for owner, attribute, new in patch.changes()
    ]
    patch.apply()
    assert name in patches.applied() and patch.state() == "applied"
    patch.apply()  # a second time changes nothing more
    # specifications of tests may have put the same in this place
    assert all(vars(owner)[name] is not old or new is old for owner, name, old, new in before)
    wrapped = {name.rpartition(".")[2] for name in patch.wraps}
    for owner, attribute, old, _ in before:
        if inspect.ismodule(owner) and attribute in wrapped:  # nobody calls the original
            held = [vars(module).get(attribute) for module in loaded_modules("megatron")]
            assert not any(each is old for each in held), attribute
    patch.revert()
    assert name not in patches.applied()
    for owner, attribute, old, _ in before:
        assert vars(owner).get(attribute, "absent") is old, attribute


@pytest.mark.compat
@pytest.mark.parametrize("name", patches.patches_by_name())
def test_a_patch_stands_on_functions_with_the_parameters_that_it_knows(name):
    patch = patches.get(name)
    if patch.unneeded():
        pytest.skip(patch.unneeded())
    if name == "loss_chunks" and compat.within("<0.19"):
        assert "_compute_mtp_acceptance_counts does not exist" in patch.rejection()
        return
    with installed() if name == "beneath_te" else nullcontext():
        assert upstream(patch) <= {*signatures().get(name, {})}
        assert not patch.rejection()


def renamed(owner, attribute, home, monkeypatch):
    inherited = [attribute in vars(base) for base in getattr(owner, "__mro__", ())[1:]]
    if any(inherited):  # then the class has another name
        owner, attribute = sys.modules[home], owner.__name__
    monkeypatch.delattr(owner, attribute)


def re_signed(owner, attribute, home, monkeypatch):
    def other(one, *, another=None):
        pass

    other.__module__ = home
    monkeypatch.setattr(owner, attribute, other)


STANDS_ON = [(name, function) for name, functions in signatures().items() for function in functions]


@pytest.mark.parametrize("change", [renamed, re_signed])
@pytest.mark.parametrize("name, function", STANDS_ON)
def test_another_function_of_megatron_is_one_line_before_any_patch(
    name, function, change, monkeypatch
):
    patch, optional = patches.get(name), None in signatures()[name][function]
    if parameters_of(function) is None or (optional and change is renamed):
        pytest.skip("a supported version has no such function")
    owner, _, attribute = function.replace(":", ".").rpartition(".")
    owner = pkgutil.resolve_name(owner if owner in sys.modules else ":".join(owner.rsplit(".", 1)))
    for each in patches.patches_by_name().values():  # imports, which would keep what is changed
        each.rejection()
    for _, each in STANDS_ON:
        parameters_of(each)
    change(owner, attribute, function.partition(":")[0], monkeypatch)
    for each in patches.patches_by_name().values():
        monkeypatch.setattr(each, "needed", lambda *_, it=each: it.name in ("arguments", name))
    monkeypatch.setattr(patch, "unneeded", lambda: "")
    applied = []
    monkeypatch.setattr(Patch, "apply", lambda patch: applied.append(patch.name))
    (line,) = refused(ConfigError, patches.apply_for, None, None).splitlines()
    assert line.startswith(f"patch {name}: megatron-core {compat.megatron_version()}")
    assert attribute in line or owner.__name__ in line
    assert patch.state() == f"rejected: {line}" and not applied
    if changed := vars(owner).get(attribute):
        modules = [x for x in loaded_modules("megatron") if x is not owner]
        assert not any(vars(x).get(attribute) is changed for x in modules)


def test_cpu_runtime_is_inert_where_cuda_is_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    patch, synchronize = patches.get("cpu_runtime"), torch.cuda.synchronize
    patch.apply()
    assert not patch.applied and torch.cuda.synchronize is synchronize
    assert patch.state() == "not needed: CUDA is present"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is")
def test_cpu_runtime_answers_what_pipelines_and_logs_ask_of_cuda(applied):
    applied("cpu_runtime")
    assert not torch.cuda.is_current_stream_capturing() and torch.cuda.device_memory_used() > 0


def test_dataset_helpers_runs_make_where_it_can(applied, monkeypatch, tmp_path):
    import importlib.util
    import subprocess

    import megatron.core.datasets.utils as utils

    made, real = [], subprocess.run

    def run(command, *args, **kwargs):
        if command[0] != "make":
            return real(command, *args, **kwargs)
        made.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit):
        utils.compile_helpers()
    assert len(made) == 1
    applied("dataset_helpers")
    built = "megatron.core.datasets.helpers_cpp"
    has = {built: importlib.util.find_spec(built)}
    monkeypatch.setattr(importlib.util, "find_spec", has.get)
    utils.compile_helpers()
    assert len(made) == 1
    has.clear()  # as in a new checkout
    assert "needs the package pybind11" in refused(ConfigError, utils.compile_helpers)
    has["pybind11"] = "a spec"
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    (tmp_path / "Makefile").touch()
    with pytest.raises(SystemExit):
        utils.compile_helpers()
    assert len(made) == 2


@pytest.mark.compat
def test_parts_of_gated_delta_products_that_are_recomputed_are_rejected(monkeypatch, applied):
    module = pytest.importorskip("megatron.core.ssm.gated_delta_product")  # since 0.20
    mixer = module.GatedDeltaProductMixer
    monkeypatch.setattr(mixer, "__init__", lambda layer, config, pg_collection: None)
    applied("recurrent_layers")
    for name, value in (
        ("recompute_modules", ["core_attn", "gdp_qkv"]), ("offload_modules", ["gdp_qkv"]),
        ("gdp_cutedsl_kernel", True),
    ):  # fmt: skip
        layer = object.__new__(mixer)
        vars(layer)["config"] = argparse.Namespace(**{name: value})
        assert "nor --gdp-cutedsl-kernel: leave them out" in refused(
            ConfigError, mixer.__init__, layer, None, pg_collection=argparse.Namespace(cp=None)
        )


@pytest.mark.compat
@pytest.mark.parametrize(
    "layers, wanted",
    [({"mtp_num_layers": 1}, "mtp_roll"), ({"num_experts": 4}, "moe_aux_loss"), ({}, "")],
)
def test_layers_that_a_checkpoint_turns_on_get_their_patches(monkeypatch, layers, wanted):
    """With --use-checkpoint-args the command line does not name them: Megatron completes the
    arguments before it checks them.
    """
    from megatron.training import arguments

    from cp_ring.megatron.flags import resolve

    done = []
    monkeypatch.setattr(Patch, "apply", lambda patch: done.append(patch.name))
    monkeypatch.setattr(arguments, "validate_args", lambda args, *rest, **named: args)
    monkeypatch.setattr(resolve, "accept_complete", lambda args: args)
    monkeypatch.setattr(resolve, "accept", lambda args: done.append("checked") or args)
    made = patches.get("arguments").changes()
    (check,) = [new for owner, name, new in made if (owner, name) == (arguments, "validate_args")]
    off = {"cp_ring_certify": "off", "mtp_num_layers": None, "num_experts": None}
    off["use_checkpoint_args"] = True
    check(argparse.Namespace(**off | layers, cp_ring=True))
    assert done == ["checked"] + [wanted] * bool(wanted)
    done.clear()
    check(argparse.Namespace(**off | layers | {"use_checkpoint_args": False}, cp_ring=False))
    assert not done


@pytest.mark.ci
def test_one_rank_of_a_job_says_which_cuda_libraries_are_missing():
    code = "from cp_ring import patches; patches.get('cpu_runtime').apply(); import warnings; warnings.warn('mine')"
    for rank, told in (("0", True), ("1", False)):
        of_rank = {**os.environ, "RANK": rank}
        done = python("-W", "default", "-c", code, env=of_rank, check=True)
        assert ("Apex" in done.stderr) is told and "mine" in done.stderr


def test_a_function_that_a_script_has_replaced_is_not_compared(monkeypatch):
    from megatron.training import training

    monkeypatch.setattr(training, "training_log", lambda *given, one=None: None)
    assert not patches.get("step_line").rejection()
