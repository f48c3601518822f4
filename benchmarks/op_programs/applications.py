"""Apply an op to the tensors of a random program: by hand where its operands must fit together, else as defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from benchmarks.op_programs.sources import SEED, Make, Pool
from dapple_tf import internals

RAW = tf.raw_ops
_TYPES = (tf.float64, tf.float32, tf.int32, tf.bool, tf.complex128, tf.string)


def apply_op(op: str, pool: Pool) -> Any:
    """Return the results of an op, applied to drawn operands.

    Raises ValueError or TypeError for operands that do not fit together, and for an op of which it is not known.
    """
    return BY_HAND[op](pool) if op in BY_HAND else _apply_by_definition(op, pool)


def _apply_by_definition(op: str, pool: Pool) -> Any:
    definition = internals.op_definition(op)
    types: dict[str, tf.DType] = {}
    attributes: dict[str, Any] = {}
    for attr in definition.attr:
        if attr.type == "type":
            allowed = [tf.as_dtype(number) for number in attr.allowed_values.list.type] or list(_TYPES)
            usable = [dtype for dtype in _TYPES if dtype in allowed]
            if not usable:
                raise TypeError(f"{op}: no source has a type of {attr.name}")
            types[attr.name] = pool.choices.of(usable[:1] * 3 + usable)
        elif attr.type == "bool":
            attributes[attr.name] = bool(pool.choices.number(2))
        elif attr.type == "int" and attr.name == "N":
            continue
        elif not attr.HasField("default_value"):
            raise TypeError(f"{op}: no value is known for {attr.name}")
    operands: dict[str, Any] = {}
    for argument in definition.input_arg:
        dtype = types[argument.type_attr] if argument.type_attr else tf.as_dtype(argument.type)
        count = 2 if argument.number_attr else 1
        values = [pool.of_type(dtype) for _ in range(count)]
        operands[argument.name] = values if argument.number_attr else values[0]
    given = {argument.type_attr for argument in definition.input_arg}
    named = {name: dtype for name, dtype in types.items() if name not in given}
    return getattr(RAW, op)(**operands, **attributes, **named)


def _axis(pool: Pool, value: Any) -> int:
    rank = value.shape.rank
    if not rank:
        raise ValueError("a scalar has no axis")
    return pool.choices.number(rank) - (rank if pool.choices.number(2) else 0)


def _real_of_spectrum(spectrum: Any) -> Any:
    if spectrum.shape[-1] == 1:
        raise ValueError("TensorFlow ends the process for an inverse FFT of no numbers")
    return tf.signal.irfft(spectrum)


def _axes(pool: Pool, value: Any) -> list[int]:
    first = _axis(pool, value)
    rank = value.shape.rank
    return [first] if pool.choices.number(2) else sorted({first % rank, _axis(pool, value) % rank})


def _reduce(op: str, source: Callable[[Pool], Any] = Pool.floats) -> Make:
    def apply(pool: Pool) -> Any:
        value = source(pool)
        return getattr(RAW, op)(input=value, axis=_axes(pool, value), keep_dims=bool(pool.choices.number(2)))

    return apply


def _along(op: str, argument: str) -> Make:
    def apply(pool: Pool) -> Any:
        value = pool.floats()
        return getattr(RAW, op)(**{argument: value}, **{"dimension" if "Arg" in op else "axis": _axis(pool, value)})

    return apply


def _images(pool: Pool) -> Any:
    """Return images [N, 4, 3, 2] of any layout."""
    value = pool.choices.of(
        (
            lambda: pool.x[:, :24] * pool.w,
            lambda: tf.concat([pool.x * pool.w, pool.x], 0),
            lambda: tf.repeat(pool.x * pool.w, 2, axis=0),
            lambda: pool.x * pool.w,
            lambda: tf.reduce_sum(pool.x, 0, keepdims=True),
        )
    )()
    result = tf.reshape(value, [-1, 4, 3, 2])
    return pool.choices.of((lambda v: v, lambda v: v, lambda v: tf.transpose(v, [1, 0, 2, 3])))(result)


def _vary(function: Callable[..., Any], *others: Any) -> Make:
    """Apply a function to images and one of the tuples of further operands."""
    return lambda pool: function(_images(pool), *pool.choices.of(others or ((),)))


def _kernel(pool: Pool, *shape: int) -> Any:
    return tf.reshape(tf.tile(pool.w, [4])[: _size(shape)], shape)


def _size(shape: tuple[int, ...]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


def _matrices(pool: Pool) -> Any:
    """Return matrices [..., 3, 3] that can be inverted."""
    value = pool.choices.of(
        (
            lambda: tf.reshape((pool.x * pool.w)[:, :9], [-1, 3, 3]),
            lambda: tf.reshape((pool.x * pool.w)[:, :18], [-1, 2, 3, 3]),
            lambda: tf.transpose(tf.reshape((pool.x * pool.w)[:, :18], [-1, 2, 3, 3]), [1, 0, 2, 3]),
            lambda: tf.reshape(pool.w[:9], [3, 3]),
            lambda: tf.reshape(tf.concat([pool.x, pool.x * pool.w], 0)[:, :9], [-1, 3, 3]),
            lambda: tf.transpose(tf.reshape((pool.x * pool.w)[:, :9], [-1, 3, 3]), [1, 0, 2]),
        )
    )()
    return value * 0.1 + tf.eye(3, dtype=tf.float64)


def _symmetric(pool: Pool) -> Any:
    value = _matrices(pool)
    return value @ tf.linalg.matrix_transpose(value)


def _index(pool: Pool) -> Any:
    """Return positions on axes of two or more entries."""
    return pool.choices.of(
        (
            lambda: pool.ids % 2,
            lambda: pool.ids[:, None] % 2,
            lambda: tf.range(pool.size),
            lambda: tf.constant([1, 0, 1]),
            lambda: tf.constant(1),
            lambda: tf.stack([pool.ids, 1 - pool.ids], 1) % 2,
            lambda: tf.broadcast_to([[1, 0]], tf.stack([pool.size, 2])),
            lambda: tf.range(2 * pool.size),
            lambda: tf.reduce_max(pool.ids) % 2,
            lambda: tf.transpose(tf.stack([pool.ids, pool.ids], 1)) % 2,
            lambda: pool.size - 1,
        )
    )()


def _gather(pool: Pool) -> Any:
    value, index = pool.fitting(pool.choices.of((2, 3, 4))), _index(pool)
    if pool.choices.number(3) == 0:
        count = pool.choices.number(2) + 1
        return tf.gather(value, index, batch_dims=count)
    return tf.gather(value, index, axis=_axis(pool, value))


def _slice(pool: Pool) -> Any:
    value = pool.floats()
    axis = _axis(pool, value) % value.shape.rank
    items = (slice(1, None), slice(None, -1), 0, slice(None, None, 2), slice(None, None, -1), slice(0, 2), -1)
    more = (slice(None, pool.size), slice(pool.size, None), slice(pool.size // 2, None), pool.size - 1, None, ...)
    item = pool.choices.of((*items, *more))
    return value[(slice(None),) * axis + (item,)]


def _raw_slice(pool: Pool) -> Any:
    value = pool.floats()
    rank = value.shape.rank
    begin = [0] * rank
    count = [-1] * rank
    axis = _axis(pool, value) % rank
    begin[axis], count[axis] = pool.choices.of(((1, -1), (0, 2), (0, 1), (0, pool.size), (1, 1)))
    return tf.slice(value, begin, tf.stack(count))


def _split(pool: Pool) -> Any:
    value = pool.floats()
    return tf.split(value, pool.choices.of((2, [1, 2], [1, -1], 3)), _axis(pool, value))


def _shapes(pool: Pool) -> Any:
    return pool.choices.of(
        (
            lambda: tf.stack([pool.size, 4]),
            lambda: tf.stack([3, pool.size, 4]),
            lambda: tf.stack([pool.size]),
            lambda: tf.shape(pool.rows()),
            lambda: tf.constant([3, 4]),
            lambda: tf.stack([2 * pool.size, 4]),
            lambda: tf.shape(pool.x[1:, :4]),
            lambda: tf.broadcast_dynamic_shape(tf.shape(pool.plain(2)), tf.constant([2, 1, 4])),
            lambda: tf.stack([pool.size, pool.size]),
        )
    )()


def _reshape(pool: Pool) -> Any:
    value = pool.floats()
    size = pool.size
    by_size = (tf.stack([size, -1]), tf.stack([-1, size]), tf.stack([2, size, -1]), tf.stack([size, 2, -1]))
    fixed = ([-1], [-1, 4], [-1, 2], [-1, 2, 2], [2, -1], [4, -1], [-1, 3])
    return tf.reshape(value, pool.choices.of((*fixed, *by_size, tf.shape(pool.plain(2)))))


def _transpose(pool: Pool) -> Any:
    value = pool.floats()
    order = [*range(value.shape.rank)]
    pick = pool.choices.number(len(order) or 1)
    return tf.transpose(value, pool.choices.of((order[pick:] + order[:pick], order[::-1])))


def _same(pool: Pool, count: int = 2) -> list[Any]:
    """Return tensors that are likely to have the same shape."""
    rank = pool.choices.of((2, 1, 3))
    return [pool.fitting(rank) for _ in range(count)]


def _segments(op: str) -> Make:
    def apply(pool: Pool) -> Any:
        data = pool.floats()
        labels = pool.choices.of((lambda: pool.ids, pool.ints, lambda: tf.range(pool.size)))()
        count = pool.choices.of((4, 7, pool.size))
        return getattr(RAW, op)(data=data, segment_ids=labels, num_segments=count)

    return apply


def _indices(pool: Pool) -> Any:
    return pool.choices.of(
        (
            lambda: tf.range(pool.size)[:, None],
            lambda: tf.stack([tf.range(pool.size), pool.ids], 1),
            lambda: pool.ids[:, None],
            lambda: tf.constant([[0], [2]]),
            lambda: tf.stack([pool.ids, pool.ids], 1),
            lambda: tf.cast(tf.where(pool.ids > 0), tf.int32),
            lambda: tf.constant([[0, 1], [1, 2]]),
        )
    )()


def _scatter(op: str) -> Make:
    def apply(pool: Pool) -> Any:
        index, updates = _indices(pool), pool.choices.of((pool.fitting(2), pool.fitting(1), pool.floats()))
        if op == "ScatterNd":
            return tf.scatter_nd(index, updates, _shapes(pool))
        return getattr(RAW, op)(tensor=pool.fitting(2), indices=index, updates=updates)

    return apply


_EQUATIONS = (
    *("ij,jk->ik", "ij,ij->i", "ij,kj->ik", "bij,bjk->bik", "bij,jk->bik", "i,ij->j", "ij,ij->", "...j,jk->...k"),
    *("bij,bkj->bik", "ij->ji", "ij,ik->jk", "bi,bj->bij", "bij->bj", "ibd,jbd->ijb", "ij,i->ij", "bii->bi"),
)


def _einsum(pool: Pool) -> Any:
    equation = pool.choices.of(_EQUATIONS)
    return tf.einsum(
        equation, *(pool.fitting(len(term.replace("...", ""))) for term in equation.split("->")[0].split(","))
    )


def _matmul(op: str) -> Make:
    def apply(pool: Pool) -> Any:
        rank = 2 if op == "MatMul" else pool.choices.of((3, 4, 2))
        others = (lambda: pool.rows(rank), lambda: pool.plain(rank), lambda: tf.reshape(pool.w[:16], [4, 4]))
        first, second = pool.fitting(rank), pool.choices.of((*others, lambda: pool.floats(rank)))()
        flips = ("transpose_a", "transpose_b") if op == "MatMul" else ("adj_x", "adj_y")
        names = ("a", "b") if op == "MatMul" else ("x", "y")
        arguments = {flip: bool(pool.choices.number(2)) for flip in flips}
        return getattr(RAW, op)(**dict(zip(names, (first, second), strict=True)), **arguments)

    return apply


def _draw(function: Callable[..., Any], *parameters: Any) -> Make:
    return lambda pool: function(_shapes(pool), SEED, *pool.choices.of(parameters or ((),)), dtype=tf.float64)


def _one_hot(pool: Pool) -> Any:
    depth = pool.choices.of((4, 4, 3, pool.size))
    return tf.one_hot(pool.ints(), depth, axis=pool.choices.of((-1, 0, 1)), dtype=tf.float64)


def _tile(pool: Pool) -> Any:
    value = pool.floats()
    times = [pool.choices.of((1, 2, 3)) for _ in range(value.shape.rank)]
    times[:1] = [pool.choices.of((*times[:1] * 2, pool.size))]
    return tf.tile(value, tf.stack(times))


def _pad(pool: Pool, **options: Any) -> Any:
    value = pool.floats()
    amounts = [[pool.choices.number(2), pool.choices.of((0, 1, 0))] for _ in range(value.shape.rank)]
    return tf.pad(value, amounts, **options)


def _select(pool: Pool) -> Any:
    condition = pool.choices.of((lambda: pool.plain(2) > 0, lambda: pool.ids > 1, lambda: tf.reduce_sum(pool.x) > 0))
    return RAW.Select(condition=condition(), x=pool.fitting(2), y=pool.fitting(2))


def _sparse(pool: Pool) -> tf.SparseTensor:
    return tf.sparse.from_dense(tf.nn.relu(pool.floats(2)))


def _ctc(pool: Pool) -> Any:
    labels = tf.sparse.from_dense(pool.ids[:, None] + 1)
    logits = tf.transpose(pool.plain(3), [1, 0, 2])
    lengths = tf.fill([pool.size], 3)
    return tf.nn.ctc_loss(labels, tf.cast(logits, tf.float32), None, lengths, blank_index=0)


def _labels(pool: Pool) -> Any:
    return pool.choices.of((lambda: pool.ids, lambda: tf.constant([0, 1]), lambda: pool.ids + 0))()


BY_HAND: Mapping[str, Make] = {
    **{op: _reduce(op) for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm")},
    **{op: _reduce(op, Pool.bools) for op in ("All", "Any")},
    **{op: _along(op, "input") for op in ("ArgMax", "ArgMin")},
    **{op: _along(op, "x") for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp")},
    **{
        op: _segments(op)
        for op in ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
    },
    **{op: _scatter(op) for op in ("ScatterNd", "TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub")},
    **{op: _matmul(op) for op in ("MatMul", "BatchMatMul", "BatchMatMulV2")},
    "Einsum": _einsum,
    "GatherV2": _gather,
    "Gather": lambda pool: RAW.Gather(params=pool.floats(), indices=_index(pool)),
    "GatherNd": lambda pool: tf.gather_nd(pool.fitting(2), _indices(pool), batch_dims=pool.choices.of((0, 0, 0, 1))),
    "ResourceGather": lambda pool: tf.gather(pool.w, _index(pool)),
    "StridedSlice": _slice,
    "Slice": _raw_slice,
    "Split": _split,
    "SplitV": _split,
    "Unpack": lambda pool: tf.unstack(value := pool.floats(), axis=_axis(pool, value)),
    "Pack": lambda pool: tf.stack(_same(pool), pool.choices.of((0, 1, -1))),
    "ConcatV2": lambda pool: tf.concat(_same(pool), pool.choices.of((0, 1, -1))),
    "Reshape": _reshape,
    "Squeeze": lambda pool: tf.squeeze(pool.floats(), pool.choices.of((None, None, [0], [1], [-1]))),
    "ExpandDims": lambda pool: tf.expand_dims(pool.floats(), pool.choices.of((0, 1, -1, 2, -2))),
    "Transpose": _transpose,
    "ConjugateTranspose": lambda pool: RAW.ConjugateTranspose(x=pool.floats(2), perm=[1, 0]),
    "Tile": _tile,
    "BroadcastTo": lambda pool: tf.broadcast_to(pool.floats(), _shapes(pool)),
    "BroadcastArgs": lambda pool: tf.broadcast_dynamic_shape(_shapes(pool), _shapes(pool)),
    "Fill": lambda pool: tf.fill(_shapes(pool), tf.reduce_sum(pool.choices.of((pool.w, pool.x, pool.x * pool.w)))),
    "Empty": lambda pool: RAW.Empty(shape=_shapes(pool), dtype=tf.float64, init=True),
    "Pad": _pad,
    "PadV2": lambda pool: _pad(pool, constant_values=1.5),
    "MirrorPad": lambda pool: _pad(pool, mode=pool.choices.of(("REFLECT", "SYMMETRIC"))),
    "ReverseV2": lambda pool: tf.reverse(value := pool.floats(), [_axis(pool, value)]),
    "Roll": lambda pool: tf.roll(value := pool.floats(), pool.choices.of((1, 2, pool.size)), _axis(pool, value)),
    "ReverseSequence": lambda pool: tf.reverse_sequence(
        pool.floats(),
        pool.choices.of((lambda: pool.ids, lambda: tf.constant([1, 2, 3]), lambda: tf.constant([1, 0, 2, 1])))(),
        *pool.choices.of(((1, 0), (0, 1), (2, 1), (1, 2), (2, 0))),
    ),
    "Range": lambda pool: tf.range(
        *pool.choices.of(((pool.size,), (0, 2 * pool.size), (1, pool.size), (0, pool.size, 2)))
    ),
    "Shape": lambda pool: tf.shape(pool.floats()),
    "Size": lambda pool: tf.size(pool.floats()),
    "Where": lambda pool: tf.where(pool.bools()),
    "OneHot": _one_hot,
    "Select": _select,
    "SelectV2": lambda pool: tf.where(pool.fitting(2) > 0.0, pool.fitting(2), pool.floats()),
    "ClipByValue": lambda pool: RAW.ClipByValue(
        t=pool.floats(), clip_value_min=-(pool.floats() ** 2), clip_value_max=1.0
    ),
    "AddN": lambda pool: tf.add_n(_same(pool)),
    "Cast": lambda pool: tf.cast(pool.floats(), pool.choices.of((tf.float32, tf.int32, tf.bool, tf.int64))),
    "Bitcast": lambda pool: tf.bitcast(tf.cast(pool.floats(), tf.float32), tf.int32),
    "Softmax": lambda pool: tf.nn.softmax(value := pool.floats(), axis=_axis(pool, value)),
    "LogSoftmax": lambda pool: tf.nn.log_softmax(value := pool.floats(), axis=_axis(pool, value)),
    "TopKV2": lambda pool: tf.math.top_k(pool.floats(), pool.choices.of((1, 2, pool.size))),
    "InTopKV2": lambda pool: tf.math.in_top_k(_labels(pool), tf.cast(pool.floats(2), tf.float32), 2),
    "NthElement": lambda pool: RAW.NthElement(input=pool.floats(), n=pool.choices.of((0, 1))),
    "SparseSoftmaxCrossEntropyWithLogits": lambda pool: tf.nn.sparse_softmax_cross_entropy_with_logits(
        _labels(pool), pool.floats(2)
    ),
    "SoftmaxCrossEntropyWithLogits": lambda pool: RAW.SoftmaxCrossEntropyWithLogits(
        features=pool.floats(2), labels=tf.nn.softmax(pool.floats(2))
    ),
    "BiasAdd": lambda pool: tf.nn.bias_add(pool.floats(), pool.choices.of((pool.w[:4], pool.w[:2], pool.w[:3]))),
    "Conv2D": lambda pool: tf.nn.conv2d(_images(pool), _kernel(pool, 2, 2, 2, 3), pool.choices.of((1, 2)), "SAME"),
    "Conv2DBackpropInput": lambda pool: tf.nn.conv2d_transpose(
        value := _images(pool), _kernel(pool, 2, 2, 3, 2), tf.stack([tf.shape(value)[0], 4, 3, 3]), 1, "SAME"
    ),
    "Conv3D": lambda pool: tf.nn.conv3d(_images(pool)[..., None], _kernel(pool, 2, 1, 2, 1, 3), [1] * 5, "SAME"),
    "DepthwiseConv2dNative": lambda pool: tf.nn.depthwise_conv2d(
        _images(pool), _kernel(pool, 2, 2, 2, 2), [1] * 4, "SAME"
    ),
    "Dilation2D": lambda pool: RAW.Dilation2D(
        input=_images(pool), filter=_kernel(pool, 2, 2, 2), strides=[1] * 4, rates=[1] * 4, padding="SAME"
    ),
    "AvgPool": _vary(lambda v: tf.nn.avg_pool2d(v, 2, 1, "SAME")),
    "MaxPool": _vary(lambda v: tf.nn.max_pool2d(v, 2, 2, "SAME")),
    "AvgPool3D": _vary(lambda v: tf.nn.avg_pool3d(v[..., None], 2, 1, "SAME")),
    "MaxPool3D": _vary(lambda v: tf.nn.max_pool3d(tf.cast(v, tf.float32)[..., None], 2, 1, "SAME")),
    "DepthToSpace": _vary(lambda v: tf.nn.depth_to_space(tf.concat([v, v], -1), 2)),
    "SpaceToDepth": _vary(lambda v: tf.nn.space_to_depth(tf.concat([v, v[:, :, :1]], 2), 2)),
    "ExtractImagePatches": _vary(lambda v: tf.image.extract_patches(v, [1, 2, 2, 1], [1, 1, 1, 1], [1] * 4, "SAME")),
    "ResizeBilinear": _vary(lambda v: tf.image.resize(v, [5, 5])),
    "ResizeBicubic": _vary(lambda v: tf.image.resize(v, [5, 5], "bicubic")),
    "ResizeArea": _vary(lambda v: tf.image.resize(v, [5, 5], "area")),
    "ResizeNearestNeighbor": _vary(lambda v: tf.image.resize(v, [5, 5], "nearest")),
    "LRN": _vary(lambda v: tf.nn.local_response_normalization(tf.cast(v, tf.float32))),
    "RGBToHSV": _vary(lambda v: tf.image.rgb_to_hsv(tf.nn.sigmoid(tf.concat([v, v], -1)[..., :3]))),
    "HSVToRGB": _vary(lambda v: tf.image.hsv_to_rgb(tf.nn.sigmoid(tf.concat([v, v], -1)[..., :3]))),
    "AdjustContrastv2": _vary(lambda v: tf.image.adjust_contrast(tf.cast(v, tf.float32), 1.5)),
    "AdjustHue": _vary(
        lambda v: tf.image.adjust_hue(tf.nn.sigmoid(tf.cast(tf.concat([v, v], -1)[..., :3], tf.float32)), 0.1)
    ),
    "AdjustSaturation": _vary(
        lambda v: tf.image.adjust_saturation(tf.nn.sigmoid(tf.cast(tf.concat([v, v], -1)[..., :3], tf.float32)), 0.7)
    ),
    "ImageProjectiveTransformV3": lambda pool: RAW.ImageProjectiveTransformV3(
        images=_images(pool),
        transforms=pool.choices.of(
            (tf.constant([[1.0, 0, 1, 0, 1, 0, 0, 0]]), tf.cast(pool.x[:, :8] * 0.1, tf.float32))
        ),
        output_shape=[4, 3],
        fill_value=0.0,
        interpolation="BILINEAR",
    ),
    "FusedBatchNormV3": lambda pool: tf.compat.v1.nn.fused_batch_norm(
        tf.cast(_images(pool), tf.float32), tf.ones(2), tf.zeros(2), tf.zeros(2), tf.ones(2), is_training=False
    ),
    "CropAndResize": lambda pool: tf.image.crop_and_resize(
        _images(pool),
        pool.choices.of((tf.cast(pool.x[:, :4], tf.float32), tf.zeros(tf.stack([pool.size, 4])))),
        pool.choices.of((tf.range(pool.size), pool.ids)),
        [2, 2],
    ),
    "SpaceToBatchND": _vary(lambda v: tf.space_to_batch(v, [2, 1], [[0, 0], [0, 0]])),
    "BatchToSpaceND": _vary(lambda v: tf.batch_to_space(v, [2, 1], [[0, 0], [0, 0]])),
    "Cholesky": lambda pool: tf.linalg.cholesky(_symmetric(pool)),
    "LogMatrixDeterminant": lambda pool: tf.linalg.slogdet(_matrices(pool)),
    "MatrixDeterminant": lambda pool: tf.linalg.det(_matrices(pool)),
    "MatrixInverse": lambda pool: tf.linalg.inv(_matrices(pool)),
    "MatrixSolve": lambda pool: tf.linalg.solve(_matrices(pool), _matrices(pool)),
    "MatrixTriangularSolve": lambda pool: tf.linalg.triangular_solve(_matrices(pool), _matrices(pool)),
    "MatrixExponential": lambda pool: tf.linalg.expm(_matrices(pool)),
    "MatrixBandPart": lambda pool: tf.linalg.band_part(pool.floats(), 1, pool.choices.of((0, -1))),
    "MatrixDiagV3": lambda pool: tf.linalg.diag(pool.floats(), k=pool.choices.of((0, 1))),
    "MatrixDiagPartV3": lambda pool: tf.linalg.diag_part(pool.floats(), k=pool.choices.of((0, 1))),
    "MatrixSetDiagV3": lambda pool: tf.linalg.set_diag(_matrices(pool), pool.choices.of((pool.x[:, :3], pool.w[:3]))),
    "Qr": lambda pool: tf.linalg.qr(_matrices(pool)),
    "SelfAdjointEigV2": lambda pool: tf.linalg.eigvalsh(_symmetric(pool)),
    "Svd": lambda pool: tf.linalg.svd(_matrices(pool), compute_uv=False),
    "FFT": lambda pool: tf.signal.fft(pool.of_type(tf.complex128)),
    "IFFT": lambda pool: tf.signal.ifft(pool.of_type(tf.complex128)),
    "RFFT": lambda pool: tf.signal.rfft(tf.cast(pool.floats(), tf.float32)),
    "IRFFT": lambda pool: _real_of_spectrum(pool.of_type(tf.complex64)),
    "FFT2D": lambda pool: tf.signal.fft2d(pool.of_type(tf.complex128)),
    "IFFT2D": lambda pool: tf.signal.ifft2d(pool.of_type(tf.complex128)),
    "DenseBincount": lambda pool: tf.math.bincount(
        pool.ids,
        pool.choices.of((None, pool.x[:, 0], pool.x[:, 1])),
        minlength=4,
        maxlength=4,
        dtype=tf.float64,
    ),
    "StatelessRandomNormalV2": _draw(tf.random.stateless_normal),
    "StatelessRandomUniformV2": _draw(tf.random.stateless_uniform),
    "StatelessTruncatedNormalV2": _draw(tf.random.stateless_truncated_normal),
    "StatelessRandomGammaV3": _draw(tf.random.stateless_gamma, (1.5,), ([1.0, 2.0, 3.0, 0.5],)),
    "StatelessRandomPoisson": lambda pool: tf.random.stateless_poisson(
        _shapes(pool), SEED, pool.choices.of((2.0, tf.constant([1.0, 2.0, 3.0, 0.5]))), dtype=tf.float64
    ),
    "SparseTensorDenseMatMul": lambda pool: tf.sparse.sparse_dense_matmul(
        _sparse(pool), tf.reshape(pool.w[:8], [4, 2])
    ),
    "SparseToDense": lambda pool: tf.sparse.to_dense(_sparse(pool)),
    "RaggedTensorToTensor": lambda pool: tf.RaggedTensor.from_tensor(
        pool.plain(2), lengths=tf.minimum(pool.ids + 1, 4)
    ).to_tensor(shape=[None, pool.choices.of((4, None))]),
    "CTCLossV2": _ctc,
    "L2Loss": lambda pool: tf.nn.l2_loss(pool.floats()),
    "PartitionedCall": lambda pool: tf.function(lambda a: tf.square(a) + tf.squeeze(a[:, None]))(pool.floats()),
    "StatelessIf": lambda pool: tf.cond(tf.reduce_sum(pool.x) > 0, lambda: pool.floats(), lambda: 2.0 * pool.plain(2)),
    "StatelessWhile": lambda pool: tf.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, v * 0.5 + v**2), (0, pool.floats())
    ),
}
"""Ops whose operands are made by hand."""
