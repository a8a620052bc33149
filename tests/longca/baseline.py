"""What the version before, a checkout at the front of PYTHONPATH, plans for cells by default: a JSON
line for each cell on stdout. `python -m tests.longca --baseline CHECKOUT` runs this file.
"""

import json
import sys
from functools import partial
from importlib import util
from pathlib import Path

_spec = util.spec_from_file_location("longca_masks", Path(__file__).parent / "masks.py")
masks = sys.modules["longca_masks"] = util.module_from_spec(_spec)
_spec.loader.exec_module(masks)

from cp_ring.plan import Layout  # noqa: E402
from cp_ring.plan.costs import simulate as model  # noqa: E402
from cp_ring.plan.costs.shapes import planned  # noqa: E402
from cp_ring.plan.plan import PlanSpec  # noqa: E402
from cp_ring.plan.sizes.attention_sizes import AttentionSizes  # noqa: E402

few = model.sampled_ranks
for cell in map(masks.named, sys.stdin.read().splitlines()):
    mask = cell.mask()
    layout = Layout.balanced(mask, cell.cp)
    plan = planned(mask, cell.cp, PlanSpec(layout))
    model.sampled_ranks = partial(masks.counted_ranks, cp=cell.cp)
    time = model.simulate(plan, plan.verify(), AttentionSizes(64, 8, 128), ranks_per_node=8)
    model.sampled_ranks = few
    made = {
        "cell": str(cell),
        "edges": layout.edges.tolist(),
        "owner": layout.owner.tolist(),
        "schedule": plan.schedule,
        "shares": [time.efficiency_forward, time.efficiency_both],
    }
    print(json.dumps(made), flush=True)
