"""Train the named cases as ranks of a job, each compared with one device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.distributed.membership import Job, current
from dapple_tf.graph_passes.ir.names import nodes_of
from tests.dapple_tf.distributed.programs.captured import captured_names
from tests.dapple_tf.distributed.programs.cases import CASES, Case
from tests.equality.one_device import as_tf, named_variables, relative_error, train_on_one_device

MOST = 10_000  # elements of a variable whose value is returned


def run(*names: str) -> dict[str, Any]:
    """Return by case what this rank found."""
    job = current()
    assert not job.is_alone
    return {name: run_case(CASES[name], job) for name in names}


def run_case(case: Case, job: Job) -> dict[str, Any]:
    """Train on one device, on rank 0, then with all ranks from rank 0's values."""
    problem, batches = case.make_problem(), case.batches()
    tensors = {name: as_tf(variable) for name, variable in problem.variables.items()}
    before = {name: variable.numpy() for name, variable in tensors.items()}
    expected = job.run_on_rank_0(lambda: train_on_one_device(problem, batches, case.in_turn))
    if job.rank:
        problem.make_optimizer()  # Keras numbers optimizers: the next one must have the same name as on rank 0
    for name, variable in tensors.items():
        # Other ranks have other values, as if they had drawn their own: rank 0's values must reach all.
        variable.assign(tf.cast(before[name], variable.dtype) + tf.cast(job.rank, variable.dtype))
    optimizer = problem.make_optimizer()
    step = dapple.pipeline(problem.loss_fn, optimizer=optimizer, **case.options)
    errors: dict[str, float] = {}
    losses = []
    for i, batch in enumerate(batches):
        result = step(*batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        losses.append(float(loss))
        errors[f"loss of step {i}"] = relative_error(loss.numpy(), expected.losses[i])
        if aux is not None and expected.aux[i] is not None:
            errors |= {f"aux {n} of step {i}": relative_error(v.numpy(), expected.aux[i][n]) for n, v in aux.items()}
    named = named_variables(problem, optimizer)
    own = own_names(step, batches[-1], named)
    errors |= {f"value of {name}": relative_error(named[name].numpy(), expected.values[name]) for name in own}
    return {
        "errors": errors,
        "losses": losses,
        "expected": sorted(expected.values),
        "functions": sorted(function.name for function in step.graph.functions),
        "held": captured_names(step, named),
        "values": {name: named[name].numpy().tolist() for name in own if named[name].shape.num_elements() <= MOST},
        "plan": [list(stage.devices) for stage in step.plan.stages],
        "nodes": [node.name for node in step.graph.nodes],
        "loops": any(node.op == "While" for node in step.graph_def.node),
        "library": [[node.op for node in function.node_def] for function in step.graph_def.library.function],
    }


def own_names(step: Any, batch: Any, named: dict[str, tf.Variable]) -> list[str]:
    """Return the variables that this rank's updates and commits write or read."""
    found = {name for node in nodes_of(step.graph, "commit") for name in node.strings("variables")}
    for node in nodes_of(step.graph, "update", "write_statistics"):
        ports = step.graph.function(node.string("function")).input_ports("variable")
        found |= {port.name for _, port in ports}
    known = step.model(batch).variables
    chosen = {id(known[name]) for name in found}
    return [name for name, variable in named.items() if id(variable) in chosen]
