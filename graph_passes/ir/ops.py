"""The op table: every op of the pipelined graph, with its inputs, outputs, attributes and place.

The pipelined graph holds calls of stage functions and what connects them; a *call-level* op is the kind of such a node.
``verify`` checks each node against its entry, ``dapple_tf.backend.operations`` has a TensorFlow handler for each, and
the documentation prints the table (``ops_table_markdown``). The op level, inside a stage function, has TensorFlow's
operations and the inputs ``INPUT_OPS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, get_args

from dapple_tf.graph_passes.ir.graph import Attr, Role, StrEnum

INPUT_OPS: frozenset[str] = frozenset({*get_args(Role), "capture"}) - {"loss", "aux"}
"""Ops of the op level that stand for inputs: the roles of ports, and ``capture`` for a captured constant."""


class OpName(StrEnum):
    """The name of a call-level op."""

    INPUT = "input"
    MINIBATCH = "minibatch"
    BATCH_SIZE = "batch_size"
    SLICE = "slice"
    ROW_BOUNDS = "row_bounds"
    RUN_ONCE = "run_once"
    PARTIALS = "partials"
    COMBINE_PARTIALS = "combine_partials"
    FORWARD = "forward"
    PART = "part"
    JOIN = "join"
    GATHER_ROWS = "gather_rows"
    LOSS_HEAD = "loss_head"
    CUT_ROWS = "cut_rows"
    LOSS_SCALE = "loss_scale"
    LOSS_GRADIENT = "loss_gradient"
    BACKWARD = "backward"
    INPUTS = "inputs"
    WEIGHTS = "weights"
    SPLIT = "split"
    CONCAT = "concat"
    ADD = "add"
    TOGETHER = "together"
    CLEAR_SUMS = "clear_sums"
    ACCUMULATE = "accumulate"
    GRADIENTS = "gradients"
    ALLREDUCE = "allreduce"
    REDUCE = "reduce"
    TIED_SUM = "tied_sum"
    ROUND = "round"
    REDUCED_GRADIENTS = "reduced_gradients"
    GATHER_SLICES = "gather_slices"
    DENSIFY = "densify"
    SQUARE_NORM = "square_norm"
    GLOBAL_NORM = "global_norm"
    CLIP = "clip"
    SUM_STATISTICS = "sum_statistics"
    WRITE_STATISTICS = "write_statistics"
    MERGE = "merge"
    MERGE_MINIBATCHES = "merge_minibatches"
    BARRIER = "barrier"
    UPDATE_TERMS = "update_terms"
    COMBINE_TERMS = "combine_terms"
    SET_UPDATING = "set_updating"
    COUNT_UPDATE = "count_update"
    UPDATE = "update"
    REFRESH = "refresh"
    STORE_VERSION = "store_version"
    COMMIT = "commit"
    READ_VARIABLE = "read_variable"
    READ_STATE = "read_state"
    MERGE_STATE = "merge_state"
    EXCHANGE = "exchange"
    COLLECT_TOKENS = "collect_tokens"
    FOLLOW = "follow"
    TIMESTAMP = "timestamp"
    STACK_TIMESTAMPS = "stack_timestamps"


AttributeType = Literal["bool", "int", "float", "str", "tuple[int, ...]", "tuple[str, ...]"]


@dataclass(frozen=True)
class Attribute:
    """An attribute of an op: its name, the Python type of its value, and whether a node may lack it."""

    name: str
    type: AttributeType
    required: bool = True

    def accepts(self, value: Attr) -> bool:
        """Return whether ``value`` has the attribute's type (a bool is not an int here)."""
        match self.type:
            case "bool":
                return isinstance(value, bool)
            case "int":
                return isinstance(value, int) and not isinstance(value, bool)
            case "float":
                return isinstance(value, float)
            case "str":
                return isinstance(value, str)
            case "tuple[int, ...]":
                return isinstance(value, tuple) and all(type(item) is int for item in value)
            case "tuple[str, ...]":
                return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


@dataclass(frozen=True)
class Operands:
    """The inputs, or the outputs, of an op.

    ``count``: how many there are: a number, the name of a tuple attribute that has an item for each, or None where it
    depends on more than the node. ``dtypes``: the dtypes of the first operands, where all nodes have the same.
    """

    meaning: str
    count: int | str | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """An entry of the op table."""

    name: OpName
    meaning: str
    inputs: Operands
    outputs: Operands
    attributes: tuple[Attribute, ...] = ()

    @property
    def place(self) -> tuple[Attribute, ...]:
        """The attributes that say where a node runs: none, stage and replica, or these and the micro-batch."""
        return tuple(attribute for attribute in self.attributes if attribute.name in _PLACE_NAMES)

    def attribute(self, name: str) -> Attribute | None:
        """Return the attribute called ``name``, or None where the op has none of that name."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, Attribute]:
        return {attribute.name: attribute for attribute in self.attributes}


NOTHING = Operands("none", 0)
_ENTERING = Operands("the function's inputs, variables left out")

_STAGE, _REPLICA, _MICRO_BATCH = (Attribute(name, "int") for name in ("stage", "replica", "micro_batch"))
_PLACE_NAMES = ("stage", "replica", "micro_batch")
_PLACED = (_STAGE, _REPLICA)
_CALLED = (_STAGE, _REPLICA, _MICRO_BATCH)
_FUNCTION = Attribute("function", "str")
_VARIABLES = Attribute("variables", "tuple[str, ...]")
_REPLICAS = Attribute("replicas", "int")
_SUMMED = Attribute("summed", "tuple[str, ...]", required=False)
_MICRO_BATCHES = Attribute("micro_batches", "int")
_SIZES = Attribute("sizes", "tuple[int, ...]", required=False)
_SHARES = Attribute("shares", "tuple[int, ...]", required=False)
_PIECES = Attribute("pieces", "int")
_AXES = Attribute("axes", "tuple[int, ...]")
_OUTER = Attribute("outer", "tuple[int, ...]")
_INLINE = Attribute("inline", "bool", required=False)
_BUCKET = Attribute("bucket", "int", required=False)
_CHECK = Attribute("check", "bool", required=False)
_RANKS = Attribute("ranks", "tuple[int, ...]", required=False)
_VERSION = Attribute("version", "int", required=False)


def _call(name: OpName, meaning: str, attributes: tuple[Attribute, ...], inputs: Operands = _ENTERING) -> Op:
    """Return the entry of an op whose nodes call a function and give what it returns."""
    return Op(name, meaning, inputs, Operands("the function's outputs"), (*attributes, _FUNCTION))


_TABLE = (
    Op(
        OpName.INPUT,
        "A tensor of the batch, as the user passes it; where ranks take rows of their own, also the batch size.",
        NOTHING,
        Operands("the tensor, batched on axis 0; or the number", 1),
        (Attribute("index", "int", required=False),),
    ),
    Op(
        OpName.MINIBATCH,
        "Cut out the rows of one minibatch: number `minibatch` of `minibatches` in a window.",
        Operands("the batch size, then tensors of the batch", None, ("int64",)),
        Operands("the rows of each tensor"),
        (Attribute("minibatch", "int"), Attribute("minibatches", "int")),
    ),
    Op(
        OpName.BATCH_SIZE,
        "The number of samples in the batch.",
        Operands("the first tensor of the batch", 1),
        Operands("the number of samples", 1, ("int64",)),
    ),
    Op(
        OpName.SLICE,
        "The rows of the batch that a replica of a stage takes for one micro-batch, and their share of the batch. The "
        "tensors at the positions `local` hold only the replica's rows, in the order of the micro-batches. `sizes`: "
        "the number of samples of each micro-batch, where it is given; a batch of another size is cut in the same "
        "proportion. `shares`: how many rows each replica takes, as whole numbers in this proportion, where these "
        "numbers differ.",
        Operands("the batch size, then tensors of the batch", None, ("int64",)),
        Operands("the share of the samples, then the rows of each tensor", None, ("float64",)),
        (*_CALLED, _MICRO_BATCHES, _SIZES, _REPLICAS, _SHARES, Attribute("local", "tuple[int, ...]", required=False)),
    ),
    Op(
        OpName.ROW_BOUNDS,
        "The first row and the end row of what a replica of a stage takes of one micro-batch, and the batch size. "
        "A node without a micro-batch gives those of the whole batch.",
        Operands("the batch size", 1, ("int64",)),
        Operands("a vector of these three numbers", 1, ("int64",)),
        (
            *(
                Attribute(name, "int", required=False)
                for name in ("stage", "replica", "micro_batch", "micro_batches", "replicas")
            ),
            _SIZES,
            _SHARES,
        ),
    ),
    _call(
        OpName.RUN_ONCE,
        "Call the part of a stage's forward that runs once a step, on the whole batch: statistics of the batch, seeds, "
        "and writes that do not depend on samples. `version`: as for `forward`.",
        (*_PLACED, _VERSION),
    ),
    _call(
        OpName.PARTIALS,
        "Call the function that computes partial statistics (sums, largest values) of a replica's rows of one "
        "micro-batch, from which statistics of the whole batch are computed.",
        _CALLED,
    ),
    Op(
        OpName.COMBINE_PARTIALS,
        "Combine partial statistics of disjoint rows, each by its operation: sum, product, max, min, all or any.",
        Operands("for each statistic its `pieces`, one after the other"),
        Operands("the combined statistics", "operations"),
        (*_PLACED, Attribute("operations", "tuple[str, ...]"), _PIECES),
    ),
    _call(
        OpName.FORWARD,
        "Call a stage's forward function on one micro-batch. `version`: the slot of the replica's stored versions of "
        "the weights that it uses, where the replica has any. `shares`: as for `slice`.",
        (*_CALLED, _VERSION, _SHARES),
    ),
    _call(
        OpName.PART,
        "Call a part of a stage's function on one micro-batch, where the replicas combine statistics inside of the "
        "function: a `join` of what this part computes, and then the next part, follow. `of`: the op of the whole call "
        "(forward, backward, weights), which the last part keeps.",
        (*_CALLED, Attribute("of", "str")),
    ),
    Op(
        OpName.JOIN,
        "Combine what a part computed on each replica of a stage; all replicas have the same result. `kinds`: moments "
        "(weight, mean and variance of each channel) or sum, for each tensor.",
        Operands("for each tensor, its `pieces` in the order of the replicas"),
        Operands("the combined tensors", "kinds"),
        (*_CALLED, Attribute("kinds", "tuple[str, ...]"), _PIECES),
    ),
    Op(
        OpName.GATHER_ROWS,
        "Put the rows of all micro-batches and replicas together, in each of the `outer` blocks of an axis.",
        Operands("for each tensor, its pieces in sample order"),
        Operands("the tensors, then for each tensor the lengths of its pieces"),
        (*_PLACED, _AXES, _OUTER, _PIECES),
    ),
    _call(
        OpName.LOSS_HEAD,
        "Call the loss head of the model on the whole batch: the loss that combines the samples, and its gradients.",
        _PLACED,
    ),
    Op(
        OpName.CUT_ROWS,
        "Cut gradients of the whole batch's rows into those of micro-batches and replicas.",
        Operands("the tensors, then for each tensor the lengths of its pieces"),
        Operands("for each tensor, its pieces in sample order"),
        (*_PLACED, _AXES, _OUTER, _PIECES),
    ),
    Op(
        OpName.LOSS_SCALE,
        "Call the function that computes the factor by which the optimizer scales the loss, before any backward.",
        NOTHING,
        Operands("the factor, in the dtype of the loss", 1),
        (_FUNCTION,),
    ),
    Op(
        OpName.LOSS_GRADIENT,
        "The gradient with which backward starts, in the dtype of the loss: the share of the samples, or 1 where the "
        "loss is a sum over samples; multiplied by the loss scale, where there is one.",
        Operands("the share of the samples, unless the loss is a sum; then the loss scale, where there is one"),
        Operands("the product of the inputs; 1 where there are none", 1),
        _CALLED,
    ),
    _call(
        OpName.BACKWARD,
        "Call a stage's backward function on one micro-batch. `version`: as for `forward`.",
        (*_CALLED, _INLINE, _VERSION),
    ),
    _call(
        OpName.INPUTS,
        "Call the part of a stage's backward that gives the gradients of its inputs.",
        (*_CALLED, _INLINE),
    ),
    _call(
        OpName.WEIGHTS,
        "Call the part of a stage's backward that gives the gradients of its weights.",
        (*_CALLED, _INLINE),
    ),
    Op(
        OpName.SPLIT,
        "Cut boundary tensors of one replica into the rows that each replica of the neighbouring stage takes. "
        "`shares`: as for `slice`; `of_shares`: those of the neighbouring stage.",
        Operands("the batch size, then the tensors", None, ("int64",)),
        Operands("for each tensor, the rows of each receiver"),
        (
            *_CALLED,
            _MICRO_BATCHES,
            _SIZES,
            _REPLICAS,
            _SHARES,
            _AXES,
            Attribute("of", "int"),
            Attribute("of_shares", "tuple[int, ...]", required=False),
            Attribute("receivers", "tuple[int, ...]"),
        ),
    ),
    Op(
        OpName.CONCAT,
        "Put boundary tensors together from the rows of several replicas of the neighbouring stage.",
        Operands("for each tensor, its pieces in sample order"),
        Operands("the tensors", "axes"),
        (*_CALLED, _AXES, _PIECES),
    ),
    Op(
        OpName.ADD,
        "Add the gradients of boundary tensors that do not depend on the batch; zeros where no replica sends any.",
        Operands("for each tensor, its gradients from several replicas"),
        Operands("the sums"),
        (*_CALLED, _PIECES),
    ),
    Op(
        OpName.TOGETHER,
        "Wait for tensors that leave a stage for several micro-batches, then pass all of them on, so that they travel "
        "in one message. `micro_batch`: the last of these micro-batches.",
        Operands("the tensors"),
        Operands("the same"),
        _CALLED,
    ),
    Op(
        OpName.CLEAR_SUMS,
        "Set the sums of gradients that a replica keeps to zero, where its backward calls add to them.",
        NOTHING,
        NOTHING,
        (*_PLACED, _VARIABLES),
    ),
    Op(
        OpName.ACCUMULATE,
        "Add one micro-batch's gradients to the sums that the replica keeps; the first ones replace the sums.",
        Operands("the gradients of `variables`", "variables"),
        NOTHING,
        (*_CALLED, _VARIABLES, Attribute("first", "bool"), _BUCKET),
    ),
    Op(
        OpName.GRADIENTS,
        "A replica's gradients, summed over the micro-batches.",
        Operands("the gradients where there is one micro-batch, else none: the sums are read"),
        Operands("the gradients of `variables`", "variables"),
        (*_PLACED, _VARIABLES, _BUCKET),
    ),
    Op(
        OpName.ALLREDUCE,
        "Sum gradients, or statistics, over the replicas of a stage; with `average`, divide by their number.",
        Operands("the tensors of every replica; on a rank, of its own replica"),
        Operands("the sums; on a rank, and a token"),
        (*_PLACED, _VARIABLES, _REPLICAS, _BUCKET, _RANKS, Attribute("average", "bool", required=False)),
    ),
    Op(
        OpName.REDUCE,
        "Sum gradients over the replicas of a stage on the one replica that updates their variables (a stage whose "
        "update is sharded: see `shard_optimizer`).",
        Operands("the tensors of every replica"),
        Operands("the sums", "variables"),
        (*_PLACED, _VARIABLES, _BUCKET),
    ),
    Op(
        OpName.TIED_SUM,
        "Add the gradients of a variable that several stages use.",
        Operands("the gradient from each stage"),
        Operands("the sum", 1),
        (*_PLACED, Attribute("variable", "str")),
    ),
    Op(
        OpName.ROUND,
        "Round sums of gradients to the narrower float types that the gradients have on one device; a sum that does "
        "not fit into the type becomes infinite.",
        Operands("the gradients", "dtypes"),
        Operands("the rounded ones, in their own types", "dtypes"),
        (*_PLACED, Attribute("dtypes", "tuple[str, ...]")),
    ),
    Op(
        OpName.REDUCED_GRADIENTS,
        "The complete gradients of the variables that a stage, or a replica of it, updates; with `check`, the step "
        "fails if one is not finite.",
        Operands("the gradients of `variables`", "variables"),
        Operands("the same", "variables"),
        (*_PLACED, _VARIABLES, _CHECK),
    ),
    Op(
        OpName.GATHER_SLICES,
        "The complete sparse gradient of a variable: the slices of all its uses, micro-batches and replicas, one use "
        "after the other. `uses` says how to combine those of a use: concat in sample order, sum by position, or merge "
        "by index. `averaged`: the number of minibatches by which the sum is divided. With `check`, the step fails if "
        "a slice is not finite.",
        Operands("for each use, each of its `pieces`: slices and indices"),
        Operands("the slices, and their indices", 2),
        (
            *_PLACED,
            Attribute("variable", "str"),
            Attribute("rows", "int"),
            Attribute("uses", "tuple[str, ...]"),
            Attribute("pieces", "tuple[int, ...]"),
            Attribute("averaged", "int", required=False),
            _CHECK,
        ),
    ),
    Op(
        OpName.DENSIFY,
        "Make a dense tensor from slices: slices with the same index are added, and rows without a slice are zero.",
        Operands("the slices, and their indices", 2),
        Operands("the tensor", 1),
        (*_PLACED, Attribute("variable", "str")),
    ),
    Op(
        OpName.SQUARE_NORM,
        "The sum of the squares of a stage's gradients, dense tensors or slices as they are.",
        Operands("the gradients"),
        Operands("the sum", 1, ("float64",)),
        _PLACED,
    ),
    Op(
        OpName.GLOBAL_NORM,
        "The norm of all gradients of all stages.",
        Operands("the sum of squares of each stage"),
        Operands("the norm", 1, ("float64",)),
    ),
    Op(
        OpName.CLIP,
        "Scale a stage's gradients so that the global norm is at most `limit`; the last `slices` of them are sparse.",
        Operands("the global norm, the dense gradients, then slices and their indices", None, ("float64",)),
        Operands("the scaled gradients, all as dense tensors"),
        (*_PLACED, Attribute("limit", "float"), Attribute("slices", "int", required=False)),
    ),
    Op(
        OpName.SUM_STATISTICS,
        "Add a replica's statistics of deferred batch norm over the micro-batches; `variables` has their names.",
        Operands("the statistics of each micro-batch"),
        Operands("the sums", "variables"),
        (*_PLACED, _VARIABLES),
    ),
    Op(
        OpName.WRITE_STATISTICS,
        "Write a stage's moving statistics from the sums over all micro-batches and replicas.",
        Operands("the sums that the function takes"),
        NOTHING,
        (*_PLACED, _FUNCTION),
    ),
    Op(
        OpName.MERGE,
        "Make one output of the step from its values on the micro-batches: `kind` is mean (weighted by samples), sum, "
        "concat, or first (all values are equal). With `check`, the step fails if the output is not finite.",
        Operands(
            "for each replica and micro-batch, the output and its share of the samples; or the loss head's output"
        ),
        Operands("the output", 1),
        (Attribute("kind", "str"), _CHECK),
    ),
    Op(
        OpName.MERGE_MINIBATCHES,
        "Make one output of a window from its values on the minibatches: `kind` is mean, sum, concat, first (all "
        "values are equal) or stack (along a new axis 0).",
        Operands("the output of each minibatch"),
        Operands("the output", 1),
        (Attribute("kind", "str"),),
    ),
    Op(
        OpName.BARRIER,
        "Wait for all gradients, the loss and the merged state: no variable changes before they are computed.",
        NOTHING,
        Operands("none; on a rank, a token"),
        (_RANKS,),
    ),
    _call(
        OpName.UPDATE_TERMS,
        "Call the function that computes terms from a stage's gradients, which the optimizer needs before it can "
        "update any stage: whether the gradients are finite, or the sum of their squares.",
        _PLACED,
        inputs=Operands("the gradients that the function takes"),
    ),
    _call(
        OpName.COMBINE_TERMS,
        "Call the function that combines the terms of all stages, for example into a condition of the update.",
        (),
        inputs=Operands("the terms"),
    ),
    Op(
        OpName.SET_UPDATING,
        "Record whether variables are being written, so that the error of a failed step can say whether variables have "
        "changed.",
        NOTHING,
        NOTHING,
        (Attribute("updating", "bool"),),
    ),
    Op(
        OpName.COUNT_UPDATE,
        "Set a stage's copy of the step counter, which the stage's next update reads, to the counter's value plus "
        "`offset`. Without a stage, add `offset` to the counter itself.",
        NOTHING,
        NOTHING,
        (
            Attribute("stage", "int", required=False),
            Attribute("replica", "int", required=False),
            Attribute("variable", "str"),
            Attribute("offset", "int"),
        ),
    ),
    Op(
        OpName.UPDATE,
        "Call the optimizer's update of a stage's variables; without a place, of the variables that the stages share.",
        Operands("the gradients that the function takes, the combined terms, and outputs of the step"),
        Operands("what the step returns of what the function computes"),
        (Attribute("stage", "int", required=False), Attribute("replica", "int", required=False), _FUNCTION),
    ),
    Op(
        OpName.REFRESH,
        "Set a replica's copies of variables, before the replica's first call, to the values that their owners keep; "
        "copies of the variables in `summed` are set to 0.",
        Operands("values of the first variables, where their owner is another rank; the others are read"),
        NOTHING,
        (*_PLACED, _VARIABLES, _SUMMED),
    ),
    Op(
        OpName.STORE_VERSION,
        "Store the weights that a stage has now on a replica, in the slot `version`, for later calls.",
        NOTHING,
        NOTHING,
        (*_PLACED, _VARIABLES, Attribute("version", "int")),
    ),
    Op(
        OpName.COMMIT,
        "Store at their owner the values that forward wrote to copies (batch norm, counters). Over the replicas, the "
        "variables of `summed` are added and other floats are averaged; of all others, replica 0 has the value.",
        Operands("the values, where replicas are ranks; else none: the copies are read"),
        NOTHING,
        (*_PLACED, _VARIABLES, _REPLICAS, _SUMMED),
    ),
    Op(
        OpName.READ_VARIABLE,
        "Read variables at their owner, to send them to other ranks.",
        NOTHING,
        Operands("the values of `variables`", "variables"),
        (*_PLACED, _VARIABLES),
    ),
    Op(
        OpName.READ_STATE,
        "Read a replica's copies of the variables that forward wrote.",
        NOTHING,
        Operands("the values of `variables`", "variables"),
        (*_PLACED, _VARIABLES),
    ),
    Op(
        OpName.MERGE_STATE,
        "Merge the values that the forwards on all ranks of a stage wrote, by the rules of `commit`.",
        Operands("the values of every replica; on a rank, of its own replica"),
        Operands("the merged values"),
        (*_PLACED, _VARIABLES, _REPLICAS, _RANKS, _SUMMED),
    ),
    Op(
        OpName.EXCHANGE,
        "Send tensors to other ranks and receive tensors from them.",
        Operands("the tensors to send; `to` has the receiver of each", "to"),
        Operands("the tensors received (`source` has the sender of each), then a token"),
        (
            Attribute("dtypes", "tuple[str, ...]"),
            Attribute("header", "bool"),
            Attribute("micro_batch", "int", required=False),
            Attribute("ranks", "tuple[int, ...]"),
            Attribute("source", "tuple[int, ...]"),
            Attribute("to", "tuple[int, ...]"),
        ),
    ),
    Op(
        OpName.COLLECT_TOKENS,
        "Add the tokens of exchanges, sums and barriers, so that TensorFlow leaves out none that other ranks wait for. "
        "Hang detection watches the step until this node has run; `guarded` is false where exchanges of a later phase "
        "follow, so that only the last such node of the step ends it.",
        Operands("the tokens"),
        Operands("a token", 1, ("int64",)),
        (Attribute("guarded", "bool", required=False),),
    ),
    Op(
        OpName.FOLLOW,
        "Wait for nodes of earlier phases of the step: `after` has their names, such as `phase1/stage0/update`.",
        NOTHING,
        NOTHING,
        (Attribute("after", "tuple[str, ...]"),),
    ),
    Op(
        OpName.TIMESTAMP,
        "The time now, in seconds.",
        NOTHING,
        Operands("the time", 1, ("float64",)),
        tuple(Attribute(name, "int", required=False) for name in _PLACE_NAMES),
    ),
    Op(
        OpName.STACK_TIMESTAMPS,
        "Make one tensor of all time stamps.",
        Operands("the time stamps"),
        Operands("the tensor", 1, ("float64",)),
    ),
)

OPS: Mapping[str, Op] = MappingProxyType({op.name.value: op for op in _TABLE})
"""Every call-level op by name."""

CALL_OPS: frozenset[OpName] = frozenset(op.name for op in _TABLE if op.attribute("function"))
"""The ops whose nodes call a function of the graph."""


def ops_table_markdown() -> str:
    """Return the op table as a Markdown table, an op a row; optional attributes are in brackets."""
    rows = ["| Op | Meaning | Inputs | Outputs | Attributes | Place |", "| --- | --- | --- | --- | --- | --- |"]
    for op in OPS.values():
        others = [attribute for attribute in op.attributes if attribute not in op.place]
        cells = (
            f"`{op.name}`",
            op.meaning,
            _print_operands(op.inputs),
            _print_operands(op.outputs),
            ", ".join(_print_attribute(attribute, f"`{attribute.name}`: {attribute.type}") for attribute in others),
            ", ".join(_print_attribute(attribute, attribute.name) for attribute in op.place),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _print_operands(operands: Operands) -> str:
    if not operands.dtypes:
        return operands.meaning
    first = "" if operands.count == len(operands.dtypes) else "the first: "
    return f"{operands.meaning} ({first}{', '.join(operands.dtypes)})"


def _print_attribute(attribute: Attribute, text: str) -> str:
    return text if attribute.required else f"[{text}]"
