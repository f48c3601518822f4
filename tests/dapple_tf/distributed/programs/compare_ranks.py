"""What every rank of a launch runs: the cases named, one after the other, each compared with one device.

``python -m tests.dapple_tf.distributed.programs.compare_ranks NAME ...`` prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import dapple_tf as dapple

dapple.init()

import horovod.tensorflow as hvd  # noqa: E402
import tensorflow as tf  # noqa: E402

from graph_passes.ir.names import nodes_of  # noqa: E402
from tests.dapple_tf.distributed.programs.cases import CASES, Case  # noqa: E402
from tests.equality.one_device import as_tf, named_variables, relative_error, train_on_one_device  # noqa: E402

MOST = 10_000  # numbers of a variable that are worth printing


def run_case(case: Case) -> dict[str, Any]:
    """Train on one device, then with the other ranks from rank 0's values."""
    problem, batches = case.make_problem(), case.batches()
    tensors = {name: as_tf(variable) for name, variable in problem.variables.items()}
    before = {name: variable.numpy() for name, variable in tensors.items()}
    wanted = train_on_one_device(problem, batches, case.in_turn)
    for name, variable in tensors.items():
        # As if every process had drawn its own: rank 0's values must come to all.
        variable.assign(tf.cast(before[name], variable.dtype) + tf.cast(hvd.rank(), variable.dtype))
    optimizer = problem.make_optimizer()
    step = dapple.pipeline(problem.loss_fn, optimizer=optimizer, **case.options)
    errors: dict[str, float] = {}
    losses = []
    for i, batch in enumerate(batches):
        result = step(*batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        losses.append(float(loss))
        errors[f"loss of step {i}"] = relative_error(loss.numpy(), wanted.losses[i])
        if aux is not None and wanted.aux[i] is not None:
            errors |= {f"aux {n} of step {i}": relative_error(v.numpy(), wanted.aux[i][n]) for n, v in aux.items()}
    named = named_variables(problem, optimizer)
    own = own_names(step, batches[-1], named)
    errors |= {f"value of {name}": relative_error(named[name].numpy(), wanted.values[name]) for name in own}
    return {
        "errors": errors,
        "losses": losses,
        "wanted": sorted(wanted.values),
        "functions": sorted(function.name for function in step.graph.functions),
        "held": sorted(held_names(step, named)),
        "values": {name: named[name].numpy().tolist() for name in own if named[name].shape.num_elements() <= MOST},
        "allreduces": [node.name for node in nodes_of(step.graph, "allreduce")],
        "plan": [list(stage.devices) for stage in step.plan.stages],
        "nodes": [node.name for node in step.graph.nodes],
        "library": [[node.op for node in function.node_def] for function in step.graph_def.library.function],
    }


def own_names(step: Any, batch: Any, named: dict[str, tf.Variable]) -> list[str]:
    """The variables that this rank's updates and commits write or read."""
    found = {name for node in nodes_of(step.graph, "commit") for name in node.strings("variables")}
    for node in nodes_of(step.graph, "update"):
        ports = step.graph.function(node.string("function")).input_ports("variable")
        found |= {port.name for _, port in ports}
    known = step.model(batch).variables
    chosen = {id(known[name]) for name in found}
    return [name for name, variable in named.items() if id(variable) in chosen]


def held_names(step: Any, named: dict[str, tf.Variable]) -> list[str]:
    """The variables whose resources the step's function takes."""
    handles = {id(handle) for handle in step._program().function.captured_inputs}
    return [name for name, variable in named.items() if id(variable.handle) in handles]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"case": name, **run_case(CASES[name])}, default=str), flush=True)  # complex numbers
    hvd.allreduce(tf.zeros([1]), name="end")  # a rank that leaves early ends Horovod for all
