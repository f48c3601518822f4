"""The cause of a failed step in TensorFlow's error message."""

from __future__ import annotations

import pytest

from dapple_tf.backend.program import find_cause

MESSAGE = """Graph execution error:

Detected at node sent/DequeueMany defined at (most recent call last):
2 root error(s) found.
  (0) {first}
  (1) {second}
0 successful operations.
0 derived errors ignored. [Op:__inference_step_1]"""
OWN = "CANCELLED:  Dequeue operation was cancelled\n\t [[{{node sent/DequeueMany}}]]"
CAUSE = "INVALID_ARGUMENT:    Tensor had NaN values\n\t [[stage1/forward]]"


@pytest.mark.parametrize(("first", "second"), [(CAUSE, OWN), (OWN, CAUSE)])
def test_the_first_root_error_that_is_not_a_cancellation_is_the_cause(first: str, second: str) -> None:
    message = MESSAGE.format(first=first, second=second)
    assert find_cause(message) == "Tensor had NaN values\n\t [[stage1/forward]]"


def test_a_message_without_root_errors_is_its_own_cause() -> None:
    assert find_cause("out of memory") == "out of memory"


def test_the_ops_of_a_loop_have_the_number_of_the_micro_batch_that_ran() -> None:
    message = (
        "bad\n\t [[{{node while/body/_1/while/stage1/replica0/mb4/forward/Call}}]]\n\t [[stage1/replica0/mb2/forward]]"
    )
    assert find_cause(message, 17) == message.replace("mb4", "mb17")
    assert find_cause(message) == message


ONE_ERROR = """Graph execution error:

Detected at node body/CheckNumerics defined at (most recent call last):
{places}bad loss : Tensor had NaN values
\t [[{{{{node body/CheckNumerics}}}}]] [Op:__inference_step_1]"""


@pytest.mark.parametrize("places", ["<stack traces unavailable>\n", '  File "train.py", line 1, in loss\n', ""])
def test_the_places_at_which_a_graph_was_built_are_left_out(places: str) -> None:
    found = find_cause(ONE_ERROR.format(places=places))
    assert found == "bad loss : Tensor had NaN values\n\t [[{{node body/CheckNumerics}}]] [Op:__inference_step_1]"
