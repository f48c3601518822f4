"""graph.txt files of PipeDream and DAPPLE: their format, refused files, and the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.importers import read_graph_file, read_profile
from dapple_tf.profiler.profile import LayerCost, Profile
from tests.paths import SHARED_PROFILES
from tests.profiler.builders import make_layer, make_profile
from tests.quick import at_most


def node(number: int, name: str = "", time: str = "1", sizes: str = "8", parameters: str = "16") -> str:
    return (
        f"node{number} -- {name or f'l{number}'} -- forward_compute_time={time}, backward_compute_time={time}, "
        f"activation_size={sizes}, parameter_size={parameters}"
    )


def written(folder: Path, *lines: str, name: str = "net-pbs-4.txt", end: str = "\n") -> Path:
    path = folder / name
    path.write_bytes(end.join(lines).encode())
    return path


def names(profile: Profile) -> list[str]:
    return [layer.name for layer in profile.layers]


def test_every_figure_of_a_file_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "node1 -- embed -- forward_compute_time=1.5, backward_compute_time=3, activation_size=100, parameter_size=40",
        "node2 -- head -- forward_compute_time=0, backward_compute_time=0.000, activation_size=7.0, parameter_size=0",
        "\tnode1 -- node2",
    )
    assert read_graph_file(path) == Profile(
        model="net",
        batch_size=4,
        device="unknown",
        layers=(LayerCost("embed", 0.0015, 0.003, 100, 100, 40), LayerCost("head", 0, 0, 7, 0, 0)),
        edges=((0, 1),),
    )


def test_a_given_batch_size_overrides_the_file_name(tmp_path: Path) -> None:
    assert read_graph_file(written(tmp_path, node(1)), batch_size=32).batch_size == 32
    assert read_graph_file(written(tmp_path, node(1), name="graph.txt"), batch_size=32).model == "graph"


def test_list_activations_are_summed(tmp_path: Path) -> None:
    (layer,) = read_graph_file(written(tmp_path, node(1, sizes="[100; 20.5;3]"))).layers
    assert layer.activation_bytes == layer.stash_bytes == 123.5


def test_size_scale_multiplies_every_size(tmp_path: Path) -> None:
    (layer,) = read_graph_file(written(tmp_path, node(1, sizes="[1e6; 1e6]", parameters="3e6")), None, 1.048576).layers
    assert layer == LayerCost("l1", 0.001, 0.001, 2 * 2**20, 2 * 2**20, 3 * 2**20)


def test_inputs_cost_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, node(1, "Input0", time="17"), node(2), "  node1 -- node2")
    assert read_graph_file(path).layers == (make_layer("Input0"), LayerCost("l2", 0.001, 0.001, 8, 8, 16))


@pytest.mark.parametrize(
    "name",
    [
        "Embedding(36560, 1024, padding_idx=0)",
        "A(  (a): L(x=1, y=2)  (b): M -- forward_compute_time=3)",
        "x -- y",
        "node7",
    ],
)
def test_names_may_contain_any_text(tmp_path: Path, name: str) -> None:
    assert names(read_graph_file(written(tmp_path, node(1, name)))) == [name]


def test_repeated_names_are_prefixed_with_their_nodes(tmp_path: Path) -> None:
    path = written(tmp_path, node(1, "Add"), node(2, "Add"), node(3), "node1 -- node2", "node2 -- node3")
    assert names(read_graph_file(path)) == ["node1 Add", "node2 Add", "l3"]


@pytest.mark.parametrize("edge", ["\tnode1 -- node2", "  node1 -- node2", " \tnode1 -- node2", "node1 --  node2  \t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_white_space_is_accepted(tmp_path: Path, edge: str, end: str) -> None:
    lines = ("", node(1) + "  ", "", node(2), edge, edge, "  ")
    profile = read_graph_file(written(tmp_path, *lines, end=end))
    assert (names(profile), profile.edges) == (["l1", "l2"], ((0, 1),))


def test_the_stage_numbers_of_pipedreams_optimizer_are_ignored(tmp_path: Path) -> None:
    assert names(read_graph_file(written(tmp_path, node(1) + " -- stage_id=3"))) == ["l1"]


def test_edges_may_come_first_and_nodes_in_any_order(tmp_path: Path) -> None:
    path = written(tmp_path, "node1 -- node7", "node7 -- node4", node(4), node(7), node(1))
    profile = read_graph_file(path)
    assert (names(profile), profile.edges) == (["l1", "l7", "l4"], ((0, 1), (1, 2)))


def test_the_files_order_is_kept_where_it_can_run(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        *map(node, (1, 5, 2, 4, 3)),
        *("node1 -- node5", "node1 -- node2"),
        *(f"node{n} -- node3" for n in (5, 2, 4)),
    )
    assert names(read_graph_file(path)) == ["l1", "l5", "l2", "l4", "l3"]


def test_a_layer_that_reads_only_inputs_comes_right_before_its_first_reader(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        node(1, "Input0"),
        node(2, "Input1"),
        node(3, "embed1"),  # reads Input1 only
        node(4, "embed0"),
        node(5, "encoder"),
        node(6, "decoder"),
        node(7, "more"),
        *("node1 -- node4", "node4 -- node5", "node5 -- node6", "node6 -- node7"),
        *("node2 -- node3", "node3 -- node6", "node3 -- node7"),
    )
    assert names(read_graph_file(path)) == ["Input0", "embed0", "encoder", "Input1", "embed1", "decoder", "more"]


def test_a_layer_that_reads_a_layer_with_cost_keeps_its_place(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        *map(node, (1, 2, 3, 4)),
        *("node1 -- node2", "node1 -- node3", "node3 -- node4", "node2 -- node4"),
    )
    assert names(read_graph_file(path)) == ["l1", "l2", "l3", "l4"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file holds no nodes"),
        (["", "  "], "the file holds no nodes"),
        (["node1 -- node2"], "the file holds no nodes"),
        ([node(2), "node1 -- node2"], "line 2: node1 -- node2 names node1, but no line describes it"),
        ([node(1), "\tnode1 -- node2"], "line 2: node1 -- node2 names node2, but no line describes it"),
        ([node(1), "\tnode1 -- node1"], "line 2: node1 -- node1 is an edge from a node to itself"),
        ([node(1), "hello"], "line 2: 'hello' is neither 'nodeN -- name -- figures' nor 'nodeN -- nodeM'"),
        ([node(1), "node2"], "line 2: 'node2' is neither"),
        ([node(1), "", node(1)], "line 3: node1 was already given in line 1"),
        ([node(1), "node2 -- dense"], "line 2: 'dense' lacks forward_compute_time; is the file truncated"),
        ([node(1)[:60]], "line 1: cannot read .* among the figures of 'l1'|line 1: 'l1' lacks"),
        ([node(1)[:-18]], "line 1: 'l1' lacks parameter_size; is the file truncated"),
        ([node(1, sizes="[1; 2")[:-20]], "line 1: cannot read .* among the figures of 'l1'; is the file truncated"),
        ([node(1, time="-1")], "line 1: forward_compute_time is '-1', not a finite number of at least 0"),
        ([node(1, time="nan")], "line 1: forward_compute_time is 'nan', not a finite number"),
        ([node(1, time="1_0")], "line 1: forward_compute_time is '1_0', not a finite number"),
        ([node(1, sizes="[3; -2]")], r"line 1: activation_size is '\[3; -2\]', not a finite number"),
        ([node(1, sizes="[]")], r"line 1: activation_size is '\[\]', not a finite number"),
        ([node(1, parameters="1e999")], "line 1: parameter_size is '1e999', not a finite number"),
        ([node(1, parameters="")], "line 1: parameter_size is '', not a finite number"),
        ([node(1, parameters="[1; 2]")], r"line 1: parameter_size is '\[1; 2\]', not a finite number"),
        (
            [node(1), node(2), node(3), "node1 -- node2", "node2 -- node3", "node3 -- node2"],
            r"in a cycle: 1 \(line 2: node2 l2\) -> 2 \(line 3: node3 l3\) -> 1",
        ),
        (
            [node(1), node(2), node(3), "node1 -- node2"],
            r"layer 2 \(line 3: node3 l3\) is not connected to the rest: the graph has 2 parts",
        ),
        ([node(1), node(2)], "is not connected to the rest: the graph has 2 parts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(ProfileError, match=f"^{path}: .*({message})"):
        read_graph_file(path)


def test_a_missing_batch_size_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"graph.txt: it is no JSON file .* give the batch size"):
        read_graph_file(written(tmp_path, node(1), name="graph.txt"))
    with pytest.raises(ProfileError, match="batch_size is 0; it must be at least 1"):
        read_graph_file(written(tmp_path, node(1), name="graph-pbs-0.txt"))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_size_scale_is_refused(tmp_path: Path, scale: float) -> None:
    with pytest.raises(ProfileError, match=r"size_scale is .*, not a finite number above 0"):
        read_graph_file(written(tmp_path, node(1)), size_scale=scale)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-pbs-1.txt").write_bytes(b"\xff\xfe")
    for name, problem in (
        ("a-pbs-1.txt", "not a readable text file"),
        ("absent-pbs-1.txt", "there is no such file; `dapple profile MODEL -o profile.json` makes"),
        ("zoo.py:net", "there is no such file; `dapple profile .*zoo.py:net -o profile.json` makes"),
    ):
        path = tmp_path / name
        with pytest.raises(ProfileError, match=f"^{path}: {problem}"):
            read_profile(path)


def test_the_format_of_a_profile_is_detected_by_its_content(tmp_path: Path) -> None:
    profile = make_profile(make_layer())
    profile.save(tmp_path / "a-pbs-2.txt")
    assert read_profile(tmp_path / "a-pbs-2.txt") == profile
    graph = written(tmp_path, node(1), name="graph.json")
    assert read_profile(graph, batch_size=3) == read_graph_file(graph, batch_size=3)


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"size_scale": 2.0}])
def test_the_options_of_graph_files_are_refused_for_a_dapple_profile(tmp_path: Path, options: dict[str, float]) -> None:
    make_profile(make_layer()).save(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=r"p.json: batch_size and size_scale are for graph.txt files"):
        read_profile(tmp_path / "p.json", **options)  # type: ignore[arg-type]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], list[bool]]:
    """Node numbers in the file's order, edges of a connected DAG in any order, and whether each node costs nothing."""
    n = draw(st.integers(1, 8))
    edges = {(draw(st.integers(0, reader - 1)), reader) for reader in range(1, n)}
    return (
        draw(st.permutations(range(n))),
        draw(st.permutations(sorted(edges))),
        draw(st.lists(st.booleans(), min_size=n, max_size=n)),
    )


@given(graph=graphs())
def test_every_graph_is_imported_completely_in_an_order_that_can_run(
    tmp_path_factory: pytest.TempPathFactory, graph: tuple[list[int], list[tuple[int, int]], list[bool]]
) -> None:
    numbers, edges, free = graph
    lines = [node(k, *(["", "0", "0", "0"] if free[k] else ["", "1", str(k + 1), "5"])) for k in numbers]
    path = written(tmp_path_factory.mktemp("graph"), *lines, *(f"\tnode{a} -- node{b}" for a, b in edges))
    profile = read_graph_file(path)  # Profile itself refuses an order that cannot run
    assert sorted(names(profile)) == sorted(f"l{k}" for k in numbers)
    found = {(profile.layers[a].name, profile.layers[b].name) for a, b in profile.edges or ()}
    assert found == {(f"l{a}", f"l{b}") for a, b in edges}


PUBLISHED = {  # nodes, batch size, whole seconds, parameter bytes: added up with awk
    "amoeba-36-pbs-1": (44, 1, 0.16805, 3731135780),
    "bert-24-pbs-6": (29, 6, 0.515357, 1340567552),
    "bert-48-pbs-2": (53, 2, 0.343757, 2549805056),
    "gnmt-16-pbs-64": (96, 64, 0.248916, 1162988352),
    "vgg-19-pbs-32": (26, 32, 0.14421, 548047022),
    "xlnet-36-pbs-1": (43, 1, 0.30071, 2003000000),
}


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles (../shared/profiles) are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_profiles_can_be_read(name: str) -> None:
    profile = read_profile(SHARED_PROFILES / f"{name}.txt")
    layers, batch_size, seconds, parameters = PUBLISHED[name]
    total = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)
    assert (len(profile.layers), profile.batch_size) == (layers, batch_size)
    assert total == pytest.approx(seconds, rel=1e-9)
    assert sum(layer.parameter_bytes for layer in profile.layers) == pytest.approx(parameters, rel=1e-9)


PIPEDREAM = {  # nodes, batch size, seconds of all nodes but inputs, parameter bytes: added up from the files' text
    "alexnet": (23, 256, 0.085321, 244403360),
    "gnmt": (48, 64, 0.089416, 775063808),
    "gnmt_large": (96, 64, 0.520453, 1110870272),
    "resnet50": (177, 128, 0.443419, 102228128),
    "vgg16": (41, 128, 0.672535, 553430176),
}


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles (../shared/profiles) are not here")
@pytest.mark.parametrize("name", PIPEDREAM)
def test_the_profiles_of_pipedream_can_be_read_without_the_seconds_that_inputs_take_to_load(name: str) -> None:
    layers, batch_size, seconds, parameters = PIPEDREAM[name]
    profile = read_profile(SHARED_PROFILES / "pipedream" / f"{name}.txt", batch_size)
    assert len(profile.layers) == layers
    assert sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers) == pytest.approx(seconds)
    assert sum(layer.parameter_bytes for layer in profile.layers) == pytest.approx(parameters, rel=1e-9)


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles (../shared/profiles) are not here")
def test_gnmts_second_embedding_comes_right_before_its_reader() -> None:
    order = [layer.name.partition("(")[0] for layer in read_profile(SHARED_PROFILES / "gnmt-16-pbs-64.txt").layers]
    reader = order.index("RecurrentAttention")
    assert order[reader - 4 : reader] == ["Input2", "node41 Embedding", "hidden", "node42 __getitem__"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1 -- a -- forward_compute_time=1" + " " * 30_000 + "x", "lacks backward_compute_time|not a finite"),
        ("node1 -- a -- forward_compute_time=" + "1" * 30_000 + "x", "not a finite number"),
        ("node1 -- a -- forward_compute_time=1, " + "[" * 30_000, "cannot read"),
        ("node1 -- a -- forward_compute_time=1, " + "[a" * 30_000, "cannot read"),
        ("node1 -- a -- forward_compute_time=1" + ", x" * 30_000, "cannot read 'x' among"),
        ("node1 -- a" + " -- forward_compute_time" * 5_000, "lacks forward_compute_time|cannot read|lacks backward"),
        ("node1" + " " * 30_000 + "x", "is neither"),
        ("node" + "1" * 30_000 + " --", "is neither"),
    ],
)
def test_a_long_line_is_refused_at_once(tmp_path: Path, line: str, message: str) -> None:
    """Thirty thousand spaces once took minutes."""
    path = tmp_path / "graph-pbs-1.txt"
    path.write_text(line + "\n")
    with at_most(1), pytest.raises(ProfileError, match=message) as caught:
        read_graph_file(path)
    assert len(str(caught.value)) < 1000


def test_many_nodes_of_one_name_are_read_at_once(tmp_path: Path) -> None:
    lines = [node(number, name="same") for number in range(10_000)]
    lines += [f"\tnode{number} -- node{number + 1}" for number in range(9_999)]
    path = tmp_path / "graph-pbs-1.txt"
    path.write_text("\n".join(lines))
    with at_most(5):
        assert len(read_graph_file(path).layers) == 10_000
