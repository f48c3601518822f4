"""Classify every op of the installed TensorFlow: by which means the analysis decides how it treats samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.dependence.analyse import RULED
from dapple_tf.frontend.dependence.random import SEED_OPS, is_stateless_draw
from dapple_tf.frontend.read_graph import HIDDEN_DRAWS


class OpClass(Enum):
    """The way in which the analysis decides about an op whose operands depend on the batch."""

    RULED = "ruled"
    """A rule gives the kinds of its outputs."""
    COUPLES = "couples samples"
    """A result depends on several samples: exact where it is computed from the arguments alone, else refused."""
    MEANINGLESS = "without meaning in a loss"
    """It is not expected between the arguments of a loss and its value."""
    EXPERIMENT = "decided by experiment"
    """It has no rule: it is refused, unless an experiment finds rows, a sum or a mean."""


@dataclass(frozen=True)
class OpGroup:
    """Ops that are in a class for the same reason. ``names``: regular expressions of whole names."""

    op_class: OpClass
    reason: str
    names: str

    def matches(self, op: str) -> bool:
        """Return whether the op belongs to the group."""
        return any(re.fullmatch(pattern, op) for pattern in self.names.split())


_BY_RULE = "a rule of `dapple_tf/frontend/dependence` gives the kinds of its results"
_BY_SEED = "draws by a seed: each micro-batch draws its rows of the whole batch's draw"
_HIDDEN = "draws from a generator's hidden state: it is named in `step.exactness`"
_PRIVATE = "not in `tf.raw_ops`: only TensorFlow's own compilers, passes and tests make it"
_TRIED = "a function of its operands, which no rule describes"

GROUPS = (
    OpGroup(
        OpClass.RULED,
        "an effect: it runs in the order of the trace, once a step where its operands do not depend on samples",
        "Assign(Add|Sub)?VariableOp ResourceScatter.* ResourceStridedSliceAssign Assert Print(V2)? "
        "Py(Func|FuncStateless) EagerPyFunc Timestamp",
    ),
    OpGroup(
        OpClass.RULED,
        "reads a variable, or names one: the value is the same for all micro-batches",
        "VarHandleOp ResourceInitializedOp Placeholder.* FakeParam ImmutableConst GuaranteeConst",
    ),
    OpGroup(
        OpClass.COUPLES,
        "how many results it gives, and at which positions, depends on the values of all samples",
        "Unique.* ListDiff DynamicPartition (Ragged|Sparse)FillEmptyRows NonMaxSuppression.* "
        "CombinedNonMaxSuppression GenerateBoundingBoxProposals SparseSparse.* .*SetOperation SetSize "
        "Sparse(Add|Concat|Reorder|Reshape|Slice|Split|CrossV?2?|CrossHashed)(Grad)? RaggedCross .*SparseOutput "
        "Unicode(Decode|DecodeWithOffsets|Encode) StringSplit(V2)? StringNGrams CTC.*Decoder ComputeAccidentalHits "
        "Batch Unbatch(Grad)? BatchFunction",
    ),
    OpGroup(
        OpClass.COUPLES,
        "sorts, clusters, samples or counts over the whole of an operand",
        "HistogramFixedWidth KMC2ChainInitialization KmeansPlusPlusInitialization NearestNeighbors "
        "IsotonicRegression .*CandidateSampler Skipgram GenerateVocabRemapping",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "of XLA and TPUs: TensorFlow makes it while it compiles a graph",
        "Xla.* .*TPU.* GetMinibatch.* ConvertTo.*Coo.* .*OfSparseCore.*",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "makes, feeds or reads a data set",
        ".*Dataset.* .*Iterator.* .*Options? OptionalFromValue Optional.* .*StatsAggregator.* "
        "(Unc|C)ompressElement ComputeBatchSize GetElementAtIndex DatasetFingerprint .*MemoryCache .*SeedGenerator "
        "(Experimental)?ThreadPoolHandle CheckPinned DummyIterationCounter .*CompositeTensorVariant.*",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "reads or writes files",
        "(Read|Write)File MatchingFiles .*Reader.* (Save|Restore).* MergeV2Checkpoints Sharded(Filename|Filespec) "
        "LoadAndRemapMatrix InitializeTable.* DistributedSave RecordInput FileSystemSetConfiguration "
        "ReadVariableXlaSplitND AssignVariableXlaConcatND",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "reads examples from bytes, or writes them: a data set does that before the loss",
        "(Decode|Encode)(?!Base64).* Parse.* Serialize.* Deserialize.* ExtractJpegShape .*Wav .*Summary.* "
        "ImportEvent AudioSpectrogram Mfcc AudioMicrofrontend Fingerprint",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "moves tensors between devices, processes, and steps",
        "Collective.* Nccl.* .*(Send|Recv) CrossReplicaSum AllToAll RemoteCall .*Queue.* Barrier.* (Un)?[sS]tage.* "
        "(Ordered)?Map(Clear|IncompleteSize|Peek|Size|Stage|Unstage|UnstageNoKey) Rpc.* DeleteRpcFutureResource "
        ".*Session(Handle|Handle?V2|Tensor) (Infeed|Outfeed).* Prelinearize.* Copy(Host)? CopyToMesh.* Relayout.* "
        "Worker.* Mutex.* ConsumeMutexLock SyncDevice DeviceIndex GlobalIterId AddSparseToTensorsMap "
        "AddManySparseToTensorsMap TakeManySparseFromTensorsMap .*Stack(V2)? Stack(Close|Pop|Push)(V2)?",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "updates weights: an optimizer's op, or one of TensorFlow 1's reference variables",
        "(Resource)?(Sparse)?Apply.* (Resource)?.*Accumulator.* Scatter(Add|Sub|Mul|Div|Min|Max|Update) "
        "ScatterNd(Add|Sub|Min|Max|Update) Assign(Add|Sub)? StridedSliceAssign Variable(V2)? TemporaryVariable "
        "(Resource)?CountUpTo DestroyTemporaryVariable DestroyResourceOp IsVariableInitialized Ref.* "
        "DisableCopyOnRead NegTrain Sdca.* BoostedTrees.* IsBoostedTrees.* StoreMinibatchStatisticsInFdo",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "control flow, arrays and loops of TensorFlow 1, which a tf.function does not make",
        "Switch Merge (Ref)?(Enter|Exit|NextIteration) LoopCond ControlTrigger NoOp Abort TensorArray.* For "
        "MapDefun SymbolicGradient",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "fills, reads or keeps a table: only lookups in a table are part of a loss",
        ".*HashTable.* LookupTable.* .*DenseHashTable.* (Empty)?TensorMap.*",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "a kernel of quantized inference: it is not trained, and its ranges are of the whole tensor",
        "Quantized.* Quantize(V2|DownAndShrinkRange) Dequantize Requant.* UniformQuantize.* UniformDequantize "
        "UniformRequantize",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "watches a run: debugging and statistics",
        "Debug.*",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "a layer of a GPU library that hides its weights and its dropout: Keras's own layers have rules",
        "CudnnRNN.*",
    ),
    OpGroup(
        OpClass.MEANINGLESS,
        "draws from, makes or moves the state of a generator, which has no rows for micro-batches",
        "Stateful.* Rng.* NonDeterministicInts Random(Crop|Poisson) SampleDistortedBoundingBox(V2)?",
    ),
)


def classify_op(op: str) -> tuple[OpClass, str] | None:
    """Return the class of an op of the installed TensorFlow, and the reason; None where it is in none."""
    if op in RULED:
        return OpClass.RULED, _BY_RULE
    if is_stateless_draw(op) or op in SEED_OPS:
        return OpClass.RULED, _BY_SEED
    if op in HIDDEN_DRAWS:
        return OpClass.RULED, _HIDDEN
    for group in GROUPS:
        if group.matches(op):
            return group.op_class, group.reason
    if not hasattr(tf.raw_ops, op):
        return OpClass.MEANINGLESS, _PRIVATE
    return None if internals.is_stateful_op(op) else (OpClass.EXPERIMENT, _TRIED)


def census() -> Mapping[tuple[OpClass, str], tuple[str, ...]]:
    """Return the ops of the installed TensorFlow by class and reason, in the order of the classes.

    Raises KeyError, with its name, for an op that is in no class.
    """
    found: dict[tuple[OpClass, str], list[str]] = {}
    for op in internals.op_names():
        entry = classify_op(op)
        if entry is None:
            raise KeyError(f"TensorFlow's op {op} is in no class of {__name__}: give it a group, or a rule")
        found.setdefault(entry, []).append(op)
    order = list(OpClass)
    return {key: tuple(sorted(found[key])) for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))}


def census_markdown() -> str:
    """Return the census as a Markdown table: class, reason, number of ops, and their names."""
    lines = ["| class | why | ops | |", "|---|---|---|---|"]
    for (op_class, reason), names in census().items():
        listed = ", ".join(names) if op_class is not OpClass.MEANINGLESS else ", ".join([*names[:8], "..."])
        lines.append(f"| {op_class.value} | {reason} | {len(names)} | {listed} |")
    return "\n".join(lines)
