"""Models larger than a process: what each rank holds of a model that is made in ``dapple.scope()``.

The dense model is that of the memory table: 24 layers of 2048 x 2048 with Adam, on four ranks. The GPT has at least 450
million parameters (7 GB of weights, gradients and slots with Adam); each of its ranks runs under a limit on its data
(RLIMIT_DATA) that one process could not keep. It is saved after three steps, and jobs of two and of three ranks go on
from there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import Row, median, print_on_rank_0, run_on_cores, run_ranks, time_interleaved
from benchmarks.needs import find_missing_for_ranks

LAYERS, WIDTH, RANKS = 24, 2048, 4
GPT = {"layers": 8, "width": 2176, "heads": 17, "context": 32, "batch_size": 4}
GPT_PARAMETERS = 12 * GPT["layers"] * GPT["width"] ** 2
NARROW = {
    "layers": 8,
    "width": 64,
    "heads": 4,
    "context": 16,
    "dropout": 0.0,
    "tied": False,
    "dtype": "float64",
    "seed": 0,
}
SAVED, STEPS = 3, 5  # a checkpoint is saved after three of five steps
LIMITS = {4: 3 * 10**9, 3: 4 * 10**9, 2: 5 * 10**9}  # bytes of data of each process, by the number of ranks
LARGEST = 4 * WIDTH**2  # bytes of a variable
# The resident set follows what is held: see the guide to memory.
_RETURNED = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
}


def run() -> Iterator[Row]:
    """Yield the rows of the dense model, of the GPT, and of the profiles of the papers' sizes."""
    if (missing := find_missing_for_ranks()) is not None:
        yield Row("ranks", "run", missing, False)
        return
    yield from compare_peaks()
    yield from train_gpt()
    yield from save_and_load()
    yield from share_slots()
    yield from profile_large_models()


def compare_peaks() -> Iterator[Row]:
    """Yield the resident set of the ranks of the dense model at its peak, and after the first step."""
    found = {way: run_ranks("benchmarks.large", RANKS, "dense", way, variables=_RETURNED) for way in ("scope", "plain")}
    for rank, (scope, plain) in enumerate(zip(found["scope"], found["plain"], strict=True)):
        predicted = scope["predicted"]
        for when, field, factor in (("at its peak", "peak", 1.25), ("after four steps", "after", 1.1)):
            most = scope["start"] + factor * predicted
            yield Row(
                f"dense, rank {rank}: resident set {when}, its stage predicted at {_mb(predicted)}",
                f"at most {_mb(most)}: {_mb(scope['start'])} before the model + {factor} x predicted",
                f"{_mb(scope[field])} (made outside of the scope: {_mb(plain[field])})",
                scope[field] <= most,
            )
    same = found["scope"][0]["losses"] == found["plain"][0]["losses"]
    yield Row("dense: losses of both", "equal", "equal" if same else "differ", same)
    builds = [max(each["build"] for each in found[way]) for way in ("scope", "plain")]
    yield Row(
        "dense: first step in the scope over outside of it",
        "at most 105%",
        f"{builds[0] / builds[1]:.0%} ({builds[0]:.1f} s, {builds[1]:.1f} s)",
        builds[0] <= 1.05 * builds[1],
    )


def train_gpt() -> Iterator[Row]:
    """Yield the rows of the GPT: trained by limited ranks, resumed by others, refused in one limited process."""
    with tempfile.TemporaryDirectory() as folder:
        first = _train_limited(RANKS, folder)
        yield Row(
            f"gpt of {GPT_PARAMETERS / 1e6:.0f} M parameters, {RANKS} ranks of {_gb(LIMITS[RANKS])}: {STEPS} steps, "
            f"saved after {SAVED}",
            "runs",
            f"losses {_listed(first['losses'])}; {_memory(first)}; {first['seconds']:.0f} s",
            len(first["losses"]) == STEPS,
        )
        for ranks in (3, 2):
            resumed = _train_limited(ranks, folder)
            yield Row(
                f"gpt: goes on as {ranks} ranks of {_gb(LIMITS[ranks])}",
                f"the losses of the job that was not interrupted: {_listed(first['losses'][SAVED:])}",
                f"{_listed(resumed['losses'])}; {_memory(resumed)}; {resumed['seconds']:.0f} s",
                all(map(_close, resumed["losses"], first["losses"][SAVED:])),
            )
    try:
        run_on_cores("benchmarks.large", [0, 1], "gpt", "", str(LIMITS[RANKS]), timeout=3000)
        text = "trains"
    except RuntimeError as error:
        text = str(error).strip().splitlines()[-1]
    yield Row("gpt: one process with the same limit", "NoFitError before it allocates", text, "NoFitError" in text)
    ranks = run_ranks("benchmarks.large", RANKS, "narrow", "ranks", variables=_RETURNED)
    alone = run_on_cores("benchmarks.large", [0, 1], "narrow", "alone")
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(ranks["losses"], alone["losses"], strict=True))
    yield Row(
        f"gpt of width {NARROW['width']} in float64, {RANKS} ranks: three steps against one device without dapple",
        "initial values bit for bit; losses within 1e-12",
        f"{'equal' if ranks['values'] == alone['values'] else 'DIFFERENT'} values, losses within {worst:.1e}",
        ranks["values"] == alone["values"] and worst <= 1e-12,
    )


def _train_limited(ranks: int, folder: str) -> Any:
    begin = time.perf_counter()
    arguments = ("gpt", folder, str(LIMITS[ranks]))
    found = run_ranks("benchmarks.large", ranks, *arguments, variables=_RETURNED, timeout=3000)
    return {**found, "seconds": time.perf_counter() - begin}


def _memory(found: Mapping[str, float]) -> str:
    return f"at most {_mb(found['peak'])} resident, its stage predicted at {_mb(found['predicted'])}"


def _close(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-5 * abs(second)


def save_and_load() -> Iterator[Row]:
    """Yield for each way to save or load the model of a job how far its ranks went above what they held before."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks("benchmarks.large", 2, "files", folder, variables=_RETURNED, timeout=1200)
    for way in found[0]["above"]:
        above = [of_rank["above"][way] for of_rank in found]
        yield Row(
            f"dense of {found[0]['whole'] / 1e6:.0f} MB with slots on 2 ranks, {way}: most above what the rank holds",
            f"at most {_mb(3 * LARGEST)}: a variable three times, as plain Keras" if way != "gather" else "-",
            ", ".join(map(_mb, above)),
            way == "gather" or max(above) <= 3 * LARGEST,
        )


def share_slots() -> Iterator[Row]:
    """Yield what the ranks of two replicas hold of the optimizer's slots, and the time of a step, with and without."""
    found = run_ranks("benchmarks.large", 2, "shared", variables=_RETURNED, timeout=1200)
    shares = [of_rank["sharded"] / of_rank["whole"] for of_rank in found]
    yield Row(
        "dense on two replicas, shard_optimizer: slots that a rank holds, of all",
        "a half each",
        ", ".join(f"{share:.1%}" for share in shares),
        max(shares) <= 0.55,
    )
    ratio = median(found[0]["with"]) / median(found[0]["without"])
    yield Row(
        "dense on two replicas: step with shard_optimizer over one without",
        "within 5%",
        f"{ratio:.3f} ({1e3 * median(found[0]['with']):.0f} ms)",
        ratio <= 1.05,
    )


def profile_large_models() -> Iterator[Row]:
    """Yield the time and memory of the profiles of two models for a device that is not there."""
    for name, model, scale in (("GPT-2 1.3 B", "gpt2", "1.3b"), ("BERT-Large", "bert", "large")):
        found = run_on_cores("benchmarks.large", [0, 1], "profile", model, scale, timeout=1200)
        yield Row(
            f"profile of {name} for a V100 ({found['parameters'] / 1e6:.0f} M parameters)",
            "at most 60 s and 1.5 GB",
            f"{found['seconds']:.0f} s ({found['cpu_seconds']:.0f} s of CPU), {found['peak'] / 1e9:.2f} GB",
            found["seconds"] <= 60 and found["peak"] <= 1.5e9,
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def _gb(size: float) -> str:
    return f"{size / 1e9:g} GB"


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


# --- What the processes run


def _resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak) of this process in bytes."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def train_dense(way: str) -> Any:
    """Return the memory, the losses and the seconds of the first step of each rank."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple
    from dapple_tf.distributed import membership

    dapple.init()
    start = _resident("VmRSS")
    keras.utils.set_random_seed(1)
    with dapple.scope() if way == "scope" else contextlib.nullcontext():
        layers = [keras.layers.Dense(WIDTH, "relu", name=f"dense{i}") for i in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    cuts = [f"dense{i}" for i in range(LAYERS // RANKS, LAYERS, LAYERS // RANKS)]
    step = dapple.pipeline(
        lambda x, y: tf.reduce_mean((model(x) - y) ** 2),
        optimizer=keras.optimizers.Adam(),
        stages=cuts,
        micro_batches=4,
        schedule="dapple-a",
    )
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    begin = time.perf_counter()
    losses = [float(step(x, x))]
    build = time.perf_counter() - begin
    losses += [float(step(x, x)) for _ in range(3)]
    predicted = step.report.stages[dapple.rank()].predicted.peak
    own = {"start": start, "peak": _resident("VmHWM"), "after": _resident("VmRSS"), "predicted": predicted}
    job = membership.current()
    assert not job.is_alone
    return job.gather({**own, "losses": losses, "build": build})


def train_limited(folder: str, limit: int) -> Any:
    """Train the GPT under a limit on the data, from the checkpoint in ``folder`` or from the first step; then save one.

    Returns the losses, and of the ranks the largest peak of the resident set and the largest prediction of a stage.
    """
    import dapple_tf as dapple
    from dapple_tf.distributed import membership
    from dapple_tf.examples import gpt

    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    dapple.init(2)
    with dapple.scope():
        workload = gpt(**GPT)
    stages = max(2, dapple.size())
    step = dapple.pipeline(workload.loss_fn, optimizer=workload.optimizer, stages=stages, micro_batches=2)
    batches = iter(workload.dataset)
    step.build(*next(iter(workload.dataset)))
    checkpoints = dapple.Checkpoints(folder, step)
    done = checkpoints.restore().steps
    losses = []
    for number, batch in zip(range(1, STEPS + 1), batches, strict=False):
        if number > done:
            losses.append(float(step(*batch)))
        if number == SAVED > done:
            checkpoints.save(number)
    job = membership.current()
    assert not job.is_alone
    peaks = job.gather(_resident("VmHWM"))
    predicted = max(stage.predicted.peak for stage in step.report.stages)
    return {"losses": losses, "peak": max(peaks), "predicted": predicted}


def train_narrow(way: str) -> Any:
    """Return a digest of the initial values of a narrow GPT, and the losses of three steps on the same batch.

    ``way``: "alone" builds it eagerly and trains it on one device without a pipeline, any other by the ranks of a job.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple
    from dapple_tf.examples.gpt import build_gpt

    if way != "alone":
        dapple.init()
    with contextlib.nullcontext() if way == "alone" else dapple.scope():
        model, optimizer = build_gpt(**NARROW), keras.optimizers.Adam(1e-3)
    x = np.random.default_rng(0).integers(0, 256, (4, NARROW["context"])).astype("int32")

    def loss_fn(x: Any) -> Any:
        logits = model(x, training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=x, logits=logits))

    def train_step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(x)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    if way != "alone":
        step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=dapple.size(), micro_batches=2)
        step.build(x)
        step.gather()
        train_step = functools.partial(step, x)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest()
    return {"values": digest, "losses": [float(train_step()) for _ in range(3)]}


def profile_model(model: str, scale: str) -> dict[str, float]:
    """Return the seconds, the peak of the resident set and the parameters of an analytic profile."""
    import dapple_tf as dapple
    from dapple_tf import examples

    begin, begin_cpu = time.perf_counter(), time.process_time()
    dapple.init(1)
    with dapple.scope():
        workload = getattr(examples, model)(scale=scale, batch_size=4)
    found = dapple.analytic_profile(workload.loss_fn, next(iter(workload.dataset)), "V100")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
        "peak": float(_resident("VmHWM")),
        "parameters": sum(layer.parameter_bytes for layer in found.layers) / 4,
    }


def save_and_load_files(folder: str) -> Any:
    """Return of each rank, by the way to save or load, the bytes at its peak above those that it held before."""
    import keras
    import numpy as np

    import dapple_tf as dapple
    from dapple_tf.distributed import membership

    dapple.init()
    keras.utils.set_random_seed(1)
    with dapple.scope():
        layers = [keras.layers.Dense(WIDTH, "relu", name=f"dense{i}") for i in range(LAYERS // 2)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
    step = dapple.keras.pipeline(model, stages=2, micro_batches=4, example_batch=(x, x))
    model.train_on_batch(x, x)
    checkpoints = dapple.Checkpoints(f"{folder}/checkpoints", step)
    ways = {
        "save_weights": lambda: model.save_weights(f"{folder}/m.weights.h5"),
        "load_weights": lambda: model.load_weights(f"{folder}/m.weights.h5"),
        "save": lambda: model.save(f"{folder}/m.keras"),
        "load_weights of .keras": lambda: model.load_weights(f"{folder}/m.keras"),
        "Checkpoints.save": lambda: checkpoints.save(1),
        "Checkpoints.restore": lambda: checkpoints.restore(),
        "gather": step.gather,
    }
    above = {}
    for way, run_way in ways.items():
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is counted from now
        before = _resident("VmRSS")
        run_way()
        above[way] = _resident("VmHWM") - before
    job = membership.current()
    assert not job.is_alone
    return job.gather({"above": above, "whole": 3 * sum(w.shape.num_elements() * 4 for w in model.weights)})


def share_optimizer() -> Any:
    """Return of each rank the bytes of the slots that it holds with and without sharding, and seconds of steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dapple_tf as dapple
    from dapple_tf import variable_values
    from dapple_tf.distributed import membership

    dapple.init()
    x = np.random.default_rng(0).normal(size=(256, WIDTH // 2)).astype("float32")
    steps, slots = {}, {}
    for way, sharded in (("without", False), ("with", True)):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(WIDTH // 2, "relu") for _ in range(LAYERS // 2)]
        model = keras.Sequential([keras.Input((WIDTH // 2,)), *layers])
        optimizer = keras.optimizers.Adam()
        options = {"stages": 1, "replicas": [2], "micro_batches": 4, "shard_optimizer": sharded}
        step = dapple.pipeline(
            lambda x, y, model=model: tf.reduce_mean((model(x) - y) ** 2), optimizer=optimizer, **options
        )
        step(x, x)
        steps[way] = lambda step=step: step(x, x)
        slots[way] = sum(
            variable_values.variable_bytes(v.value) for v in optimizer.variables if v.value.is_initialized()
        )
    seconds = time_interleaved(steps, 20)
    job = membership.current()
    assert not job.is_alone
    return job.gather({"whole": slots["without"], "sharded": slots["with"], **seconds})


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "gpt":
        result = train_limited(arguments[0], int(arguments[1]))
    else:
        kinds = {
            "dense": train_dense,
            "files": save_and_load_files,
            "shared": share_optimizer,
            "narrow": train_narrow,
            "profile": profile_model,
        }
        result = kinds[kind](*arguments)
    print_on_rank_0(result)
