"""Megatron's own CUDA graphs of whole layers (`cuda_graph_impl="local"`) around ring attention,
without CUDA.

In place of a graph, the operations of the capture are recorded, and repeated where Megatron replays
the graph.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from cp_ring import Layout, patches
from cp_ring.megatron.flags import graphs as ours
from tests import recorded
from tests.megatron import worker
from tests.megatron.launch import FULL, TINY, fork, trace

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs the CPU runtime, which is inert where CUDA is present"
)

N = 16


class Graph:
    """Stands for a CUDA graph."""

    made: ClassVar[list[Graph]] = []
    replays = 0
    computed_by_capture = False
    """Whether the first replay has nothing to do: here a capture computes, on CUDA it does not."""

    def __init__(self) -> None:
        self.operations: list[recorded.Operation] = []
        self.names: list[str] = []
        self.made.append(self)

    def register_generator_state(self, state: object) -> None:
        """There are no random numbers."""

    def replay(self) -> None:
        Graph.replays += 1
        if Graph.computed_by_capture:
            Graph.computed_by_capture = False
        else:
            recorded.repeat(self.operations)


@contextmanager
def capture(graph: Graph, **_: object):
    with recorded.Recording(graph.operations, graph.names):
        yield


@pytest.fixture
def graphs(one_rank, monkeypatch):
    """Megatron's module of CUDA graphs, where graphs are recordings."""
    cuda_graphs = recorded_graphs(monkeypatch)
    yield cuda_graphs
    cuda_graphs.delete_cuda_graphs()
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def recorded_graphs(monkeypatch):
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    stand_ins(monkeypatch)
    random.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    return cuda_graphs


def stand_ins(monkeypatch) -> None:
    """What Megatron needs of CUDA for its graphs, beside what the CPU runtime has."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"):
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    monkeypatch.setattr(
        cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", lambda state: state
    )
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(Graph, "replays", 0)


def model(layer=None, **changes):
    """A GPT of two layers, with the same weights each time."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.specs import with_ring_attention

    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, normalization="RMSNorm", add_bias_linear=False, masked_softmax_fusion=False, **changes,
    )  # fmt: skip
    spec = with_ring_attention(
        get_gpt_layer_local_spec(changes.get("num_moe_experts"), normalization="RMSNorm")
    )
    spec.module = layer or spec.module
    made = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=N, position_embedding_type="rope"
    )
    for parameter in made.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    return made


def train(made, seed: int, rank: int = 0, cp: int = 1) -> tuple[float, list[torch.Tensor]]:
    """The loss of a microbatch on this rank, and the gradients of all parameters: those of graphs
    are in `main_grad` alone.
    """
    tokens = torch.randint(0, 64, (2, N + 1), generator=torch.Generator().manual_seed(seed))
    layout = Layout.zigzag(N, cp)
    own, positions, labels = (
        layout.shard(x, rank, 1)
        for x in (tokens[:, :-1], torch.arange(N).expand(2, N), tokens[:, 1:])
    )
    losses = made(own, positions, None, labels=labels)
    for parameter in made.parameters():
        parameter.main_grad.zero_()
    losses.sum().backward()
    grads = [p.main_grad + (0 if p.grad is None else p.grad) for p in made.parameters()]
    made.zero_grad()  # as Megatron's wrapper does, before a graph is captured
    return float(losses.detach().sum()), grads


def compare(graphs, rank: int = 0, cp: int = 1, **changes) -> list[Graph]:
    """Trains with graphs and without, which must give the same bits; returns the graphs.

    The first step is recorded eagerly, then Megatron captures each layer, forward and backward, and
    replays it.
    """
    changes |= {"context_parallel_size": cp}
    graphed, plain = model(**changes, cuda_graph_impl="local"), model(**changes)
    for step in range(3):
        before = Graph.replays
        (loss, grads), (wanted, theirs) = (
            train(graphed, step, rank, cp),
            train(plain, step, rank, cp),
        )
        assert loss == wanted
        assert all(torch.equal(x, y) for x, y in zip(grads, theirs, strict=True))
        assert Graph.replays - before == (4 if step else 0)
        if step == 0:
            graphs.create_cudagraphs()
    layers = [layer.cudagraph_manager.cudagraph_runners[0] for layer in graphed.decoder.layers]
    found = [graph for layer in layers for graph in (layer.fwd_graph, layer.bwd_graph)]
    for graph in found:
        assert not recorded.of_the_host(graph.operations, graph.names)
        assert any("scaled_dot_product" in operation.name for operation in graph.operations)
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"softmax_type": "learnable", "window_size": (5, 0)}], ids=str
)
def test_layers_in_graphs_train_as_without(graphs, changes):
    compare(graphs, **changes)


PADDED = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    ("modules", "experts"), [([], {}), (["attn"], {}), (["mamba"], {}), (["moe_router"], {}), ([
        "moe"], PADDED)],
    ids=str,
)  # fmt: skip
def test_which_graphs_hold_attention(graphs, modules, experts):
    """Where Megatron captures a layer as a whole, attention is in it, whatever the modules are
    called.
    """
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    experts = {**experts, "num_moe_experts": 4} if "moe" in "".join(modules) else {}
    layer_kind = {"layer": MoETransformerLayer} if experts else {}
    made = model(cuda_graph_impl="local", cuda_graph_modules=modules, **experts, **layer_kind)
    whole = [hasattr(layer, "cudagraph_manager") for layer in made.decoder.layers]
    assert whole == [ours.hold_attention(made.config)] * 2


def two_ranks(rank: int, ranks: int, port: int, folder: Path) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    patches.get("cpu_runtime").apply()
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    graphs = recorded_graphs(pytest.MonkeyPatch())
    found = compare(graphs, rank, ranks)
    messages = [
        sum(operation.function.namespace == "c10d" for operation in graph.operations)
        for graph in found
    ]
    (folder / str(rank)).write_text(" ".join(map(str, messages)))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_graphs_hold_the_messages_of_the_ring(tmp_path):
    """On two ranks: keys in forward, keys and gradients in backward, sent and received."""
    assert fork(2, (tmp_path,), target=two_ranks) == 0
    counts = [list(map(int, (tmp_path / str(rank)).read_text().split())) for rank in range(2)]
    for forward, backward, *_ in counts:
        assert 0 < forward < backward
    assert counts[0][:2] == counts[0][2:] and sum(counts[0]) == sum(counts[1])


def trained(rank: int, ranks: int, port: int, folder: Path, job: dict) -> None:
    """Trains, and writes how many graphs were replayed, and what in them went by way of the host."""
    stand_ins(pytest.MonkeyPatch())
    Graph.computed_by_capture = "full_iteration" in job["argv"]
    worker.rank(rank, ranks, port, job, folder, folder / "log")
    host = {
        name for graph in Graph.made for name in recorded.of_the_host(graph.operations, graph.names)
    }
    # Numbers on the CPU, which Megatron's loss and schedule use; and what the test itself reads of
    # each microbatch.
    host -= {"lift_fresh", "numpy"}
    (folder / "replays").write_text(" ".join([str(Graph.replays), *host]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replays", "more"),
    [
        ("full_iteration", 3, []),
        ("full_iteration", 3, ["--cp-ring-loss-chunk", "32"]),
        ("full_iteration", 3, FULL),
        # steps, microbatches, two layers forward and backward
        ("local", 3 * 4 * 4, ["--cp-ring-certify", "strict"]),
    ],
    ids=["whole step", "in chunks", "recomputation", "layers"],
)
def test_a_job_with_graphs_trains_as_without(tmp_path, kind, replays, more):
    """`cp_ring.pretrain_gpt` as the flags say. How it reads a batch and computes the loss is part
    of a whole step's graph too.
    """
    flags = [
        *TINY,
        *more,
        "--cp-ring",
        "--cp-ring-cpu",
        "--train-iters",
        "4",
        "--no-check-for-nan-in-loss-and-grad",
    ]
    asked = ["--cuda-graph-impl", kind, "--cuda-graph-warmup-steps", "1", "--inference-rng-tracker",
             "--cp-ring-allow-untried", "cuda-graphs"]  # fmt: skip
    for name, graph in (("graph", asked), ("plain", [])):
        job = {"name": name, "argv": [*flags, *graph], "fault": "", "data": ""}
        code = fork(1, (tmp_path, job), target=trained)
        assert code == 0, (tmp_path / "log").read_text()[-4000:]
        assert (tmp_path / "replays").read_text() == (str(replays) if graph else "0")
    losses = {
        name: [(step["loss"], step["grad_norm"]) for step in trace(tmp_path, name).values()]
        for name in ("graph", "plain")
    }
    assert losses["graph"] == losses["plain"] and len(losses["plain"]) == 4
